"""When a run has done enough."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsync.core.scores import Scores


@dataclass(frozen=True, slots=True)
class StopRules:
    """The run ends at whichever comes first; None switches a rule off.

    Args:
        rounds: commits; going back to an earlier model is none.
        seconds: virtual or wall seconds since the run began; the coordinator has itself woken then.
        target_accuracy: of an evaluated version; where the task scores something else than the share of correct
            predictions, any number.
        patience: evaluated versions in a row without a better accuracy.
        relative_change: of the training loss between two checks; see `Passes`.
    """

    rounds: int | None = None
    seconds: float | None = None
    target_accuracy: float | None = None
    patience: int | None = None
    relative_change: float | None = None

    def decide(self, commits: int, now_s: float, scores: Scores, passes: Passes) -> str | None:
        """The reason to stop, or None to go on."""
        if self.target_accuracy is not None and scores.best >= self.target_accuracy:
            return f"target accuracy {self.target_accuracy:g} reached: {scores.best:.4f}"
        if self.relative_change is not None and passes.change is not None and passes.change <= self.relative_change:
            return (
                f"the training loss changed by {passes.change:.3g} of itself while the slowest silo went through its "
                f"data once, not more than {self.relative_change:g}"
            )
        if self.patience is not None and scores.since_best >= self.patience:
            return f"no better accuracy in {self.patience} evaluated versions"
        if self.rounds is not None and commits >= self.rounds:
            return f"{self.rounds} rounds done"
        if self.seconds is not None and now_s >= self.seconds:
            return f"{self.seconds:g} s are over"
        return None


@dataclass(slots=True)
class _Pass:
    """What a silo did since the last check."""

    examples: int
    samples: int = 0
    loss: float = 0.0


@dataclass(slots=True)
class Passes:
    """The training loss from check to check; one check a pass of the slowest silo over its data.

    A round may be arbitrarily short, and then the loss changes little because little was done. So the check
    does not follow the rounds: it is due when every silo here has processed as many samples as it holds since
    the check before. The loss of a check is ``sum_i n_i l_i / sum_i n_i``, where l_i is the mean training loss of
    silo i since the check before and n_i its number of samples: a silo that does more steps counts no more.

    Where losses are sealed, that of a check is the mean of what silos attested since the check before, which it waits
    for. Attested losses come a commit late.

    Args:
        loss: of the last check, None before the first.
        change: between the last two checks, relative to the one before; None before the second.

    Source: FSP, section 5.3. Counting what the slowest silo did, instead of measuring the seconds that it takes,
    comes to the same and needs no forecast.
    """

    loss: float | None = None
    change: float | None = None
    _since: dict[str, _Pass] = field(default_factory=dict)
    _unfinished: int = 0
    _attested: tuple[float, int] = (0.0, 0)

    def join(self, silo: str, examples: int) -> None:
        """A silo with this many training samples is there; one that joins again begins its pass anew."""
        self.leave(silo)
        self._since[silo] = _Pass(examples)
        self._unfinished += 1

    def leave(self, silo: str) -> None:
        """A silo is gone, or nothing comes of its orders; nobody waits for its pass."""
        mine = self._since.pop(silo, None)
        if mine is not None and mine.samples < mine.examples:
            self._unfinished -= 1

    def add(self, silo: str, examples: int, samples: int, loss: float | None) -> None:
        """A silo processed ``samples`` at this mean training loss, None if sealed; checks if that ends a pass of all.

        One that had left is waited for again.
        """
        if silo not in self._since:
            self.join(silo, examples)
        mine = self._since[silo]
        if mine.samples < mine.examples <= mine.samples + samples:
            self._unfinished -= 1
        mine.samples += samples
        if loss is None:
            self._check_attested()
            return
        mine.loss += samples * loss
        if self._unfinished == 0:
            passes = self._since.values()
            weight = sum(each.examples for each in passes)
            self._check(sum(each.examples * each.loss / each.samples for each in passes) / weight)

    def attest(self, loss: float) -> None:
        """Silos attest a mean training loss; checks if that is what a check waits for."""
        total, count = self._attested
        self._attested = total + loss, count + 1
        self._check_attested()

    def _check_attested(self) -> None:
        total, count = self._attested
        if self._unfinished == 0 and self._since and count:
            self._attested = 0.0, 0
            self._check(total / count)

    def _check(self, loss: float) -> None:
        if self.loss is not None:
            self.change = abs(loss - self.loss) / max(abs(self.loss), 1e-12)
        self.loss = loss
        self._since = {name: _Pass(each.examples) for name, each in self._since.items()}
        self._unfinished = len(self._since)
