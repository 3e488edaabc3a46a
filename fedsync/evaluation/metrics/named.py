"""Registry of the shipped metrics by name, and the default metrics of each kind of task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.classes import F1, Accuracy, BalancedAccuracy, ClassCounts, Recall
from fedsync.evaluation.metrics.metric_types import AnyMetric, statistics_of
from fedsync.evaluation.metrics.moments import (
    ERRORS,
    LIKELIHOOD,
    OVERLAP,
    R2,
    Concordance,
    Mean,
    OwnMetric,
    PairCounts,
    Perplexity,
    Rmse,
)
from fedsync.evaluation.metrics.score_histograms import (
    COARSE,
    FINE,
    Auroc,
    AveragePrecision,
    Brier,
    CalibrationError,
    ScoreCounts,
)

MOST_CLASSES = 1000
"""Largest number of classes whose predictions are counted by class."""

MOST_SCORED = 100
"""Largest number of classes whose scores are counted, each against the rest."""

_SHARE = (0.0, 1.0)


def _scores(classes: int) -> ScoreCounts:
    if classes > MOST_SCORED:
        problem = f"histograms of the scores of {classes} classes are too large; there may be {MOST_SCORED}"
        raise ConfigError("evaluation.metrics", problem, "Choose accuracy, balanced_accuracy or f1")
    return ScoreCounts(classes, FINE if classes == 2 else COARSE)


_OF_CLASSES: Mapping[str, Callable[[int], AnyMetric]] = {
    "accuracy": lambda classes: Accuracy("accuracy", ClassCounts(classes), limits=_SHARE),
    "balanced_accuracy": lambda classes: BalancedAccuracy("balanced_accuracy", ClassCounts(classes), limits=_SHARE),
    "f1": lambda classes: F1("f1", ClassCounts(classes), limits=_SHARE, macro=classes > 2),
    "f1_macro": lambda classes: F1("f1_macro", ClassCounts(classes), limits=_SHARE),
    "sensitivity": lambda classes: Recall("sensitivity", ClassCounts(classes), limits=_SHARE, label=1),
    "specificity": lambda classes: Recall("specificity", ClassCounts(classes), limits=_SHARE, label=0),
    "auroc": lambda classes: Auroc("auroc", _scores(classes), limits=_SHARE),
    "average_precision": lambda classes: AveragePrecision("average_precision", _scores(classes), limits=_SHARE),
    "brier": lambda classes: Brier("brier", _scores(classes), False, (0.0, 2.0)),
    "calibration_error": lambda classes: CalibrationError("calibration_error", _scores(classes), False, _SHARE),
}

_OTHERS: Mapping[str, AnyMetric] = {
    metric.name: metric
    for metric in (
        Mean("dice", OVERLAP, limits=_SHARE, column=1),
        Mean("iou", OVERLAP, limits=_SHARE, column=2),
        Mean("mae", ERRORS, False, (0.0, inf)),
        Rmse("rmse", ERRORS, False, (0.0, inf)),
        R2("r2", ERRORS, limits=(-inf, 1.0)),
        Concordance("concordance", PairCounts(), limits=_SHARE),
        Perplexity("perplexity", LIKELIHOOD, False, (1.0, inf)),
    )
}

NAMES = (*_OF_CLASSES, *_OTHERS)

BY_SCORE = ("auroc", "average_precision", "brier", "calibration_error")
"""Metrics that need probabilities."""

_TWO = ("sensitivity", "specificity")


def shipped(name: str, classes: int | None = None) -> AnyMetric:
    """Return a shipped metric; raise ConfigError if it needs the number of classes, or does not support it."""
    if name in _OTHERS:
        return _OTHERS[name]
    if classes is None:
        problem = f"{name} is of predicted classes, and how many there are is not known"
        raise ConfigError("evaluation.metrics", problem, "Write their number as evaluation.classes")
    if not 2 <= classes <= (2 if name in _TWO else MOST_CLASSES):
        raise ConfigError("evaluation.metrics", f"{name} of {classes} classes is not worked out", "Leave it out")
    return _OF_CLASSES[name](classes)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Metrics of a run, as announced to all participants; ``classes`` is None if unknown or without classes."""

    names: tuple[str, ...] = ()
    classes: int | None = None

    def metrics(self, own: Callable[[], Iterable[AnyMetric]]) -> tuple[AnyMetric, ...]:
        """Return the metrics; ``own`` is called only if a name is not shipped. Raise ConfigError for unknown names."""
        others = {} if set(self.names) <= set(NAMES) else {metric.name: metric for metric in _named_apart(own())}
        unknown = [name for name in self.names if name not in (*NAMES, *others)]
        if unknown:
            remedy = f"There are {', '.join((*NAMES, *others))}; those of Task.metrics() are a task's own"
            raise ConfigError("evaluation.metrics", f"there is no metric {unknown[0]!r}", remedy)
        return tuple(shipped(name, self.classes) if name in NAMES else others[name] for name in self.names)

    @classmethod
    def of(cls, metrics: Iterable[AnyMetric]) -> Wanted:
        """Collect the names and the number of classes of a task's metrics. Raises `ConfigError` if a metric differs
        from the shipped metric of its name, the numbers of classes differ, or a user's own formula fails.
        """
        if not isinstance(metrics, Iterable):
            raise ConfigError("task, metrics()", f"it returned {metrics!r}", "Return a tuple of metrics")
        metrics = _named_apart(metrics)
        statistics_of(metrics)
        told = {each.classes for each in (metric.statistic for metric in metrics) if hasattr(each, "classes")}
        wanted = cls(tuple(metric.name for metric in metrics), max(told, default=None))
        for metric in metrics:
            if metric.name in NAMES and metric != shipped(metric.name, wanted.classes):
                problem = f"{metric.name} is not the shipped metric of that name, of {wanted.classes} classes"
                raise ConfigError("task, metrics()", problem, "Give it another name, or all of them the same classes")
            if isinstance(metric, OwnMetric):
                metric.check()
        return wanted


NOTHING = Wanted()


def _named_apart(metrics: Iterable[AnyMetric]) -> tuple[AnyMetric, ...]:
    """Return a task's metrics; raise `ConfigError` if one has the name of the loss, or an own one that of a shipped."""
    metrics = tuple(metrics)
    for metric in metrics:
        name = getattr(metric, "name", "")
        if name == "loss" or (isinstance(metric, OwnMetric) and name in NAMES):
            taken = "the loss" if name == "loss" else "a shipped metric"
            problem = f"the task's own metric {name} has the name of {taken}"
            raise ConfigError("task, metrics()", problem, "Give it another name")
    return metrics


def classification(classes: int) -> tuple[AnyMetric, ...]:
    """Default metrics: accuracy, balanced accuracy, F1, with two classes `BY_SCORE`; none beyond `MOST_CLASSES`."""
    if not 2 <= classes <= MOST_CLASSES:
        return ()
    names = ("accuracy", "balanced_accuracy", "f1", *(BY_SCORE if classes == 2 else ()))
    return tuple(shipped(name, classes) for name in names)


def regression() -> tuple[AnyMetric, ...]:
    return shipped("mae"), shipped("rmse"), shipped("r2")


def segmentation() -> tuple[AnyMetric, ...]:
    return shipped("dice"), shipped("iou")
