"""Sections ``evaluation`` and ``stop``: metrics, best version, comparison with local models, and stop rules."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Annotated, Self

from pydantic import Field, model_validator

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.named_code import function_of
from fedsync.config.cipher import CipherConfig, PlainConfig, sealed_metrics
from fedsync.config.sections.section import EITHER, SECTION, VALUE, Section
from fedsync.core.report_checks import MAX_STATISTICS, MAX_SUMS
from fedsync.core.stopping import StopRules, Target
from fedsync.evaluation.local_baselines import CrossSite
from fedsync.evaluation.metrics.metric_types import AnyMetric, statistics_of
from fedsync.evaluation.metrics.named import Wanted
from fedsync.evaluation.version_scores import Selection
from fedsync.policies.schema import PositiveInt
from fedsync.tasks.task_section import TaskSection

TOLD = {"accuracy": True, "loss": False}
"""Metrics that every task reports, and whether higher is better."""


def higher_is_better(metrics: Sequence[AnyMetric]) -> dict[str, bool]:
    return TOLD | {metric.name: metric.higher_is_better for metric in metrics}


class BestConfig(Section):
    """Rule by which the best version of the model is chosen, which is kept in ``best.pt``."""

    metric: str = "accuracy"
    """Name of a metric of the run, or ``accuracy`` or ``loss``. The metric defines whether higher is better."""

    by: Annotated[str, Field(pattern=r"^(pooled|worst|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "pooled"
    """``pooled``: value over all silos. ``worst``: value of the silo with the worst value. Or your own function, as
    ``module:name``."""

    def build(self, metrics: Sequence[AnyMetric]) -> Selection:
        """Return the rule; raises `ConfigError` if the run lacks the metric, or the function does not exist."""
        higher = is_higher(self.metric, metrics, "evaluation.best.metric")
        if self.by in ("pooled", "worst"):
            return Selection(self.metric, higher, self.by)  # type: ignore[arg-type]
        return Selection(self.by, higher=True, by=function_of(self.by, "evaluation.best.by"))


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
            raise ValueError("a target has one bound; write at_least if larger values are better, else at_most")
        return self

    def build(self, metrics: Sequence[AnyMetric]) -> Target:
        """Return the rule. Raises `ConfigError` if the run does not compute the metric, the bound is in the wrong
        direction, or no value of the metric, or every value, reaches the bound.
        """
        place, higher = "stop.target", is_higher(self.metric, metrics, "stop.target.metric")
        bound = self.at_least if higher else self.at_most
        if bound is None:
            wrong, right = ("at_most", "at_least") if higher else ("at_least", "at_most")
            better = "larger" if higher else "smaller"
            problem = f"{better} values of {self.metric} are better, so {wrong} would stop the run on a bad model"
            raise ConfigError(f"{place}.{wrong}", problem, f"Write {right}")
        low, high = next((metric.limits for metric in metrics if metric.name == self.metric), (bound, bound))
        if not low <= bound <= high or (low < high and bound == (low if higher else high)):
            problem = f"{bound:g} is not allowed: {self.metric} lies between {low:g} and {high:g}"
            raise ConfigError(place, problem, "Write a value between these limits")
        return Target(Selection(self.metric, higher), bound)


class PatienceConfig(Section):
    """Number of versions that a metric may go without improvement."""

    metric: str
    """Name of a metric of the run, or ``accuracy`` or ``loss``."""

    versions: PositiveInt
    """Number of consecutive evaluated versions without a better value, after which the run ends."""


def is_higher(name: str, metrics: Sequence[AnyMetric], place: str) -> bool:
    """Whether a higher value of the metric is better; raises `ConfigError` if the run does not compute it."""
    known = higher_is_better(metrics)
    if name not in known:
        remedy = f"Choose one of {', '.join(sorted(known))}, or add it to evaluation.metrics"
        raise ConfigError(place, f"{name!r} is not computed in this run", remedy)
    return known[name]


class AloneConfig(Section):
    """Length of the silos' training alone."""

    rounds: PositiveInt
    """Number of orders, each with the steps and samples that the silo would have had in the next round."""


class CrossSiteConfig(Section):
    """Training of each silo alone after the run, to compare its model with the run's models. See docs/cross-site.md."""

    local: Annotated[Annotated[bool, VALUE] | Annotated[AloneConfig, SECTION], EITHER] = True
    """Whether each silo trains alone from the run's first model, with as many samples as it processed in the run.
    ``{rounds: 40}`` sets the number of orders instead."""

    fine_tune: Annotated[int, Field(ge=0)] = 0
    """Steps for which each silo trains the run's best model further with its own data; 0 for none."""

    @model_validator(mode="after")
    def _trains(self) -> Self:
        if not self.local and not self.fine_tune:
            raise ValueError("cross_site trains no model; write local: true, or fine_tune: 20, or leave cross_site out")
        return self

    def check(self, cipher: CipherConfig, evaluated: float, *, given: bool) -> None:
        """Raise ValueError if no silo evaluates, or if silos do not keep the best model, or a ``given`` first model."""
        if evaluated == 0:
            raise ValueError("fraction_evaluate 0: no silo evaluates the models of evaluation.cross_site; write 1.0")
        if given and self.local and not isinstance(cipher, PlainConfig):
            raise ValueError(
                "evaluation.cross_site.local starts from the task's model in an encrypted run, not from initial_model, "
                "so the two cannot be compared; write local: false and fine_tune: 20, or leave initial_model out"
            )
        if not isinstance(cipher, PlainConfig) and sealed_metrics(cipher) is None and self.fine_tune:
            raise ValueError(
                "evaluation.cross_site.fine_tune starts from the best model, which silos of an encrypted run keep only "
                "if metrics are sealed; leave it out, or write cipher.metrics: sealed"
            )

    def build(self, *, share: bool) -> CrossSite:
        """Return the comparison; with ``share``, models of silos whose owners allow it are sent to other silos."""
        rounds = self.local.rounds if isinstance(self.local, AloneConfig) else None
        return CrossSite(bool(self.local), rounds, self.fine_tune, share)


