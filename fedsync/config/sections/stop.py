"""When a run ends."""

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
    """When the run ends: whichever comes first."""

    rounds: PositiveInt | None = None
    """Commits, each of which makes a model version. Under barriers that commit every arrival, each arrival is one."""

    seconds: Annotated[float, Field(gt=0)] | None = None
    """Seconds since the run began, virtual or real [s]."""

    target_accuracy: float | None = None
    """Accuracy of an evaluated version at which the run ends. What it may be depends on the task: a share, above 0 and
    at most 1, or another number where the task scores something else."""

    target: TargetConfig | None = None
    """The same for any metric: ``{metric: auroc, at_least: 0.85}``."""

    patience: PositiveInt | PatienceConfig | None = None
    """Evaluated versions in a row without a better accuracy; or ``{metric: auroc, versions: 5}``."""

    relative_change: Share | None = None
    """The run ends once the training loss changes by no more than this share of itself while the slowest silo goes
    through its data once."""

    @model_validator(mode="after")
    def _must_end(self) -> Self:
        if self.rounds is None and self.seconds is None:
            raise ValueError("nothing bounds the run; add `rounds` or `seconds`")
        return self

    def build(self, metrics: Sequence[AnyMetric] = ()) -> StopRules:
        """The rules, given the metrics of the run.

        Raises:
            ConfigError: a rule goes by what is not among them.
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
        """Whether a rule goes by what only a run's metrics say."""
        rules = (self.target, self.patience)
        return any(isinstance(rule, TargetConfig | PatienceConfig) and rule.metric not in TOLD for rule in rules)

    @property
    def by_score(self) -> bool:
        """Whether the run ends by what evaluations find."""
        return any(rule is not None for rule in (self.target_accuracy, self.target, self.patience))


def unreachable(target: float, task: TaskConfig) -> tuple[str, str]:
    """Why a target accuracy makes no sense for the task, and what would; both empty if it does."""
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
