"""Stop rules of a run."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Self

from pydantic import Field, model_validator

from fedsync.config.sections.section import Section
from fedsync.config.sections.selecting import TOLD, PatienceConfig, TargetConfig, is_higher
from fedsync.config.tasks.task_kinds import TaskConfig
from fedsync.config.training import PositiveInt
from fedsync.core.stopping import StopRules
from fedsync.evaluation.best_version import Selection
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.policies.schema import Share


class StopConfig(Section):
    """Stop rules; the run ends at the first rule that applies."""

    rounds: PositiveInt | None = None
    """Number of commits, each of which makes a model version. Barriers that commit every arrival count each arrival."""

    seconds: Annotated[float, Field(gt=0)] | None = None
    """Time since the run began, virtual or real [s]."""

    target_accuracy: float | None = None
    """Accuracy of an evaluated version at which the run ends. For most tasks it is a share above 0 and at most 1; tasks
    with another score allow other numbers."""

    target: TargetConfig | None = None
    """Target value of any metric, as in ``{metric: auroc, at_least: 0.85}``."""

    patience: PositiveInt | PatienceConfig | None = None
    """Consecutive evaluated versions without a better accuracy, after which the run ends. For another metric, write
    ``{metric: auroc, versions: 5}``."""

    relative_change: Share | None = None
    """Relative change of the training loss at which the run ends, measured while the slowest silo goes through its data
    once."""

    @model_validator(mode="after")
    def _must_end(self) -> Self:
        if self.rounds is None and self.seconds is None:
            raise ValueError("nothing bounds the run; add `rounds` or `seconds`")
        return self

    def build(self, metrics: Sequence[AnyMetric] = ()) -> StopRules:
        """Return the rules, given the metrics of the run.

        Raises:
            ConfigError: a rule needs a metric that the run does not compute.
        """
        patience, steady = self.patience, None
        if isinstance(patience, PatienceConfig):
            steady = Selection(patience.metric, is_higher(patience.metric, metrics, "stop.patience.metric"))
            patience = patience.versions
        target = None if self.target is None else self.target.build(metrics)
        return StopRules(
            self.rounds, self.seconds, self.target_accuracy, patience, self.relative_change, target, steady
        )

    @property
    def by_metric(self) -> bool:
        """Whether a rule uses a metric other than accuracy and loss."""
        rules = (self.target, self.patience)
        return any(isinstance(rule, TargetConfig | PatienceConfig) and rule.metric not in TOLD for rule in rules)

    @property
    def by_score(self) -> bool:
        """Whether a rule uses results of evaluations."""
        return any(rule is not None for rule in (self.target_accuracy, self.target, self.patience))


def unreachable(target: float, task: TaskConfig) -> tuple[str, str]:
    """Problem and remedy of a target accuracy that the task cannot reach; both empty if it can."""
    match task.scores:
        case "share" if not 0 < target <= 1:
            what, remedy = "a share of right answers", "write a number greater than 0 and at most 1"
        case "error" if not target <= 0:
            what, remedy = "minus an error", "write a number of at most 0"
        case _ if not isfinite(target):
            what, remedy = "a number", "write a finite number"
        case _:
            return "", ""
    return f"{target:g} is not allowed: accuracy of this {task.kind} task is {what}", remedy
