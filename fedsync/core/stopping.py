"""Stop rules of a run, such as a number of rounds or a target accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedsync.core.orders import Evaluation, Score
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.version_scores import Leader, Scores, Selection


@dataclass(frozen=True, slots=True)
class Target:
    """Target value: at least ``bound`` if more is better, else at most ``bound``."""

    rule: Selection
    bound: float

    def reached(self, best: Leader) -> bool:
        if best.score is None:
            return False
        return best.value >= self.bound if self.rule.higher else best.value <= self.bound


@dataclass(frozen=True, slots=True)
class Leaders:
    """Best versions by the rules of selection (``best``, whose model is kept), ``target`` and ``patience``."""

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
        pairs = zip((self.best, self.target, self.patience), rules, strict=True)
        return Leaders(*(now if rule is None else now.after(rule, score, found, metrics) for now, rule in pairs))


@dataclass(frozen=True, slots=True)
class StopRules:
    """Stop rules; the first that holds ends the run, and None disables a rule.

    Args:
        rounds: number of commits; a rollback is no commit.
        seconds: virtual or wall time since the first order [s].
        target_accuracy: accuracy of an evaluated version, or any number for a task with another score.
        patience: number of consecutive evaluated versions without improvement of accuracy or of ``steady``.
        relative_change: change of the training loss between two checks; see `Passes`.
        steady: selection rule for ``patience``; None for accuracy.
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
    examples: int
    samples: int = 0
    loss: float = 0.0


@dataclass(slots=True)
class Passes:
    """Training loss at checks; a check is due after each pass of the slowest silo over its data.

    Checks do not follow rounds, because in a short round the loss changes little. A check is due when every connected
    silo has processed as many samples as it holds since the last check. The loss of a check is ``sum_i n_i l_i / sum_i
    n_i``, where l_i is the mean training loss of silo i since the last check and n_i its number of samples: more steps
    give a silo no more weight. Under sealed losses, it is the mean of the losses that silos attested since the last
    check, and the check waits for one. Attested losses are a commit late.

    Args:
        loss: loss at the last check, None before the first.
        change: relative change between the last two checks; None before the second.

    Source: FSP, section 5.3. Counting the slowest silo's samples is equivalent to measuring its seconds.
    """

    loss: float | None = None
    change: float | None = None
    _since: dict[str, _Pass] = field(default_factory=dict)
    _unfinished: int = 0
    _attested: tuple[float, int] = (0.0, 0)

    def join(self, silo: str, examples: int) -> None:
        self.leave(silo)
        self._since[silo] = _Pass(examples)
        self._unfinished += 1

    def leave(self, silo: str) -> None:
        mine = self._since.pop(silo, None)
        if mine is not None and mine.samples < mine.examples:
            self._unfinished -= 1

    def add(self, silo: str, examples: int, samples: int, loss: float | None) -> None:
        """Count ``samples`` and their mean training loss (None if sealed); check if all passes are complete."""
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
