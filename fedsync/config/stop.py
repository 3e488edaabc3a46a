"""When a run ends."""

from __future__ import annotations

from math import isfinite
from typing import Annotated, Self

from pydantic import Field, model_validator

from fedsync.config.section import Section
from fedsync.config.tasks import TaskConfig
from fedsync.config.training import PositiveInt
from fedsync.core.stopping import StopRules
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

    patience: PositiveInt | None = None
    """Evaluated versions in a row without a better accuracy."""

    relative_change: Share | None = None
    """The run ends once the training loss changes by no more than this share of itself while the slowest silo goes
    through its data once."""

    @model_validator(mode="after")
    def _must_end(self) -> Self:
        if self.rounds is None and self.seconds is None:
            raise ValueError("nothing bounds the run; add `rounds` or `seconds`")
        return self

    def build(self) -> StopRules:
        return StopRules(self.rounds, self.seconds, self.target_accuracy, self.patience, self.relative_change)


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
