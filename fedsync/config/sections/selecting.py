"""Metrics that choose the best version and end a run."""

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
"""Metrics that every task reports, and whether higher is better."""

_SINGLE = "with sealed metrics nobody but a silo itself knows its numbers"


class BestConfig(Section):
    """Rule by which the best version of the model is chosen, which is kept in ``best.pt``."""

    metric: str = "accuracy"
    """Name of a metric of the run, or ``accuracy`` or ``loss``. The metric defines whether higher is better."""

    by: Annotated[str, Field(pattern=r"^(pooled|worst|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "pooled"
    """``pooled``: value over all silos. ``worst``: value of the silo with the worst value. Or your own function, as
    ``module:name``."""

    def build(self, metrics: Sequence[AnyMetric]) -> Selection:
        """Return the rule, given the metrics of the run.

        Raises:
            ConfigError: the run does not compute the metric, or the function does not exist.
        """
        higher = is_higher(self.metric, metrics, "evaluation.best.metric")
        if self.by in ("pooled", "worst"):
            return Selection(self.metric, higher, self.by)  # type: ignore[arg-type]
        return Selection("", higher=True, by=function_of(self.by, "evaluation.best.by"))


class TargetConfig(Section):
    """Value of a metric at which the run ends."""

    metric: str
    """Name of a metric of the run, or ``accuracy`` or ``loss``."""

    at_least: float | None = None
    """Bound of a metric for which higher is better."""

    at_most: float | None = None
    """Bound of a metric for which lower is better."""

    @model_validator(mode="after")
    def _one_bound(self) -> Self:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError("a target has one bound; write at_least where more is better, else at_most")
        return self

    def build(self, metrics: Sequence[AnyMetric]) -> Target:
        """Return the rule, given the metrics of the run.

        Raises:
            ConfigError: the run does not compute the metric, the bound is in the wrong direction, or no value of the
                metric reaches it, or every value does.
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
    """Number of versions that a metric may go without improvement."""

    metric: str
    """Name of a metric of the run, or ``accuracy`` or ``loss``."""

    versions: PositiveInt
    """Number of consecutive evaluated versions without a better value, after which the run ends."""


def is_higher(name: str, metrics: Sequence[AnyMetric], place: str) -> bool:
    """Whether a higher value of the metric is better.

    Raises:
        ConfigError: the run does not compute the metric.
    """
    known = {**TOLD, **{metric.name: metric.higher_is_better for metric in metrics}}
    if name not in known:
        remedy = f"Choose one of {', '.join(sorted(known))}, or add it to evaluation.metrics"
        raise ConfigError(place, f"{name!r} is not worked out in this run", remedy)
    return known[name]


def needs_single_silos(best: BestConfig) -> str:
    """Reason why the rule contradicts sealed metrics; empty if it does not."""
    return "" if best.by == "pooled" else f"evaluation.best.by {best.by!r}: {_SINGLE}; write pooled"