logger = foreign.logger(__name__)

UNASKED = (
    "Beside loss and score nothing is measured, for the strategy names no metrics and the server cannot ask the task "
    "which it has. Name them as evaluation.metrics, and evaluation.classes."
)


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
        return Wanted(tuple(self.metrics or ()), self.classes)

    def of_task(self, task: TaskSection) -> EvaluationConfig:
        """Return the section with the task's metrics and classes filled in; raises `ConfigError` if they do not fit. If
        the task cannot be built here, omitted metrics stay omitted: only loss and score are measured.
        """
        if self.metrics is not None and (self.classes is not None or not self.metrics):
            return self
        try:
            metrics = task.build().metrics()
        except ConfigError as error:
            # The data are at another machine, or only silos know the model: metrics are then taken by name alone.
            if self.metrics is None:
                if not task.own_loop:
                    logger.warning("%s Here the task cannot be built: %s", UNASKED, error)
                return self
            metrics = ()
        told = Wanted.of(metrics)
        names = list(told.names) if self.metrics is None else self.metrics
        found = self.model_copy(update={"metrics": names, "classes": self.classes or told.classes})
        found.built(task)
        return found

    def built(self, task: TaskSection) -> tuple[AnyMetric, ...]:
        """Return the metrics; raises `ConfigError` for unfit names and for more sums than a silo may report."""
        metrics = self.wanted.metrics(lambda: task.build().metrics())
        known = statistics_of(metrics)
        entries = sum(statistic.size for statistic in known.values())
        if len(known) > MAX_STATISTICS or entries > MAX_SUMS:
            problem = (
                f"the metrics need {len(known)} statistics of {entries} sums, at most {MAX_STATISTICS} of {MAX_SUMS}"
            )
            raise ConfigError("evaluation.metrics", problem, "Leave metrics out, or take fewer bins or classes")
        return metrics


class StopConfig(Section):
    """Stop rules; the run ends at the first rule that applies."""

    rounds: PositiveInt | None = None
    """Number of commits, each of which makes a model version. Barriers that commit every arrival count each arrival."""

    seconds: Annotated[float, Field(gt=0)] | None = None
    """Time since the first order, virtual or real [s]. The wait for silos before it does not count."""

    target_accuracy: float | None = None
    """Accuracy of an evaluated version at which the run ends. For most tasks it is a share above 0 and at most 1; tasks
    with another score allow other numbers."""

    target: TargetConfig | None = None
    """Target value of any metric, as in ``{metric: auroc, at_least: 0.85}``."""

    patience: Annotated[Annotated[PositiveInt, VALUE] | Annotated[PatienceConfig, SECTION], EITHER] | None = None
    """Consecutive evaluated versions without a better accuracy, after which the run ends. For another metric, write
    ``{metric: auroc, versions: 5}``."""

    @model_validator(mode="after")
    def _must_end(self) -> Self:
        if self.rounds is None and self.seconds is None:
            raise ValueError("nothing bounds the run; add `rounds` or `seconds`")
        return self

    def build(self, metrics: Sequence[AnyMetric] = ()) -> StopRules:
        """Return the rules; raises `ConfigError` if a rule needs a metric that the run does not compute."""
        patience, steady = self.patience, None
        if isinstance(patience, PatienceConfig):
            steady = Selection(patience.metric, is_higher(patience.metric, metrics, "stop.patience.metric"))
            patience = patience.versions
        target = None if self.target is None else self.target.build(metrics)
        return StopRules(self.rounds, self.seconds, self.target_accuracy, patience, target, steady)

    @property
    def by_metric(self) -> bool:
        rules = (self.target, self.patience)
        return any(isinstance(rule, TargetConfig | PatienceConfig) and rule.metric not in TOLD for rule in rules)

    @property
    def by_score(self) -> bool:
        return any(rule is not None for rule in (self.target_accuracy, self.target, self.patience))


def unreachable(target: float, task: TaskSection) -> tuple[str, str] | None:
    match task.scores:
        case "share" if not 0 < target <= 1:
            what, remedy = "a share of right answers", "write a number greater than 0 and at most 1"
        case "error" if not target <= 0:
            what, remedy = "minus an error", "write a number of at most 0"
        case _ if not isfinite(target):
            what, remedy = "a number", "write a finite number"
        case _:
            return None
    return f"{target:g} is not allowed: accuracy of this {task.kind} task is {what}", remedy
