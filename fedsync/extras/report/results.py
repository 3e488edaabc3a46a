"""Results of a run: scores with intervals, curves, saved models, the cross-site matrix.

All parts are optional: a run without evaluations has no results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import fmean, pvariance
from typing import Annotated, Any

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass as checked

SUBJECTS = {
    "best": "best version",
    "last": "last version",
    "tuned": "fine-tuned by the silo",
    "local": "trained by the silo alone",
}
"""Title of each subject, most important first."""


def number_of(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) else None


def numbers_of(values: Mapping[str, object] | None) -> dict[str, float]:
    return {name: number for name, value in (values or {}).items() if (number := number_of(value)) is not None}


Number = Annotated[float | None, BeforeValidator(number_of)]
Numbers = Annotated[Mapping[str, float], BeforeValidator(numbers_of)]
"""Types of checked fields; a number that is not finite counts as missing."""


@checked(frozen=True, slots=True)
class Estimate:
    """A metric's value with its 95 % interval.

    Args:
        value: None if not estimable.
        support: number of samples, by class if there are classes.
    """

    value: Number
    low: Number = None
    high: Number = None
    support: Mapping[str, int] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Text such as ``0.912 [0.880, 0.934]``, ``not estimable`` or ``0.912 [no interval]``."""
        if self.value is None:
            return "not estimable"
        if self.low is None or self.high is None:
            return f"{short(self.value)} [no interval]"
        return f"{short(self.value)} [{short(self.low)}, {short(self.high)}]"

    @property
    def samples(self) -> int:
        return sum(self.support.values())


Estimates = Mapping[str, Estimate]


@checked(frozen=True, slots=True)
class Findings:
    """Evaluation results of one model on one split.

    Args:
        split: ``validation`` or ``test``.
        roc: false and true positive rates of the pooled scores.
        calibration: mean score, share of the class and number of samples, per span of pooled scores.
    """

    subject: str
    split: str
    version: int | None
    pooled: Estimates
    silos: Mapping[str, Estimates] = field(default_factory=dict)
    roc: Sequence[tuple[float, float]] = ()
    calibration: Sequence[tuple[float, float, float]] = ()

    @property
    def shared(self) -> bool:
        """Whether all silos evaluated on one shared split, which the pooled numbers count once."""
        views = [{name: (each.value, each.support) for name, each in of.items()} for of in self.silos.values()]
        pooled = {name: (each.value, each.support) for name, each in self.pooled.items()}
        return len(views) > 1 and bool(pooled) and all(view == pooled for view in views)

    @property
    def model(self) -> str:
        return title_of(self.subject) + ("" if self.version is None else f" ({self.version})")

    @property
    def title(self) -> str:
        return f"{self.model}, {self.split} split"

    @property
    def headline(self) -> tuple[str, Estimate] | None:
        """The first estimate to name: accuracy, or else the first metric; None if nothing is estimable."""
        known = {name: each for name, each in self.pooled.items() if each.value is not None}
        name = "accuracy" if "accuracy" in known else next(iter(known), None)
        return None if name is None else (name, known[name])


@checked(frozen=True, slots=True)
class CrossSiteTable:
    """Cross-site matrix: the score of each model at each silo.

    Args:
        matrix: by metric, row by row; None for a model that the silo did not evaluate.
        gain: by metric, subject and silo: improvement over the silo's own local model.
        pooled: by metric and subject, over the samples of all silos together.
        pooled_gain: by metric and subject, over the samples of all silos together; only for sealed metrics.
    """

    silos: tuple[str, ...]
    models: tuple[str, ...]
    matrix: Mapping[str, Sequence[Sequence[Estimate | None]]]
    gain: Mapping[str, Mapping[str, Mapping[str, Estimate | None]]]
    pooled: Mapping[str, Estimates]
    missing: tuple[str, ...]
    pooled_gain: Mapping[str, Estimates] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoundNumbers:
    """Metric of one version: pooled, and of each silo whose value is known."""

    round: int
    pooled: float
    silos: Mapping[str, float]


