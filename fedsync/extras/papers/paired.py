"""Statistical comparison of strategies over several seeds: means with intervals, and paired tests.

Runs of one seed have the same data and the same initial model, so differences are taken seed by seed. Two tests
compute p-values under the hypothesis that the strategies do not differ. The paired t-test assumes normal differences;
Wilcoxon's signed-rank test assumes symmetric differences. With n pairs, Wilcoxon's p-value is at least
``2 ** (1 - n)``. Holm's method corrects several comparisons with one strategy. Tests and quantiles are SciPy's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, stdev

FEWEST = 3
"""Minimum number of pairs for a test."""

LEVEL = 0.95

_ROUNDING = 1e-12
"""Spread of differences, relative to the largest number, that rounding alone can cause."""


@dataclass(frozen=True, slots=True)
class SeedMean:
    """Mean over seeds with Student's interval, which is None below two runs."""

    mean: float
    low: float | None
    high: float | None
    runs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedMean:
        mean = fmean(values)
        if len(values) < 2:
            return cls(mean, None, None, len(values))
        from scipy import stats

        half = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * stdev(values) / sqrt(len(values))
        return cls(mean, mean - half, mean + half, len(values))


@dataclass(frozen=True, slots=True)
class PairedTest:
    """Comparison of two strategies over their common seeds.

    Args:
        difference: mean of second minus first, with its interval; None without common seeds.
        holm: p-value of the t-test, corrected for all comparisons of the table.
        why: reason that there was no test; "" if there was a test.
    """

    pairs: int
    difference: SeedMean | None
    t: float | None = None
    wilcoxon: float | None = None
    holm: float | None = None
    why: str = ""


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> PairedTest:
    seeds = sorted(first.keys() & second.keys())
    differences = [second[seed] - first[seed] for seed in seeds]
    difference = SeedMean.of(differences) if differences else None
    if len(seeds) < FEWEST:
        return PairedTest(len(seeds), difference, why=f"{len(seeds)} pairs; a test needs {FEWEST}")
    largest = max(abs(run[seed]) for run in (first, second) for seed in seeds)
    if max(differences) - min(differences) <= _ROUNDING * largest:
        return PairedTest(len(seeds), difference, why="all differences are the same")
    from scipy import stats

    t = stats.ttest_1samp(differences, 0.0).pvalue
    return PairedTest(len(seeds), difference, float(t), float(stats.wilcoxon(differences).pvalue))


def corrected(tests: Sequence[PairedTest]) -> list[PairedTest]:
    """Fill in `PairedTest.holm`: the k-th smallest of m p-values times m - k + 1, made non-decreasing, at most 1."""
    ranked = sorted((test.t, at) for at, test in enumerate(tests) if test.t is not None)
    found, least = list(tests), 0.0
    for rank, (value, at) in enumerate(ranked):
        least = max(least, min(1.0, value * (len(ranked) - rank)))
        found[at] = replace(tests[at], holm=least)
    return found
