"""Base classes of statistics and metrics, pooled sums of silos, and confidence intervals from sums alone."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError

Sums = NDArray[np.float64]
"""Sums of a statistic, float64 [size]; where a docstring says so, a stack of sums, [..., size]."""

Values = Callable[[Sums], NDArray[np.float64]]
"""Function from sums [..., size] to numbers [...]; NaN where undefined."""

Interval = tuple[float, float]

KEY = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9_]+){0,3}")

FEWEST = 5
"""Minimum number of samples, of each class if there are classes, for an interval."""

LEVEL = 0.95


class Statistic(ABC):
    """Sum over a split's samples at one silo. A frozen value, fully described by its key."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Unique name, including sizes, such as ``scores/256``."""

    @property
    @abstractmethod
    def size(self) -> int: ...

    @property
    def whole(self) -> bool:
        return True

    @property
    def places(self) -> int:
        """Number of entries in which one sample of a class counts; 0 without classes."""
        return 0

    def problem(self, sums: Sums) -> str:
        """Return why no samples give these sums [size], already checked to be finite or counts; "" if valid."""
        return ""

    def support(self, sums: Sums) -> Mapping[str, int]:
        """Return the number of samples behind sums [size], by class if there are classes; else as ``samples``."""
        return {}

    def left_out(self, sums: Sums) -> Sums:
        """Return sums [groups, size], each without one group of samples; no rows if samples are not in groups."""
        return np.empty((0, self.size))

    def interval(self, sums: Sums, values: Values, seed: int) -> Interval | None:
        """Return the confidence interval at `LEVEL` of a metric over samples of the same kind; None if unknown."""
        return jackknife(sums, self.left_out(sums), values)


S = TypeVar("S", bound=Statistic)


@dataclass(frozen=True, slots=True)
class Metric(ABC, Generic[S]):
    """Number computed from the sums of one statistic; intervals are clipped to ``limits``."""

    name: str
    statistic: S
    higher_is_better: bool = True
    limits: tuple[float, float] = (-inf, inf)

    resampled: ClassVar[bool] = True
    """Whether drawn samples have the metric's value on average; without that, there is no interval."""

    @abstractmethod
    def value(self, sums: Sums) -> float | None:
        """Return the number; None if the sums [size] do not define it, such as an AUROC with one class only."""

    def values(self, sums: Sums) -> NDArray[np.float64]:
        """Return numbers [n] of sums [n, size], NaN for None; subclasses may vectorise it."""
        return np.array([np.nan if (found := number(self, each)) is None else found for each in sums])

    def interval(self, sums: Sums, seed: int) -> Interval | None:
        if not self.resampled or number(self, sums) is None:
            return None
        with np.errstate(all="ignore"):
            found = self.statistic.interval(sums, self.values, seed)
        least, most = self.limits
        return None if found is None else (max(found[0], least), min(found[1], most))

    def support(self, sums: Sums) -> Mapping[str, int]:
        return self.statistic.support(sums)


class ArrayMetric(Metric[S]):
    """Metric that computes many numbers at once."""

    def value(self, sums: Sums) -> float | None:
        return float(self.values(sums[None])[0])

    @abstractmethod
    def values(self, sums: Sums) -> NDArray[np.float64]: ...


AnyMetric = Metric[Any]


def number(metric: AnyMetric, sums: Sums) -> float | None:
    """Return a metric of sums [size]; None if it is undefined, not finite, or fails on odd sums."""
    try:
        with np.errstate(all="ignore"):
            found = metric.value(sums)
            return float(found) if found is not None and isfinite(found) else None
    except Exception:  # one silo's odd sums must not end the whole run, whatever a user's formula raises
        return None


def published(value: float) -> float:
    """Round to the four digits that silos publish."""
    return float(f"{value:.3e}")


def ratio(above: Sums, below: Sums) -> Sums:
    with np.errstate(all="ignore"):
        return np.where(below != 0, above / below, np.nan)


def mean_of_known(values: Sums) -> Sums:
    known = ~np.isnan(values)
    return ratio(np.cumsum(np.where(known, values, 0.0), axis=-1)[..., -1], known.sum(axis=-1).astype(np.float64))


def statistics_of(metrics: Iterable[AnyMetric]) -> dict[str, Statistic]:
    """Statistics of metrics, by key; `ConfigError` for an entry that is no metric, a repeated name, or a wrong key."""
    statistics: dict[str, Statistic] = {}
    names: set[str] = set()
    for metric in metrics:
        if not isinstance(metric, Metric):
            remedy = 'Return a tuple of metrics, such as (metrics.shipped("f1", 2),)'
            raise ConfigError("task, metrics()", f"{metric!r} is no metric", remedy)
        statistic = metric.statistic
        if metric.name in names:
            raise ConfigError("evaluation.metrics", f"two metrics are called {metric.name}", "Leave one out")
        if statistics.setdefault(statistic.key, statistic) != statistic:
            raise ConfigError(metric.name, f"two statistics have the key {statistic.key}", "Give one another key")
        if not KEY.fullmatch(statistic.key):
            raise ConfigError(metric.name, f"{statistic.key!r} is no key of a statistic", "Write, for example, hits/2")
        names.add(metric.name)
    return statistics


