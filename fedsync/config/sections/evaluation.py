"""Configuration of evaluations beyond loss and score."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.config.sections.cross_site import CrossSiteConfig
from fedsync.config.sections.section import Section
from fedsync.config.sections.selecting import BestConfig
from fedsync.config.tasks.sampled_tasks import TaskSection
from fedsync.evaluation.metrics.metric_types import AnyMetric, statistics_of
from fedsync.evaluation.metrics.named import Wanted

logger = foreign.logger(__name__)

UNASKED = (
    "Beside loss and score nothing is measured, for the strategy names no metrics and the server cannot ask the task "
    "which it has. Name them as evaluation.metrics, and evaluation.classes."
)
"""Warning of a run whose metrics are unknown."""


class EvaluationConfig(Section):
    """Evaluation of model versions."""

    metrics: list[str] | None = None
    """Names of metrics, shipped or the task's own. Left out: all metrics of the task; ``[]``: none."""

    classes: Annotated[int, Field(ge=2)] | None = None
    """Number of classes; left out, the task's own number."""

    cross_site: CrossSiteConfig | None = None
    """Comparison of the run's models with models that silos train alone, on every silo's test samples. Left out, only
    the run's models are evaluated."""

    best: BestConfig = Field(default_factory=BestConfig)
    """Rule by which the best version is chosen; left out, the highest accuracy over all silos."""

    @property
    def wanted(self) -> Wanted:
        """Metrics that silos measure; empty until `of_task` has filled in the task's metrics."""
        return Wanted(tuple(self.metrics or ()), self.classes)

    def of_task(self, task: TaskSection) -> EvaluationConfig:
        """Return the section with the task's metrics and classes filled in.

        If the task cannot be built here, omitted metrics stay omitted: only loss and score are measured.

        Raises:
            ConfigError: the metrics do not fit the task.
        """
        if self.metrics is not None and (self.classes is not None or not self.metrics):
            return self
        try:
            told = Wanted.of(task.build().metrics())
        except ConfigError as error:
            # The data are at another machine, or only silos know the model: metrics are then taken by name alone.
            if self.metrics is None:
                if not task.own_loop:
                    logger.warning("%s Here the task cannot be built: %s", UNASKED, error)
                return self
            told = Wanted()
        names = list(told.names) if self.metrics is None else self.metrics
        found = self.model_copy(update={"metrics": names, "classes": self.classes or told.classes})
        statistics_of(found.built(task))
        return found

    def built(self, task: TaskSection) -> tuple[AnyMetric, ...]:
        """Return the metrics; the task is built only if a name is not a shipped metric.

        Raises:
            ConfigError: a metric does not exist or does not fit the task.
        """
        return self.wanted.metrics(lambda: task.build().metrics())