@checked(frozen=True, slots=True)
class KeptVersion:
    """A model version that the run keeps.

    Args:
        why: selection rule, as text.
        digest: SHA-256 of the model's file in the run's folder; "" if only silos have the model.
        metrics: pooled metrics by name, as found during the run.
        test: pooled metrics by name, of the final evaluation on the test splits.
    """

    subject: str
    version: int
    why: str
    digest: str
    metrics: Numbers
    test: Numbers

    @property
    def file(self) -> str:
        """File name in the run's folder, or ``at the silos``."""
        return f"{self.subject}.pt" if self.digest else "at the silos"


@dataclass(frozen=True, slots=True)
class Results:
    """Quality of a run's models, as read from the files of the run.

    Args:
        findings: most important first.
        rounds: by metric, version by version.
        lower: metrics of which lower is better.
        statistics: published statistics of all silos' data, as text; see `fedsync.evaluation.survey.findings`.
    """

    findings: tuple[Findings, ...] = ()
    rounds: Mapping[str, Sequence[RoundNumbers]] = field(default_factory=dict)
    cross_site: CrossSiteTable | None = None
    kept: tuple[KeptVersion, ...] = ()
    lower: frozenset[str] = frozenset({"loss"})
    statistics: Mapping[str, Any] | None = None

    @property
    def main(self) -> Findings | None:
        return self.findings[0] if self.findings else None


def short(value: float) -> str:
    """Format with three decimals below 10, and with three significant digits above."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.3g}" if abs(value) < 1e6 else f"{value:.2e}"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def amount(name: str, value: float | None) -> str:
    if value is not None and name.endswith("_bytes") and value >= 1e6:
        return f"{value / 1e6:.2f} MB"
    return number(value, ".6g")


def title_of(subject: str) -> str:
    return SUBJECTS.get(subject, subject)


def distinct(of: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for names in of for name in names))


@dataclass(frozen=True, slots=True)
class Fairness:
    """Spread of a metric over the silos for which the metric is estimable.

    Best and worst respect the direction of the metric: for a loss, the lowest value is the best.

    Args:
        mean: unweighted mean over silos.
        variance: population variance over silos.
    """

    metric: str
    worst: tuple[str, float]
    best: tuple[str, float]
    mean: float
    variance: float
    silos: int
    left_out: int

    @property
    def gap(self) -> float:
        return abs(self.best[1] - self.worst[1])

    @property
    def cells(self) -> tuple[str, ...]:
        silos = str(self.silos) + (f" ({self.left_out} not estimable)" if self.left_out else "")
        worst, best = (f"{short(value)} ({silo})" for silo, value in (self.worst, self.best))
        return self.metric, worst, best, short(self.gap), short(self.mean), f"{self.variance:.2g}", silos


HEAD = ("metric", "worst silo", "best silo", "gap", "mean of silos", "variance", "silos")


def fairness(found: Findings, lower: Iterable[str]) -> list[Fairness]:
    """Return a row for each metric that at least two silos have.

    Args:
        lower: metrics of which lower is better.

    Returns:
        Empty if all silos share one split, because a shared split cannot show differences between silos.
    """
    rows: list[Fairness] = []
    if found.shared:
        return rows
    for metric in found.pooled:
        told = {silo: numbers[metric].value for silo, numbers in found.silos.items() if metric in numbers}
        values = {silo: value for silo, value in told.items() if value is not None}
        if len(values) < 2:
            continue
        ranked = sorted(values.items(), key=lambda pair: pair[1], reverse=metric in set(lower))
        spread = list(values.values())
        left_out = len(found.silos) - len(values)
        rows.append(Fairness(metric, ranked[0], ranked[-1], fmean(spread), pvariance(spread), len(values), left_out))
    return rows
