"""What a run's evaluations say of a model, beside loss and score."""

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
"""What a run says whose metrics nobody knows."""


class EvaluationConfig(Section):
    """What is worked out of every evaluation."""

    metrics: list[str] | None = None
    """Names of metrics, shipped ones or the task's own; left out, those that the task has, and with ``[]`` none."""

    classes: Annotated[int, Field(ge=2)] | None = None
    """Number of classes that there are to tell apart; left out, the task says."""

    cross_site: CrossSiteConfig | None = None
    """Every silo's test samples under models of the run and of silos alone; left out, those of the run only."""

    best: BestConfig = Field(default_factory=BestConfig)
    """Which version of the model is kept as the best; left out, that with the best accuracy over all silos."""

    @property
    def wanted(self) -> Wanted:
        """What silos are to measure; nothing, as long as nobody asked the task."""
        return Wanted(tuple(self.metrics or ()), self.classes)

    def of_task(self, task: TaskSection) -> EvaluationConfig:
        """The same with everything in it that the task says.

        Where the task cannot be asked, names that are left out stay so: nothing beside loss and score is measured.

        Raises:
            ConfigError: the metrics do not fit the task.
        """
        if self.metrics is not None and (self.classes is not None or not self.metrics):
            return self
        try:
            told = Wanted.of(task.build().metrics())
        except ConfigError as error:
            # The data are elsewhere, or only silos know the model: what is asked for by name has to do without.
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
        """The metrics; the task is asked for its own only where a name is not shipped.

        Raises:
            ConfigError: there is none such, or it does not fit.
        """
        return self.wanted.metrics(lambda: task.build().metrics())
