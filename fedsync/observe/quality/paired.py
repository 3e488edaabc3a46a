"""Strategies over several seeds: means with intervals, and whether two of them differ, by runs of the same seed.

Runs of one seed have the same data and the same first model, so differences are taken seed by seed. Two tests say how
surprising these would be if the strategies did not differ: the paired t-test, which takes differences for normal, and
Wilcoxon's signed-rank test, which takes them for symmetric. Of n pairs the latter cannot come below ``2 ** (1 - n)``.
Several comparisons with one strategy are corrected after Holm. SciPy's tests and quantiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

FEWEST = 3
"""Pairs below which nothing is tested."""

LEVEL = 0.95
"""Of intervals."""


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A number over seeds; the interval is Student's, None below two runs."""

    mean: float
    low: float | None
    high: float | None
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedMean:
        half = None if len(values) < 2 else _half(values)
        mean = fmean(values)
        return cls(mean, None if half is None else mean - half, None if half is None else mean + half, len(values))


@dataclass(frozen=True, slots=True)
class PairedTest:
    """One strategy against another over the seeds that both have.

    Args:
        pairs: seeds that both have.
        difference: mean of the second less the first, with its interval.
        t: p-value of the paired t-test; None where nothing is tested.
        wilcoxon: p-value of the signed-rank test, likewise.
        holm: p-value of the t-test, corrected for all comparisons of the table.
        why: why nothing is tested; "" where it is.
    """

    pairs: int
    difference: SeedMean | None
    t: float | None = None
    wilcoxon: float | None = None
    holm: float | None = None
    why: str = ""


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> PairedTest:
    """Compare numbers by seed."""
    seeds = sorted(first.keys() & second.keys())
    differences = [second[seed] - first[seed] for seed in seeds]
    difference = SeedMean.of(differences) if differences else None
    if len(seeds) < FEWEST:
        return PairedTest(len(seeds), difference, why=f"{len(seeds)} pairs; a test needs {FEWEST}")
    if len(set(differences)) == 1:
        return PairedTest(len(seeds), difference, why="all differences are the same")
    from scipy import stats

    t = stats.ttest_1samp(differences, 0.0).pvalue
    return PairedTest(len(seeds), difference, float(t), float(stats.wilcoxon(differences).pvalue))


def corrected(tests: Sequence[PairedTest]) -> list[PairedTest]:
    """The same with `PairedTest.holm`: the k-th smallest of m p-values times m - k + 1, never below a smaller one."""
    ranked = sorted((test.t, at) for at, test in enumerate(tests) if test.t is not None)
    found, least = list(tests), 0.0
    for rank, (value, at) in enumerate(ranked):
        least = max(least, min(1.0, value * (len(ranked) - rank)))
        found[at] = replace(tests[at], holm=least)
    return found


def _half(values: Sequence[float]) -> float:
    """Half the width of Student's interval of a mean."""
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
