"""By which metric a run chooses: which version is the best, and when it has done enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import Field, model_validator

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.named_code import function_of
from fedsync.config.sections.section import Section
from fedsync.config.training import PositiveInt
from fedsync.core.stopping import Target
from fedsync.evaluation.best_version import Selection
from fedsync.evaluation.metrics.metric_types import AnyMetric

TOLD = {"accuracy": True, "loss": False}
"""What every task tells, and whether more of it is better."""

_SINGLE = "with sealed metrics nobody but a silo itself knows its numbers"


class BestConfig(Section):
    """Which version of the model is kept as the best, in ``best.pt``."""

    metric: str = "accuracy"
    """Name of a metric that is worked out, or ``accuracy`` or ``loss``; whether more or less is better, the metric
    says."""

    by: Annotated[str, Field(pattern=r"^(pooled|worst|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "pooled"
    """``pooled``: over all silos; ``worst``: of the silo where it is worst; or a function of yours, ``module:name``."""

    def build(self, metrics: Sequence[AnyMetric]) -> Selection:
        """The rule, given the metrics of the run.

        Raises:
            ConfigError: the metric is none of these, or there is no such function.
        """
        higher = is_higher(self.metric, metrics, "evaluation.best.metric")
        if self.by in ("pooled", "worst"):
            return Selection(self.metric, higher, self.by)  # type: ignore[arg-type]
        return Selection("", higher=True, by=function_of(self.by, "evaluation.best.by"))


class TargetConfig(Section):
    """A value of a metric at which the run ends."""

    metric: str
    """Name of a metric that is worked out, or ``accuracy`` or ``loss``."""

    at_least: float | None = None
    """For a metric of which more is better."""

    at_most: float | None = None
    """For a metric of which less is better."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a target has one bound; write at_least where more is better, else at_most")
        return self

    def build(self, metrics: Sequence[AnyMetric]) -> Target:
        """The rule, given the metrics of the run.

        Raises:
            ConfigError: the metric is none of these, or never has such a value, or less of it is better, or more.
        """
        place, higher = "stop.target", is_higher(self.metric, metrics, "stop.target.metric")
        bound = self.at_least if higher else self.at_most
        if bound is None:
            wrong, right = ("at_most", "at_least") if higher else ("at_least", "at_most")
            problem = (
                f"{'more' if higher else 'less'} of {self.metric} is better, and {wrong} would end a run that is bad"
            )
            raise ConfigError(f"{place}.{wrong}", problem, f"Write {right}")
        low, high = next((metric.limits for metric in metrics if metric.name == self.metric), (bound, bound))
        if not low <= bound <= high or (low < high and bound == (low if higher else high)):
            problem = f"{bound:g} is not allowed: {self.metric} lies between {low:g} and {high:g}"
            raise ConfigError(place, problem, "Write a value that is not reached from the beginning, and can be")
        return Target(Selection(self.metric, higher), bound)


class PatienceConfig(Section):
    """How long a metric may do without a better value."""

    metric: str
    """Name of a metric that is worked out, or ``accuracy`` or ``loss``."""

    versions: PositiveInt
    """Evaluated versions in a row."""


def is_higher(name: str, metrics: Sequence[AnyMetric], place: str) -> bool:
    """Whether more of a metric is better.

    Raises:
        ConfigError: the run does not work it out.
    """
    known = {**TOLD, **{metric.name: metric.higher_is_better for metric in metrics}}
    if name not in known:
        remedy = f"Choose one of {', '.join(sorted(known))}, or add it to evaluation.metrics"
        raise ConfigError(place, f"{name!r} is not worked out in this run", remedy)
    return known[name]


def needs_single_silos(best: BestConfig) -> str:
    """Why this choice makes no sense where figures are sealed; empty if it does."""
    return "" if best.by == "pooled" else f"evaluation.best.by {best.by!r}: {_SINGLE}; write pooled"
