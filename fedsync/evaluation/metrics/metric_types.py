"""What a statistic and a metric are."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError

Sums = NDArray[np.float64]
"""Sums of a statistic, float64 [size]; where a docstring says so, many at once, [..., size]."""

Values = Callable[[Sums], NDArray[np.float64]]
"""Numbers [...] of sums [..., size]; NaN where they say none."""

Interval = tuple[float, float]

KEY = re.compile(r"[a-z][a-z0-9_]*(/[a-z0-9_]+){0,3}")
"""Key of a statistic."""

FEWEST = 5
"""Samples of a class, or of all where there are none, below which no interval is estimated."""

LEVEL = 0.95
"""Of intervals."""


class Statistic(ABC):
    """What a silo sums over the samples of a split. A frozen value; the key says all of it."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Names it among all statistics, with its sizes: ``scores/256``."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Entries of its sums."""

    @property
    def whole(self) -> bool:
        """Whether all entries are counts."""
        return True

    @property
    def places(self) -> int:
        """In how many entries a sample of a class counts; 0 where there are no classes."""
        return 0

    def problem(self, sums: Sums) -> str:
        """What no samples can come to, in sums [size] that are finite, and counts if they are to be; empty if fine."""
        return ""

    def support(self, sums: Sums) -> Mapping[str, int]:
        """How many samples there are behind sums [size], by class where there are classes; else ``samples``."""
        return {}

    def left_out(self, sums: Sums) -> Sums:
        """Sums [groups, size] without each of the groups that samples were dealt to; no groups where they were not."""
        return np.empty((0, self.size))

    def interval(self, sums: Sums, values: Values, seed: int) -> Interval | None:
        """Between which numbers a metric would lie with other samples of the same kind, at `LEVEL`.

        Args:
            sums: of the statistic, [size].
            values: of the metric.
            seed: of what is drawn at random.

        Returns:
            Both ends; None where that cannot be estimated.
        """
        return None


S = TypeVar("S", bound=Statistic)


@dataclass(frozen=True, slots=True)
class Metric(ABC, Generic[S]):
    """A number worked out of the sums of one statistic.

    Args:
        name: in files and options: small letters, digits and ``_``.
        statistic: what it is worked out of.
        higher_is_better: or lower.
        limits: between which every value lies, and so do intervals.
    """

    name: str
    statistic: S
    higher_is_better: bool = True
    limits: tuple[float, float] = (-inf, inf)

    @abstractmethod
    def value(self, sums: Sums) -> float | None:
        """The number; None where the sums [size] say none, as an AUROC where there is one class only."""

    def values(self, sums: Sums) -> NDArray[np.float64]:
        """Numbers [n] of sums [n, size], NaN for None; of one after the other, unless a metric knows better."""
        return np.array([np.nan if (found := number(self, each)) is None else found for each in sums])

    def interval(self, sums: Sums, seed: int) -> Interval | None:
        """See `Statistic.interval`; none where there is no value."""
        if number(self, sums) is None:
            return None
        with np.errstate(all="ignore"):
            found = self.statistic.interval(sums, self.values, seed)
        least, most = self.limits
        return None if found is None else (max(found[0], least), min(found[1], most))

    def support(self, sums: Sums) -> Mapping[str, int]:
        """See `Statistic.support`."""
        return self.statistic.support(sums)


class ArrayMetric(Metric[S]):
    """A metric that works out many numbers at once."""

    __slots__ = ()

    def value(self, sums: Sums) -> float | None:
        return float(self.values(sums[None])[0])

    @abstractmethod
    def values(self, sums: Sums) -> NDArray[np.float64]: ...


AnyMetric = Metric[Any]


def number(metric: AnyMetric, sums: Sums) -> float | None:
    """What a metric says of sums [size]; None also where it says no finite number, or stumbles over odd sums."""
    try:
        with np.errstate(all="ignore"):
            found = metric.value(sums)
    except (ArithmeticError, ValueError):  # a silo that sends odd sums does not end the run of all others
        return None
    return float(found) if found is not None and isfinite(found) else None


def ratio(above: Sums, below: Sums) -> Sums:
    """``above / below`` elementwise; NaN where ``below`` is 0."""
    with np.errstate(all="ignore"):
        return np.where(below != 0, above / below, np.nan)


def mean_of_known(values: Sums) -> Sums:
    """Mean over the last axis of what is not NaN; NaN where all is."""
    known = ~np.isnan(values)
    return ratio(np.cumsum(np.where(known, values, 0.0), axis=-1)[..., -1], known.sum(axis=-1).astype(np.float64))


def statistics_of(metrics: Iterable[AnyMetric]) -> dict[str, Statistic]:
    """The statistics that metrics are worked out of, by key.

    Raises:
        ConfigError: two metrics have one name, two statistics one key, or a name or key is none.
    """
    statistics: dict[str, Statistic] = {}
    names: set[str] = set()
    for metric in metrics:
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
"""Every finite float is a multiple of two to the power of minus this."""


@dataclass(slots=True)
class ExactSum:
    """A sum of floats without any rounding, so that what is taken out of it leaves no trace.

    A running sum of floats would not do: a number far larger than the others swallows them, and takes them along when
    it goes. A whole number of the smallest unit that floats have is exact, and takes no longer for more silos.
    """

    units: int = 0

    def add(self, value: float, times: int) -> None:
        """Put a finite value in, or take it out again with ``times=-1``."""
        numerator, denominator = value.as_integer_ratio()
        self.units += times * (numerator << (_UNIT_BITS + 1 - denominator.bit_length()))

    @property
    def value(self) -> float:
        """The float nearest to the sum: what `math.fsum` makes of the same values."""
        return self.units / (1 << _UNIT_BITS)
