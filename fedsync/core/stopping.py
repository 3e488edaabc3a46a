"""When a run has done enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedsync.core.orders import Evaluation, Score
from fedsync.evaluation.best_version import Leader, Selection
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.version_scores import Scores


@dataclass(frozen=True, slots=True)
class Target:
    """A value that is enough: at least ``bound`` where more is better, at most ``bound`` else."""

    rule: Selection
    bound: float

    def reached(self, best: Leader) -> bool:
        """Whether a version came to it; the best did, if any."""
        if best.score is None:
            return False
        return best.value >= self.bound if self.rule.higher else best.value <= self.bound


@dataclass(frozen=True, slots=True)
class Leaders:
    """The best version by each rule that a run goes by.

    Args:
        best: by that of the run: its model is kept.
        target: by that of the target.
        patience: by that of the patience.
    """

    best: Leader = field(default_factory=Leader)
    target: Leader = field(default_factory=Leader)
    patience: Leader = field(default_factory=Leader)

    def after(
        self,
        rules: tuple[Selection | None, ...],
        score: Score,
        found: Mapping[str, Evaluation],
        metrics: Sequence[AnyMetric],
    ) -> Leaders:
        """The best once another version was judged by each of these rules, None for one that there is not.

        Other arguments as `Selection.value`'s.
        """
        pairs = zip((self.best, self.target, self.patience), rules, strict=True)
        return Leaders(*(now if rule is None else now.after(rule, score, found, metrics) for now, rule in pairs))


@dataclass(frozen=True, slots=True)
class StopRules:
    """The run ends at whichever comes first; None switches a rule off.

    Args:
        rounds: commits; going back to an earlier model is none.
        seconds: virtual or wall seconds since the run began; the coordinator has itself woken then.
        target_accuracy: of an evaluated version; where the task scores something else than the share of correct
            predictions, any number.
        patience: evaluated versions in a row without a better accuracy, or by the rule of ``steady``.
        relative_change: of the training loss between two checks; see `Passes`.
        target: of any metric.
        steady: which version is better, for ``patience``; None goes by accuracy.
    """

    rounds: int | None = None
    seconds: float | None = None
    target_accuracy: float | None = None
    patience: int | None = None
    relative_change: float | None = None
    target: Target | None = None
    steady: Selection | None = None

    def decide(
        self, commits: int, now_s: float, scores: Scores, passes: Passes, leaders: Leaders | None = None
    ) -> str | None:
        """The reason to stop, or None to go on."""
        leaders = leaders or Leaders()
        if self.target is not None and self.target.reached(leaders.target):
            name, bound = self.target.rule.metric, self.target.bound
            side = "at least" if self.target.rule.higher else "at most"
            return f"target reached: {name} {side} {bound:g}, it is {leaders.target.value:.4f}"
        if self.target_accuracy is not None and scores.best >= self.target_accuracy:
            return f"target accuracy {self.target_accuracy:g} reached: {scores.best:.4f}"
        if self.relative_change is not None and passes.change is not None and passes.change <= self.relative_change:
            return (
                f"the training loss changed by {passes.change:.3g} of itself while the slowest silo went through its "
                f"data once, not more than {self.relative_change:g}"
            )
        since, name = scores.since_best, "accuracy"
        if self.steady is not None:
            since, name = leaders.patience.since, self.steady.metric
        if self.patience is not None and since >= self.patience:
            return f"no better {name} in {self.patience} evaluated versions"
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
