"""What a commit's sum of weighted updates is made into before the model moves by it: momentum, Adam and their kin.

Who has the exact model steps: the server in the clear, every silo for itself under encryption. Silos must come to the
same bits, so a step is elementwise, in float32, of operations that IEEE 754 rounds in one way only: sum, difference,
product, quotient and square root. There is no `pow`, whose last bit is the library's affair: powers are kept, and
multiplied on. What is below `TINY` counts as nothing, for some programs have the processor take subnormal numbers for
zeros and others do not.

Values are bounded by construction, whatever the sums are, so that no version makes an infinity or NaN of a moment:

| value | lies within |
|---|---|
| change of the model that goes in, each first moment, each step that comes out | +-`LARGEST` |
| each second moment | 0 to the square of `LARGEST`, which is finite; so its root is a number |

A commit that changes nothing, as one of updates that only score does, makes no step: there is nothing that momentum
should go on for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.layout import Layout, Vector

LARGEST = 2.0**63
TINY = 2.0**-90

MOST_POWERS = 2
"""Powers that any optimizer keeps at most."""

_GONE = 2.0**-60
"""A power below it does not change 1 any more."""

Part = Callable[[int, int], Vector]
"""Makes the values from a start to a stop, float32 [stop - start]."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """What an optimizer remembers of the steps so far.

    Args:
        steps: made.
        powers: of the optimizer's decays, each to the power of ``steps + 1``; or the number that it keeps instead.
        vectors: float32 [values] each.
    """

    steps: int = 0
    powers: tuple[float, ...] = ()
    vectors: tuple[Vector, ...] = ()


@dataclass(frozen=True, slots=True)
class Backing:
    """What is behind a commit's change, for optimizers whose silos keep `controls`.

    Args:
        steps: local steps that the change is worth: the sum over updates of coefficient times steps.
        weight: what the updates stand for together: the sum of n_i, as in `fedsync.core.weighting.Weighting`.
        updates: in the commit.
        newcomers: of their silos, those that no commit before had an update of.
    """

    steps: float
    weight: float
    updates: int
    newcomers: int


class ServerOptimizer(ABC):
    """Makes steps of changes; a value, which remembers nothing itself. Not to be confused with the silos' optimizers.

    Attributes:
        vectors: of its `Moments`, each as large as the model.
        controls: the first of them goes to the silos, which keep one of their own; see
            `fedsync.model.control_variates`.
        rate: what a step is multiplied by; the server's learning rate.
        grace: as for `pace`.
    """

    __slots__ = ()
    vectors: ClassVar[int]
    controls: ClassVar[bool] = False
    rate: float
    grace: int | None

    @property
    def decays(self) -> tuple[float, ...]:
        """Whose powers it goes by."""
        return ()

    def fitted(self, layout: Layout) -> ServerOptimizer:
        """What steps with a model of this layout, if that matters to it."""
        return self

    def begin(self, values: int, keeper: ArrayKeeper) -> Moments:
        """Before any step of a model of so many values."""
        zeros = keeper.make(np.float32, values, lambda start, stop: np.zeros(stop - start, np.float32))
        return Moments(0, self.decays, (zeros,) * self.vectors)

    def pace(self, staleness: Sequence[int]) -> float:
        """What the rate of a commit is multiplied by, 0..1: the mean over its updates of ``1 / (1 + s - grace)``.

        An update that is no more versions old than ``grace`` counts 1; without a grace all do.

        Args:
            staleness: s of each update, in versions; 0 is fresh.

        Source: delay-adaptive steps, Mishchenko et al. 2022 (arXiv:2206.07638), which bound the step by one over the
        delay.
        """
        if self.grace is None or not staleness:
            return 1.0
        return sum(1.0 / (1 + max(each - self.grace, 0)) for each in staleness) / len(staleness)

    def advance(
        self, before: Moments, change: Vector, pace: float, keeper: ArrayKeeper, backing: Backing | None = None
    ) -> tuple[Moments, Part] | None:
        """Moments after a commit, and what the model moves by; None where the commit changes nothing.

        Args:
            before: moments.
            change: the commit's sum of weighted updates, finite, float32 [values].
            pace: see `pace`.
            keeper: keeps the moments.
            backing: what is behind the change, where silos keep `controls`.
        """
        if not _moves(change):
            return None
        powers = tuple(map(_power, before.powers, self.decays))
        bare = Moments(before.steps + 1, powers)

        def moment(which: int, start: int, stop: int) -> Vector:
            old = [vector[start:stop] for vector in before.vectors]
            made = self._moment(which, old, bounded(change[start:stop]), bare.steps)
            give_back(change, *before.vectors)
            return self._settled(which, made)

        vectors = tuple(keeper.make(np.float32, change.size, partial(moment, which)) for which in range(self.vectors))
        factor = np.float32(self._factor(bare) * pace)

        def step(start: int, stop: int) -> Vector:
            parts = [vector[start:stop] for vector in vectors]
            made = self._step(parts, bounded(change[start:stop]), bare.steps)
            made *= factor
            give_back(change, *vectors)
            return bounded(made)

        return Moments(bare.steps, powers, vectors), step

    def check(self, moments: Moments) -> None:
        """See that another's moments are such as steps come to.

        Raises:
            ValueError: they are not.
        """
        if moments.steps < 0 or len(moments.vectors) != self.vectors:
            raise ValueError(f"{len(moments.vectors)} moments of {moments.steps} steps")
        if not self._comes_to(moments.powers):
            raise ValueError("powers that no decay comes to")
        for which, vector in enumerate(moments.vectors):
            low, high = self._range(which)
            for start, stop in spans(vector.size, 4):
                part = vector[start:stop]
                if not (np.min(part) >= low and np.max(part) <= high):  # NaN fails every comparison
                    raise ValueError(f"moment {which} has values beyond {low:g} and {high:g}")
                give_back(vector)

    def _comes_to(self, powers: tuple[float, ...]) -> bool:
        """Whether steps come to such powers."""
        return len(powers) == len(self.decays) and all(map(_is_power, powers, self.decays))

    def _range(self, which: int) -> tuple[float, float]:
        """Within which the values of a moment lie."""
        return -LARGEST, LARGEST

    def _settled(self, which: int, moment: Vector) -> Vector:
        """A moment within its range, and without what is too small to count."""
        moment[np.abs(moment) < np.float32(TINY)] = 0
        low, high = self._range(which)
        return np.clip(moment, np.float32(low), np.float32(high), out=moment)

    def _factor(self, moments: Moments) -> float:
        """What a step is multiplied by."""
        return self.rate

    @abstractmethod
    def _moment(self, which: int, old: Sequence[Vector], change: Vector, steps: int) -> Vector:
        """A part of a moment after the step of this number, from the same part of all; in memory of its own."""

    @abstractmethod
    def _step(self, moments: Sequence[Vector], change: Vector, steps: int) -> Vector:
        """A part of the step of this number, but for `_factor`; in memory of its own."""


@dataclass(frozen=True, slots=True)
class HeavyBall(ServerOptimizer):
    """``m = momentum m + change``, ``model += rate m``.

    Source: FedAvgM, Hsu et al. 2019, arXiv:1909.06335; as ``flwr.serverapp.strategy.FedAvgM``.
    """

    momentum: float
    rate: float
    grace: int | None = None

    vectors: ClassVar[int] = 1

    def _moment(self, which: int, old: Sequence[Vector], change: Vector, steps: int) -> Vector:
        made = old[0] * np.float32(self.momentum)
        made += change
        return made

    def _step(self, moments: Sequence[Vector], change: Vector, steps: int) -> Vector:
        return moments[0].copy()


@dataclass(frozen=True, slots=True)
class Adaptive(ServerOptimizer):
    """``m = beta_1 m + (1 - beta_1) change``, ``model += rate m / (sqrt(v) + tau)``, with v by ``kind``.

    | kind | v | rate |
    |---|---|---|
    | ``adam`` | ``beta_2 v + (1 - beta_2) change^2`` | times ``sqrt(1 - beta_2^(t + 1)) / (1 - beta_1^(t + 1))`` |
    | ``yogi`` | ``v - (1 - beta_2) change^2 sign(v - change^2)`` | as it is |
    | ``adagrad`` | ``v + change^2`` | as it is |

    t is the number of the step, from 1; flwr has t + 1 there.

    Source: Reddi et al. 2021, arXiv:2003.00295; as ``flwr.serverapp.strategy.FedAdam`` and its kin.
    """

    kind: Literal["adam", "yogi", "adagrad"]
    rate: float
    beta_1: float
    beta_2: float
    tau: float
    grace: int | None = None

    vectors: ClassVar[int] = 2

    @property
    def decays(self) -> tuple[float, ...]:
        return (self.beta_1, self.beta_2) if self.kind == "adam" else ()

    def _range(self, which: int) -> tuple[float, float]:
        return (0.0, LARGEST**2) if which else (-LARGEST, LARGEST)

    def _factor(self, moments: Moments) -> float:
        if self.kind != "adam":
            return self.rate
        first, second = moments.powers
        return self.rate * math.sqrt(1 - second) / (1 - first)

    def _moment(self, which: int, old: Sequence[Vector], change: Vector, steps: int) -> Vector:
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

    def _step(self, moments: Sequence[Vector], change: Vector, steps: int) -> Vector:
        below = np.sqrt(moments[1])
        below += np.float32(self.tau)
        return np.divide(moments[0], below, out=below)


@dataclass(frozen=True, slots=True)
class Delayed(ServerOptimizer):
    """Momentum is renewed and applied every N commits; in between the model moves by the changes alone, as they come.

    With c = ``spread`` and b = ``momentum``: at every N-th step ``m = b m + sum of the last N changes`` and ``model +=
    rate ((1 - c N + c) b m + change)``; at others ``model += rate (c b m + change)``. With N = 1 it is Nesterov's.

    Source: delayed Nesterov, Liu et al. 2024, arXiv:2401.09135, algorithm 3, where a commit is one silo's update and
    brings 1 / N of it.
    """

    momentum: float
    every: int
    spread: float
    rate: float
    grace: int | None = None

    vectors: ClassVar[int] = 2

    def _moment(self, which: int, old: Sequence[Vector], change: Vector, steps: int) -> Vector:
        due = steps % self.every == 0
        if which:  # the changes since the last time
            return np.zeros_like(change) if due else old[1] + change
        if not due:
            return old[0].copy()
        made = old[0] * np.float32(self.momentum)
        made += old[1]
        made += change
        return made

    def _step(self, moments: Sequence[Vector], change: Vector, steps: int) -> Vector:
        share = self.spread
        if steps % self.every == 0:
            share += 1 - self.spread * self.every
        made = moments[0] * np.float32(share * self.momentum)
        made += change
        return made


def _is_power(power: float, decay: float) -> bool:
    """Whether it may be one of a decay; NaN is none."""
    return 0 <= power <= decay


def _power(power: float, decay: float) -> float:
    """The next power."""
    following = power * decay
    return following if following > _GONE else 0.0


def _moves(change: Vector) -> bool:
    """Whether any value is not 0."""
    for start, stop in spans(change.size, 4):
        found = bool(change[start:stop].any())
        give_back(change)
        if found:
            return True
    return False


def bounded(values: Vector) -> Vector:
    """Within +-`LARGEST`."""
    return np.clip(values, np.float32(-LARGEST), np.float32(LARGEST))
