"""Paired confidence intervals of the gain of one model over another, from bootstrap or jackknife on the same samples.

A sample that is easy for one model is mostly easy for the other model, so the difference of two metrics is more certain
than their intervals suggest. Only the silo can compute this interval from its samples, and it sends only the interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedsync.core.orders import Evaluation, Subject
from fedsync.evaluation.metrics.metric_types import (
    DRAWS,
    FEWEST,
    AnyMetric,
    Interval,
    Statistic,
    Sums,
    jackknife,
    middle_of,
    statistics_of,
)

_SEED = 0
_AT_ONCE = 2**20
"""Entries of the largest array of drawn samples, or of drawn sums."""


@dataclass(frozen=True, slots=True)
class JudgedSamples:
    """Results of one model at one silo, sample by sample, all by statistic key. They never leave the silo.

    ``sums`` are [size]. For statistics of class counts, ``labels`` are true classes, int64 [samples], -1 if unknown,
    and ``cells`` the entries of the sums in which each sample counts, int64 [samples, n], -1 for none.
    """

    metrics: Sequence[AnyMetric]
    sums: Mapping[str, Sums]
    labels: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    cells: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)


def gain_intervals(mine: JudgedSamples, other: JudgedSamples) -> dict[str, Interval]:
    """Return the 95 % interval of the gain of one model over another, by metric; positive is better.

    Samples with classes are drawn with replacement, with a fixed number for each class. Otherwise one group of samples
    is left out at a time. Metrics without an interval are omitted.
    """
    found: dict[str, Interval] = {}
    for key, statistic in statistics_of(mine.metrics).items():
        chosen = [metric for metric in mine.metrics if metric.statistic.key == key and metric.resampled]
        with np.errstate(all="ignore"):
            if key in mine.cells and key in other.cells:
                intervals = _drawn(chosen, statistic, key, mine, other)
            else:
                intervals = [_left_out(metric, mine.sums[key], other.sums[key]) for metric in chosen]
        for metric, interval in zip(chosen, intervals, strict=True):
            if interval is not None:
                low, high = interval if metric.higher_is_better else (0.0 - interval[1], 0.0 - interval[0])
                most = metric.limits[1] - metric.limits[0]
                found[metric.name] = max(low, -most), min(high, most)
    return found


def _drawn(
    metrics: Sequence[AnyMetric], statistic: Statistic, key: str, mine: JudgedSamples, other: JudgedSamples
) -> list[Interval | None]:
    labels, pair = mine.labels[key], [each.cells[key] for each in (mine, other)]
    strata = [np.flatnonzero(labels == label) for label in np.unique(labels[labels >= 0])]
    known = np.isfinite([mine.sums[key], other.sums[key]]).all() and np.array_equal(labels, other.labels[key])
    if not known or not strata or min(map(len, strata)) < FEWEST:
        return [None] * len(metrics)
    rng, size = np.random.default_rng(_SEED), statistic.size + 1
    step = max(1, _AT_ONCE // max(sum(map(len, strata)) * pair[0].shape[1], size))
    differences: list[list[Sums]] = [[] for _ in metrics]
    for start in range(0, DRAWS, step):
        draws = min(step, DRAWS - start)
        rows = np.concatenate([rng.choice(each, (draws, len(each))) for each in strata], axis=1)
        place = 1 + size * np.arange(draws)[:, None, None]
        counts = [np.bincount((cells[rows] + place).ravel(), minlength=draws * size) for cells in pair]
        sums = [each.reshape(draws, size)[:, 1:].astype(np.float64) for each in counts]
        for metric, found in zip(metrics, differences, strict=True):
            found.append(metric.values(sums[0]) - metric.values(sums[1]))
    return [middle_of(np.concatenate(each)) for each in differences]


def _left_out(metric: AnyMetric, mine: Sums, other: Sums) -> Interval | None:
    without = [metric.statistic.left_out(sums) for sums in (mine, other)]
    if without[0].shape != without[1].shape:
        return None
    both, parts = np.stack([mine, other]), np.stack(without, axis=1)
    return jackknife(both, parts, lambda sums: metric.values(sums[:, 0]) - metric.values(sums[:, 1]))


class LocalGains:
    """Gains of a silo's models over its local model, as the models are tested one after the other."""

    def __init__(self) -> None:
        self._judged: dict[str, JudgedSamples] = {}

    def told(self, subject: str, found: Evaluation, judged: JudgedSamples | None) -> Evaluation:
        """Return a test evaluation of ``subject`` with the gains known now; ``judged`` is None if unknown."""
        if judged is None:
            return found
        self._judged[subject] = judged
        local = self._judged.get(Subject.LOCAL)
        if local is None:
            return found
        others = [subject] if subject != Subject.LOCAL else [each for each in self._judged if each != Subject.LOCAL]
        return replace(found, gains={each: gain_intervals(self._judged[each], local) for each in others})
