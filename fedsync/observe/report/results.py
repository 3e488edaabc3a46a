"""What a run came to: numbers with intervals, curves, the best version, the cross-site matrix.

All of it is optional: a run that evaluated nothing has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

SUBJECTS = {
    "best": "best version",
    "last": "last version",
    "tuned": "fine-tuned by the silo",
    "local": "trained by the silo alone",
}
"""What each subject is called, the most important first."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95 % interval.

    Args:
        value: None where it is not estimable.
        low: lower end; None where no interval is estimable.
        high: upper end, likewise.
        support: samples behind it, by class where there are classes.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    support: Mapping[str, int] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """``0.912 [0.880, 0.934]``; in words what is not estimable, or has no interval."""
        if self.value is None:
            return "not estimable"
        if self.low is None or self.high is None:
            return f"{short(self.value)} [no interval]"
        return f"{short(self.value)} [{short(self.low)}, {short(self.high)}]"

    @property
    def samples(self) -> int:
        """Behind it, all classes together."""
        return sum(self.support.values())


Estimates = Mapping[str, Estimate]
"""By name of the metric."""


@dataclass(frozen=True, slots=True)
class Findings:
    """What silos found of one model on one split.

    Args:
        subject: which model, a key of `SUBJECTS`.
        split: ``validation`` or ``test``.
        version: of the model; None where each silo has its own.
        pooled: over all silos' samples together.
        silos: of each silo; nothing where single silos are sealed.
        roc: false and true positive rates of the pooled scores.
        calibration: mean score, share of the class and samples, of the pooled scores in spans.
    """

    subject: str
    split: str
    version: int | None
    pooled: Estimates
    silos: Mapping[str, Estimates]
    roc: Sequence[tuple[float, float]] = ()
    calibration: Sequence[tuple[float, float, float]] = ()

    @property
    def shared(self) -> bool:
        """Whether all silos were judged by one split, so that each has the numbers of all."""
        views = [{name: (each.words, each.support) for name, each in of.items()} for of in self.silos.values()]
        return len(views) > 1 and all(view == views[0] for view in views) and any(self.pooled.values())

    @property
    def title(self) -> str:
        version = "" if self.version is None else f" ({self.version})"
        return f"{SUBJECTS.get(self.subject, self.subject)}{version}, {self.split} split"


@dataclass(frozen=True, slots=True)
class CrossSiteTable:
    """How each model does at each silo.

    Args:
        silos: columns.
        models: a name for each row.
        matrix: by metric, row by row; None where nobody evaluated that.
        gain: by metric and subject: how much better each silo fares than with its own local model.
        pooled: by metric and subject, over all silos' samples together.
        missing: sentences about models that are not there.
        pooled_gain: by metric and subject, over all silos' samples together; where single silos are sealed.
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
    """A metric of one version: pooled, and of each silo that told its own."""

    round: int
    pooled: float
    silos: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version of the model that is kept.

    Args:
        subject: ``best`` or ``last``.
        version: of the model.
        why: in words, by what it was chosen.
        digest: SHA-256 of its file in the run's folder; "" where only silos have the model.
        metrics: pooled numbers by name, by which it was chosen.
        test: likewise, on the test splits at the end.
    """

    subject: str
    version: int
    why: str
    digest: str
    metrics: Mapping[str, float]
    test: Mapping[str, float]

    @property
    def file(self) -> str:
        """Its name in the run's folder, or where else the model is."""
        return f"{self.subject}.pt" if self.digest else "at the silos"


@dataclass(frozen=True, slots=True)
class DataSummary:
    """What is told of all silos' columns together; see `fedsync.evaluation.survey.findings`.

    Args:
        rows: training samples, in words.
        classes: samples of each class, likewise.
        least: counts below it are not told.
        columns: name, kind, known cells, missing cells, mean and deviation of each.
    """

    rows: str
    classes: tuple[str, ...]
    least: int
    columns: tuple[tuple[str, str, str, str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Results:
    """All that a run's files say of how good its models are; empty where they say nothing.

    Args:
        findings: the most important first.
        rounds: by metric, version by version.
        cross_site: the matrix, if there is one.
        kept: models that are files.
        lower: metrics of which less is better.
        statistics: of the data, where silos made them.
    """

    findings: tuple[Findings, ...] = ()
    rounds: Mapping[str, Sequence[RoundNumbers]] = field(default_factory=dict)
    cross_site: CrossSiteTable | None = None
    kept: tuple[KeptVersion, ...] = ()
    lower: frozenset[str] = frozenset({"loss"})
    statistics: DataSummary | None = None

    @property
    def main(self) -> Findings | None:
        """What a paper reports: the best version on the test split, or what comes nearest."""
        return self.findings[0] if self.findings else None


def short(value: float) -> str:
    """Three decimals of numbers of the size of a share; three digits of others."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.3g}" if abs(value) < 1e6 else f"{value:.2e}"


def number_of(value: object) -> float | None:
    """A finite number, or None of anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) else None
