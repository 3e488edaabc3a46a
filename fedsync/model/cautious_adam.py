"""Cautious Adam with layer-scaled steps: a server optimizer.

The rate says how far all layers together may move in one commit, relative to their initial weights:

    scale of a tensor = 1 / (depth sqrt(inputs) max(1, sqrt(inputs / WIDE)))

| quantity | meaning |
|---|---|
| inputs | product of a tensor's dimensions but the first, as in PyTorch; initial weights are about 1 / sqrt(inputs) |
| depth | number of tensors with two or more dimensions |
| WIDE | inputs above which steps are shorter, except in the first layer, whose inputs are data |
| tensor of one dimension | a bias or a norm; takes the inputs of the last preceding tensor with more dimensions |
| embedding, parallel branches | counted as dense, consecutive layers: a transformer needs a higher rate |

A value moves only if momentum and the newest change have the same sign. The steps are divided by the share of moving
values. If a change opposes momentum and is smaller, the value went too far: most of the momentum is forgotten.

With two or more tensors of two or more dimensions, the rate grows while most values keep their direction, and falls
back, at the lowest to the set rate. A commit with a late update never raises it: that one agrees with momentum after
the model went too far. In noise, half of the values agree, and growth fades. With p the share of equal signs among
values that momentum and change both move:

    growth *= 1 - FADES + GAIN (max(p - GROWS, 0) + min(p - SHRINKS, 0)), within 1 and the `growth` of the file

Otherwise the rate is fixed, and silos get a look-ahead model. In each tensor it is ahead of the model by momentum's
part of the next two steps, ``lead = 2 rate scale beta_1 m / (sqrt(v) + tau)``, with Adam's correction. It moves by a
step plus the difference of two leads. The noise of updates that return late adds up. So steps from updates that are s
versions old are multiplied by ``1 / sqrt(1 + s)``, unless `grace` is set.

Sources: rate by inputs and depth: Bernstein et al. 2020 (arXiv:2002.03432) and Large et al. 2024 (arXiv:2405.14813);
wide layers: Yang et al. 2022 (arXiv:2203.03466); caution: Liang et al. 2024 (arXiv:2411.16085), algorithm 1; growth by
agreement with momentum: Jacobs 1988, one factor for all values as in Baydin et al. 2018 (arXiv:1703.04782); Adam:
Kingma and Ba 2015 (arXiv:1412.6980); at the server: Reddi et al. 2021 (arXiv:2003.00295); look-ahead momentum: Nesterov
1983, with Adam: Dozat 2016.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedsync.model.chunked_arrays import ArrayKeeper, give_back, spans
from fedsync.model.layout import Layout, Vector
from fedsync.model.running_statistics import is_statistic, statistics_of
from fedsync.model.server_optimizer import TINY, Adaptive, Backing, Moments, Part, ServerOptimizer, bounded

LEAST_SHARE = 0.25
"""Lower bound of the share of moving values, so that no value makes a leap."""

WIDE = 512
"""Most inputs of a layer for which the default rate was chosen. Values of a step are alike for related inputs, those of
initial weights are not. So the more inputs, the more a step changes what a layer computes."""

LEAD = 2
"""Steps of look-ahead. Fewest seconds among 1, 1.5 and 2; 36 to 66 seeds of heart."""

GAIN, GROWS, SHRINKS, FADES = 4.0, 0.6, 0.45, 0.01
"""Speed of growth; shares of agreeing values above which the rate grows and below which it shrinks; loss a commit."""

KEPT = 0.4
"""Share of overshot momentum that is kept. Fewest rounds among 0, 0.4 and 1, on three tasks with 8 to 20 seeds."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """Tensor in the flat vector, up to index ``stop``; ``scale`` is None for running statistics."""

    stop: int
    scale: float | None


def tensors_of(layout: Layout) -> tuple[Tensor, ...]:
    depth = max(1, _layers(layout))
    stop, root, wide, found = 0, 1.0, math.inf, []
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
        stop += size
        if len(shape) > 1:
            inputs = max(1, math.prod(shape[1:]))
            root, wide = math.sqrt(inputs * max(1.0, inputs / wide)), WIDE
        found.append(Tensor(stop, None if is_statistic(name, layout) else 1.0 / (depth * root)))
    return tuple(found)


def _layers(layout: Layout) -> int:
    return sum(len(shape) > 1 for shape in layout.shapes)


@dataclass(frozen=True, slots=True)
class Cautious(Adaptive):
    """Adam step, 0 where momentum and change disagree, times the tensor's scale, divided by the share that agrees.
    Powers count the steps made: Adam's own bias correction, unlike Flower's in `Adaptive`. With ``leads``, the sent
    model is ahead by the momentum of the next steps.
    """

    tensors: tuple[Tensor, ...] = ()
    leads: bool = False
    growth: float = 1.0

    def fitted(self, layout: Layout) -> Cautious:
        fitted = replace(self, statistics=statistics_of(layout), tensors=tensors_of(layout))
        return replace(fitted, leads=True, growth=1.0) if _layers(layout) <= 1 else fitted

    def begin(self, values: int, keeper: ArrayKeeper) -> Moments:
        return replace(ServerOptimizer.begin(self, values, keeper), powers=(1.0, 1.0, 1.0))

    def advance(
        self, before: Moments, change: Vector, stale: Sequence[int], keeper: ArrayKeeper, backing: Backing | None = None
    ) -> tuple[Moments, Part] | None:
        growth = self._grown(before, change, max(stale, default=0)) if self.growth > 1 else 1.0
        advanced = ServerOptimizer.advance(replace(self, rate=self.rate * growth), before, change, stale, keeper)
        if advanced is None:
            return None
        moments, step = replace(advanced[0], powers=(*advanced[0].powers, growth)), advanced[1]
        share = max(_agreeing(moments.vectors[0], change) / change.size, LEAST_SHARE)

        def scaled(start: int, stop: int) -> Vector:
            made = step(start, stop)
            further = self._lead(moments, start, stop) - self._lead(before, start, stop) if self.leads else None
            for low, high, scale in self._within(start, stop):
                here = slice(low - start, high - start)
                if scale is None:
                    continue
                made[here] *= np.float32(scale / share)
                if further is not None:
                    made[here] += further[here] * np.float32(scale)
            return bounded(made)

        return moments, scaled

    def pace(self, staleness: Sequence[int]) -> float:
        """With a lead and without ``grace``, return the mean over the updates of ``1 / sqrt(1 + s)``."""
        if not self.leads or self.grace is not None or not staleness:
            return ServerOptimizer.pace(self, staleness)
        return sum(1.0 / math.sqrt(1 + each) for each in staleness) / len(staleness)

    def _grown(self, before: Moments, change: Vector, oldest: int) -> float:
        """Return the factor of the rate, from the state before a commit and its change; ``oldest`` is in versions."""
        agree, disagree = (_agreeing(before.vectors[0], change, sign) for sign in (1, -1))
        share = agree / (agree + disagree) if agree + disagree else GROWS
        grown = before.powers[2] * (1 - FADES + GAIN * (max(share - GROWS, 0.0) + min(share - SHRINKS, 0.0)))
        return min(max(grown, 1.0), before.powers[2] if oldest else self.growth)

    def _lead(self, moments: Moments, start: int, stop: int) -> Vector:
        """Return what momentum alone contributes to the next `LEAD` steps, without the tensor scales."""
        parts = [vector[start:stop] for vector in moments.vectors]
        if moments.powers[0] == 1.0:
            return parts[0]  # momentum is 0 before the first step
        made = Adaptive._step(self, parts, parts[0])
        made *= np.float32(self._factor(moments) * self.beta_1 * LEAD)
        give_back(*moments.vectors)
        return bounded(made)

    def _comes_to(self, powers: tuple[float, ...]) -> bool:
        return len(powers) == 3 and all(0 <= power <= 1 for power in powers[:2]) and 1 <= powers[2] <= self.growth

    def _moment(self, which: int, old: Sequence[Vector], change: Vector) -> Vector:
        if not which:
            overshot = _agrees(-old[0], change) & (np.abs(change) < np.abs(old[0]))
            old = [np.where(overshot, old[0] * np.float32(KEPT), old[0])]
        return Adaptive._moment(self, which, old, change)

    def _step(self, moments: Sequence[Vector], change: Vector) -> Vector:
        made = Adaptive._step(self, moments, change)
        made[~_agrees(moments[0], change)] = 0
        return made

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, int, float | None]]:
        low = start
        for tensor in self.tensors:
            if low < (high := min(tensor.stop, stop)):
                yield low, high, tensor.scale
                low = high


def _agreeing(momentum: Vector, change: Vector, sign: int = 1) -> int:
    found = 0
    for start, stop in spans(change.size, change.itemsize):
        found += int(np.count_nonzero(_agrees(sign * momentum[start:stop], change[start:stop])))
        give_back(momentum, change)
    return found


def _agrees(momentum: Vector, change: Vector) -> NDArray[np.bool_]:
    """Return where both signs agree. Values that some processors flush to 0 count as 0."""
    tiny = np.float32(TINY)
    return ((momentum > 0) & (change >= tiny)) | ((momentum < 0) & (change <= -tiny))