_UNIT_BITS = 1074


@dataclass(slots=True)
class ExactSum:
    """Sum of floats without rounding, so that a removed value leaves no trace: an integer multiple of the smallest
    float unit. In a float sum, a much larger number absorbs the others, and removes them when it is removed.
    """

    units: int = 0

    def add(self, value: float, times: int) -> None:
        numerator, denominator = value.as_integer_ratio()
        self.units += times * (numerator << (_UNIT_BITS + 1 - denominator.bit_length()))

    @property
    def value(self) -> float:
        return self.units / (1 << _UNIT_BITS)


@dataclass(slots=True)
class SumsPool:
    """Sums by key, from which single contributions can be removed. Counts are integers; others are added exactly."""

    counts: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    others: dict[str, list[ExactSum]] = field(default_factory=dict)

    def add(self, sums: Mapping[str, Sequence[float]], known: Mapping[str, Statistic], times: int = 1) -> None:
        for key, values in sums.items():
            statistic = known.get(key)
            if statistic is None:
                continue
            if statistic.whole:
                before = self.counts.get(key)
                counts = np.array(values, np.float64).astype(np.int64) * times
                self.counts[key] = counts if before is None else before + counts
            else:
                exact = self.others.setdefault(key, [])
                exact.extend(ExactSum() for _ in range(statistic.size - len(exact)))
                for total, value in zip(exact, values, strict=True):
                    total.add(value, times)

    def sums(self, key: str) -> Sums | None:
        if key in self.counts:
            return self.counts[key].astype(np.float64)
        return np.array([total.value for total in self.others[key]]) if key in self.others else None

    def numbers(self, metrics: Iterable[AnyMetric]) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric in metrics:
            sums = self.sums(metric.statistic.key)
            value = None if sums is None else number(metric, sums)
            if value is not None:
                found[metric.name] = value
        return found


DRAWS = 1000

_T = (
    *(12.706204736, 4.302652730, 3.182446305, 2.776445105, 2.570581836, 2.446911851, 2.364624252, 2.306004135),
    *(2.262157163, 2.228138852, 2.200985160, 2.178812830, 2.160368656, 2.144786688, 2.131449546),
)
"""Student's t for a level of 95 %, by degrees of freedom from 1 on."""


def bootstrap(
    strata: Sums, rebuilt: Callable[[NDArray[np.int64]], NDArray[Any]], values: Values, seed: int
) -> Interval | None:
    """Return percentiles of a metric over samples drawn with replacement, stratum by stratum.

    ``strata`` counts a class's samples in each cell, [n, cells], and ``rebuilt`` maps drawn counts [draws, n, cells] to
    sums [draws, size]. None if a stratum has from 1 to `FEWEST` - 1 samples, or a draw has no value.
    """
    totals = strata.sum(axis=1)
    there = totals > 0
    if not there.any() or totals[there].min() < FEWEST:
        return None
    drawn = _drawn(strata.tobytes(), strata.shape, seed)
    return middle_of(values(rebuilt(drawn).astype(np.float64)))


def middle_of(drawn: Sums) -> Interval | None:
    if not np.isfinite(drawn).all():
        return None
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@lru_cache(maxsize=1)
def _drawn(strata: bytes, shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Return counts [draws, n, cells]. By the cache, all metrics of one statistic see the same draws."""
    counts = np.frombuffer(strata).reshape(shape)
    totals = counts.sum(axis=1)
    there, drawn = totals > 0, np.zeros((DRAWS, *shape), np.int64)
    sizes, shares = totals[there].astype(np.int64), counts[there] / totals[there, None]
    drawn[:, there] = np.random.default_rng(seed).multinomial(sizes, shares, (DRAWS, len(sizes)))
    return drawn


def flat(drawn: NDArray[np.int64]) -> NDArray[Any]:
    return drawn.reshape(len(drawn), -1)


def jackknife(whole: Sums, without: Sums, values: Values) -> Interval | None:
    """Return a metric plus and minus Student's t times its standard error, leaving out one group at a time.

    ``whole`` are the sums of all samples, [size]; ``without`` those without each non-empty group, [groups, size].
    Source: Efron, Tibshirani: An Introduction to the Bootstrap (1993), section 11.5, the jackknife, of groups.
    """
    groups = len(without)
    if groups < FEWEST:
        return None
    found = values(np.concatenate([whole[None], without]))
    if not np.isfinite(found).all():
        return None
    value, each = float(found[0]), found[1:]
    apart = each - np.cumsum(each)[-1] / groups
    error = float(np.sqrt((groups - 1) / groups * np.cumsum(apart * apart)[-1]))
    half = _T[groups - 2] * error
    return value - half, value + half
