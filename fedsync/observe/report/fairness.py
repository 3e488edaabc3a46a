"""Fairness between silos: the same rows for the report page, the model card and papers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, pvariance

from fedsync.observe.report.results import Findings, short


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
        """Cells of a row below `HEAD`."""
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
