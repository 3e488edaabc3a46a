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
        steady: selection rule for ``patience``; None for accuracy.
    """

    rounds: int | None = None
    seconds: float | None = None
    target_accuracy: float | None = None
    patience: int | None = None
    target: Target | None = None
    steady: Selection | None = None

    def decide(self, commits: int, now_s: float, scores: Scores, leaders: Leaders | None = None) -> str | None:
        leaders = leaders or Leaders()
        if self.target is not None and self.target.reached(leaders.target):
            name, bound = self.target.rule.metric, self.target.bound
            side = "at least" if self.target.rule.higher else "at most"
            return f"target reached: {name} {side} {bound:g}, it is {leaders.target.value:.4f}"
        if self.target_accuracy is not None and scores.best >= self.target_accuracy:
            return f"target accuracy {self.target_accuracy:g} reached: {scores.best:.4f}"
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
