"""How evenly a model serves the silos: the same rows for the page, the model card and papers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, pvariance

from fedsync.observe.report.results import Estimate, Findings, short


@dataclass(frozen=True, slots=True)
class Fairness:
    """A metric over the silos for which it is estimable; the best and the worst by what the metric means.

    Args:
        metric: its name.
        worst: silo and value.
        best: likewise.
        mean: over silos, each counting the same.
        variance: over silos, of all of them, not of a sample of silos.
        silos: for how many it is estimable.
        left_out: for how many it is not.
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
        """How far the worst is from the best."""
        return abs(self.best[1] - self.worst[1])


HEAD = ("metric", "worst silo", "best silo", "gap", "mean of silos", "variance", "silos")


def fairness(found: Findings, lower: Iterable[str]) -> list[Fairness]:
    """Of each metric that two silos or more have.

    Args:
        found: of one model on one split.
        lower: metrics of which less is better.

    Returns:
        Nothing where all silos share one split: it says nothing of them.
    """
    rows: list[Fairness] = []
    if found.shared:
        return rows
    for metric in found.pooled:
        told = {silo: numbers[metric] for silo, numbers in found.silos.items() if metric in numbers}
        values = _known(told)
        if len(values) < 2:
            continue
        ranked = sorted(values.items(), key=lambda pair: pair[1], reverse=metric in set(lower))
        spread = list(values.values())
        left_out = len(found.silos) - len(values)
        rows.append(Fairness(metric, ranked[0], ranked[-1], fmean(spread), pvariance(spread), len(values), left_out))
    return rows


def _known(told: dict[str, Estimate]) -> dict[str, float]:
    return {silo: each.value for silo, each in told.items() if each.value is not None}


def cells(row: Fairness) -> tuple[str, ...]:
    """Under `HEAD`."""
    silos = str(row.silos) + (f" ({row.left_out} not estimable)" if row.left_out else "")
    worst, best = (f"{short(value)} ({silo})" for silo, value in (row.worst, row.best))
    return row.metric, worst, best, short(row.gap), short(row.mean), f"{row.variance:.2g}", silos
