"""Server optimizers (momentum, Adam, ...): functions from the weighted sum of updates to the model's step.

Without encryption the server computes the step. Under encryption each silo does, and all silos must compute identical
bits. So a step uses elementwise float32 operations that IEEE 754 rounds in one way only. `pow` is not one of them, so
powers of decay rates are stored, and multiplied once more at each commit. Values below `TINY` become 0, because some
programs let the processor treat subnormal numbers as zero. No moment becomes infinity or NaN, whatever the sums are.
The change that enters the optimizer, each first moment and each step lie within +-`LARGEST`. Each second moment lies
between 0 and the square of `LARGEST`, which is finite.

A commit without any change makes no step: momentum has no reason to continue. Running averages of norm layers are no
weights: they move by the change itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from fedsync.model.chunked_arrays import ArrayKeeper, give_back, spans
from fedsync.model.layout import Layout, Vector
from fedsync.model.running_statistics import Ranges, statistics_of, within

LARGEST = 2.0**63
TINY = 2.0**-90

MOST_POWERS = 3
"""Largest number of powers that any optimizer stores."""

_GONE = 2.0**-60
"""Powers below this do not change the float 1."""

Part = Callable[[int, int], Vector]
"""Function from start and stop to the values of that range, float32 [stop - start]."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """State of an optimizer after ``steps`` steps: ``vectors``, float32 [values] each, and ``powers``: the decays to
    the power of ``steps + 1``, or another number that the optimizer stores instead.
    """

    steps: int = 0
    powers: tuple[float, ...] = ()
    vectors: tuple[Vector, ...] = ()


@dataclass(frozen=True, slots=True)
class Backing:
    """Totals behind a commit's change, for optimizers with control variates (`controls`).

    Args:
        steps: local steps that the change represents: the sum over updates of coefficient times steps.
        weight: total weight of the updates: the sum of n_i, as in `fedsync.core.silo_weight.Weighting`.
        newcomers: number of silos in the commit without an update in an earlier commit.
    """

    steps: float
    weight: float
    updates: int
    newcomers: int


class ServerOptimizer(ABC):
    """Base of server optimizers: stateless values. Not to be confused with the silos' local optimizers.

    Attributes:
        vectors: number of vectors in its `Moments`, each as large as the model.
        controls: the first vector goes to the silos; see `fedsync.model.control_variates`.
        rate: factor of a step; the server's learning rate.
    """

    __slots__ = ()
    vectors: ClassVar[int]
    controls: ClassVar[bool] = False
    rate: float
    grace: int | None

    @property
    def decays(self) -> tuple[float, ...]:
        return ()

    @property
    def statistics(self) -> Ranges:
        """Running statistics, which move by the change itself."""
        return ()

    def fitted(self, layout: Layout) -> ServerOptimizer:
        return self

    def begin(self, values: int, keeper: ArrayKeeper) -> Moments:
        zeros = keeper.make(np.float32, values, lambda start, stop: np.zeros(stop - start, np.float32))
        return Moments(0, self.decays, (zeros,) * self.vectors)

    def pace(self, staleness: Sequence[int]) -> float:
        """Return the factor of a commit's rate, 0..1: the mean over its updates of ``1 / (1 + s - grace)``.

        ``staleness`` has s of each update [versions]. Updates with s up to ``grace`` count 1; with ``grace`` None, all
        do.

        Source: delay-adaptive steps, Mishchenko et al. 2022 (arXiv:2206.07638): a step is at most one over the delay.
        """
        if self.grace is None or not staleness:
            return 1.0
        return sum(1.0 / (1 + max(each - self.grace, 0)) for each in staleness) / len(staleness)

    def advance(
        self, before: Moments, change: Vector, stale: Sequence[int], keeper: ArrayKeeper, backing: Backing | None = None
    ) -> tuple[Moments, Part] | None:
        """Return the moments after a commit and the model's step; None if the commit changes nothing. ``change`` is the
        commit's weighted sum of updates of staleness ``stale``, finite, float32 [values]. `controls` need ``backing``.
        """
        if not _moves(change):
            return None
        following = (power * decay for power, decay in zip(before.powers, self.decays, strict=False))
        powers = tuple(power if power > _GONE else 0.0 for power in following)
        bare = Moments(before.steps + 1, powers)

        def moment(which: int, start: int, stop: int) -> Vector:
            old = [vector[start:stop] for vector in before.vectors]
            made = self._moment(which, old, bounded(change[start:stop]))
            give_back(change, *before.vectors)
            return self._settled(which, made)

        vectors = tuple(keeper.make(np.float32, change.size, partial(moment, which)) for which in range(self.vectors))
        factor = np.float32(self._factor(bare) * self.pace(stale))

        def step(start: int, stop: int) -> Vector:
            parts = [vector[start:stop] for vector in vectors]
            made = self._step(parts, bounded(change[start:stop]))
            made *= factor
            for part in within(self.statistics, start, stop):
                made[part] = change[start:stop][part]
            give_back(change, *vectors)
            return bounded(made)

        return Moments(bare.steps, powers, vectors), step

    def check(self, moments: Moments) -> None:
        """Check that received moments are possible results of steps; raises ValueError if they are not."""
        if moments.steps < 0 or len(moments.vectors) != self.vectors:
            raise ValueError(f"{len(moments.vectors)} moments of {moments.steps} steps")
        if not self._comes_to(moments.powers):
            raise ValueError("powers that no decay produces")
        for which, vector in enumerate(moments.vectors):
            low, high = self._range(which)
            for start, stop in spans(vector.size, 4):
                part = vector[start:stop]
                if not (np.min(part) >= low and np.max(part) <= high):  # NaN fails every comparison
                    raise ValueError(f"moment {which} has values beyond {low:g} and {high:g}")
                give_back(vector)

    def _comes_to(self, powers: tuple[float, ...]) -> bool:
        same = len(powers) == len(self.decays)
        return same and all(0 <= power <= decay for power, decay in zip(powers, self.decays, strict=True))

    def _range(self, which: int) -> tuple[float, float]:
        return -LARGEST, LARGEST

    def _settled(self, which: int, moment: Vector) -> Vector:
        moment[np.abs(moment) < np.float32(TINY)] = 0
        low, high = self._range(which)
        return np.clip(moment, np.float32(low), np.float32(high), out=moment)

    def _factor(self, moments: Moments) -> float:
        return self.rate

    @abstractmethod
    def _moment(self, which: int, old: Sequence[Vector], change: Vector) -> Vector:
        """Return a part of a moment after a step, from the same part of all moments; in new memory."""

    @abstractmethod
    def _step(self, moments: Sequence[Vector], change: Vector) -> Vector:
        """Return a part of a step, without `_factor`; in new memory."""


@dataclass(frozen=True, slots=True)
class HeavyBall(ServerOptimizer):
    """Server momentum: ``m = momentum m + change``, ``model += rate m``; FedAvgM, Hsu et al. 2019, arXiv:1909.06335."""

    momentum: float
    rate: float
    grace: int | None = None
    statistics: Ranges = ()

    vectors: ClassVar[int] = 1

    def fitted(self, layout: Layout) -> HeavyBall:
        return replace(self, statistics=statistics_of(layout))

    def _moment(self, which: int, old: Sequence[Vector], change: Vector) -> Vector:
        made = old[0] * np.float32(self.momentum)
        made += change
        return made

    def _step(self, moments: Sequence[Vector], change: Vector) -> Vector:
        return moments[0].copy()


@dataclass(frozen=True, slots=True)
class Adaptive(ServerOptimizer):
    """Adaptive server optimizers: Adam, Yogi and Adagrad.

    ``m = beta_1 m + (1 - beta_1) change``, ``model += rate m / (sqrt(v) + tau)``, with v by ``kind``:

    | kind | v | rate |
    |---|---|---|
    | ``adam`` | ``beta_2 v + (1 - beta_2) change^2`` | times ``sqrt(1 - beta_2^(t + 1)) / (1 - beta_1^(t + 1))`` |
    | ``yogi`` | ``v - (1 - beta_2) change^2 sign(v - change^2)`` | as it is |
    | ``adagrad`` | ``v + change^2`` | as it is |

    t is the number of the step, from 1; flwr uses t + 1 there.

    Source: Reddi et al. 2021, arXiv:2003.00295; as ``flwr.serverapp.strategy.FedAdam`` and its variants.
    """

    kind: Literal["adam", "yogi", "adagrad"]
    rate: float
    beta_1: float
    beta_2: float
    tau: float
    grace: int | None = None
    statistics: Ranges = ()

    vectors: ClassVar[int] = 2

    def fitted(self, layout: Layout) -> Adaptive:
        return replace(self, statistics=statistics_of(layout))

    @property
    def decays(self) -> tuple[float, ...]:
        return (self.beta_1, self.beta_2) if self.kind == "adam" else ()

    def _range(self, which: int) -> tuple[float, float]:
        return (0.0, LARGEST**2) if which else (-LARGEST, LARGEST)

    def _factor(self, moments: Moments) -> float:
        if self.kind != "adam":
            return self.rate
        first, second = moments.powers[:2]
        return self.rate * math.sqrt(1 - second) / (1 - first)

    def _moment(self, which: int, old: Sequence[Vector], change: Vector) -> Vector:
        if not which:
            made = old[0] * np.float32(self.beta_1)
            made += change * np.float32(1 - self.beta_1)
            return made
        square = change * change
        match self.kind:
            case "adam":
                made = old[1] * np.float32(self.beta_2)
                made += square * np.float32(1 - self.beta_2)
            case "yogi":
                toward = np.sign(old[1] - square)
                toward *= square * np.float32(1 - self.beta_2)
                made = old[1] - toward
            case "adagrad":
                made = old[1] + square
        return made

    def _step(self, moments: Sequence[Vector], change: Vector) -> Vector:
        below = np.sqrt(moments[1])
        below += np.float32(self.tau)
        return np.divide(moments[0], below, out=below)


def _moves(change: Vector) -> bool:
    for start, stop in spans(change.size, 4):
        found = bool(change[start:stop].any())
        give_back(change)
        if found:
            return True
    return False


def bounded(values: Vector) -> Vector:
    return np.clip(values, np.float32(-LARGEST), np.float32(LARGEST))
