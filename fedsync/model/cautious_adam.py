"""Adam in which one rate does for many models: cautious, and with steps by each layer's width and the model's depth.

What a step of Adam makes of a layer's outputs depends on how many inputs are added up to one, and what it makes of the
model's outputs on how many layers follow one another. So a rate that suits one model is ten times too high or too low
for another. Here it says how far all layers together may move by one commit, beside what their weights are at first:

    scale of a tensor = 1 / (depth sqrt(inputs))

| | what it is |
|---|---|
| inputs | product of a tensor's lengths but the first, as in PyTorch; at first its weights are about 1 / sqrt(inputs) |
| depth | how many tensors have two dimensions or more |
| a tensor of one dimension | a bias or a norm: has the inputs of the last one before it that has two |

A value only moves if momentum and the newest change point the same way; the others' part is shared out among those.
Where a change points against momentum and is smaller, most of that is forgotten: noise of single changes is larger than
its mean, so this is none, but a value that has gone too far. Averages that norms keep are no weights: they move by the
change as it is.

A model of one layer has a convex loss, with the usual ones, and for those momentum is better looked at from where it is
about to bring the model: Nesterov's. What silos are given then is ahead of where the steps above have come to by what
momentum alone makes of the next two steps,

    lead = 2 rate scale beta_1 m / (sqrt(v) + tau), with Adam's correction,

and moves by a step plus the difference of two leads: it brakes as momentum falls. A deeper model has none. Where orders
are queued at silos, updates come back when one other step was made, and two steps ahead is where they count. What noise
they have then adds up: steps are shorter by the root of how many versions they were made beside, ``1 / sqrt(1 + s)``.

Sources: a rate by inputs and depth: Bernstein et al. 2020 (arXiv:2002.03432) and Large et al. 2024 (arXiv:2405.14813),
by whose reasoning a layer may move by its share of the model's; caution: Liang et al. 2024 (arXiv:2411.16085),
algorithm 1; Adam: Kingma and Ba 2015 (arXiv:1412.6980); at the server: Reddi et al. 2021 (arXiv:2003.00295);
momentum from ahead: Nesterov 1983, with Adam: Dozat 2016, "Incorporating Nesterov momentum into Adam".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.layout import Layout, Vector, matches
from fedsync.model.server_optimizer import TINY, Adaptive, Backing, Moments, Part, ServerOptimizer, bounded

STATISTICS = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Names of what PyTorch's norms keep."""

LEAST_SHARE = 0.25
"""Of all values: what lies still is shared out among no fewer, so that no value ever makes a leap."""

LEAD = 2
"""Steps. Of 1, 1.5, 2 and, with orders queued, 2.5 and 3: least seconds with and without; 36 to 66 seeds of heart."""

KEPT = 0.4
"""What is left of momentum that went too far. Of 0, 0.4 and 1 it took fewest rounds: on three tasks, 8 to 20 seeds."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor in the flat vector.

    Args:
        stop: after its last value; it begins where the one before ends.
        scale: of its steps; None: it moves by the change as it is.
    """

    stop: int
    scale: float | None


def tensors_of(layout: Layout) -> tuple[Tensor, ...]:
    """The model's tensors, with the scales of their steps."""
    depth = max(1, _layers(layout))
    stop, inputs, found = 0, 1, []
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
        stop += size
        inputs = max(1, math.prod(shape[1:])) if len(shape) > 1 else inputs
        found.append(Tensor(stop, None if matches(name, STATISTICS) else 1.0 / (depth * math.sqrt(inputs))))
    return tuple(found)


def _layers(layout: Layout) -> int:
    """How many follow one another; 0 where no tensor has two dimensions."""
    return sum(len(shape) > 1 for shape in layout.shapes)


@dataclass(frozen=True, slots=True)
class Cautious(Adaptive):
    """Adam's step, but 0 where momentum and change disagree; times the tensor's scale, over the share that agrees.

    Powers are those of the steps made: Adam's own correction, where `Adaptive` has Flower's.

    Args:
        tensors: of the model; none before `fitted`.
        leads: whether what is given out is ahead by what momentum makes of the next steps.
    """

    tensors: tuple[Tensor, ...] = ()
    leads: bool = False

    def fitted(self, layout: Layout) -> Cautious:
        return replace(self, tensors=tensors_of(layout), leads=_layers(layout) <= 1)

    def begin(self, values: int, keeper: ArrayKeeper) -> Moments:
        return replace(ServerOptimizer.begin(self, values, keeper), powers=(1.0, 1.0))

    def advance(
        self, before: Moments, change: Vector, pace: float, keeper: ArrayKeeper, backing: Backing | None = None
    ) -> tuple[Moments, Part] | None:
        advanced = ServerOptimizer.advance(self, before, change, pace, keeper)
        if advanced is None:
            return None
        moments, step = advanced
        share = max(_agreeing(moments.vectors[0], change) / change.size, LEAST_SHARE)

        def scaled(start: int, stop: int) -> Vector:
            made = step(start, stop)
            further = self._lead(moments, start, stop) - self._lead(before, start, stop) if self.leads else None
            for low, high, scale in self._within(start, stop):
                here = slice(low - start, high - start)
                if scale is None:
                    made[here] = change[low:high]
                    continue
                made[here] *= np.float32(scale / share)
                if further is not None:
                    made[here] += further[here] * np.float32(scale)
            return bounded(made)

        return moments, scaled

    def pace(self, staleness: Sequence[int]) -> float:
        """With a lead, and without a ``grace``, the mean over the updates of ``1 / sqrt(1 + s)``."""
        if not self.leads or self.grace is not None or not staleness:
            return ServerOptimizer.pace(self, staleness)
        return sum(1.0 / math.sqrt(1 + each) for each in staleness) / len(staleness)

    def _lead(self, moments: Moments, start: int, stop: int) -> Vector:
        """What momentum alone makes of the steps after these, but for scales."""
        parts = [vector[start:stop] for vector in moments.vectors]
        if moments.powers[0] == 1.0:
            return parts[0]  # no step was made, and momentum is 0
        made = Adaptive._step(self, parts, parts[0], moments.steps)
        made *= np.float32(self._factor(moments) * self.beta_1 * LEAD)
        give_back(*moments.vectors)
        return bounded(made)

    def _comes_to(self, powers: tuple[float, ...]) -> bool:
        return len(powers) == 2 and all(0 <= power <= 1 for power in powers)

    def _moment(self, which: int, old: Sequence[Vector], change: Vector, steps: int) -> Vector:
        if not which:
            overshot = _agrees(-old[0], change) & (np.abs(change) < np.abs(old[0]))
            old = [np.where(overshot, old[0] * np.float32(KEPT), old[0])]
        return Adaptive._moment(self, which, old, change, steps)

    def _step(self, moments: Sequence[Vector], change: Vector, steps: int) -> Vector:
        made = Adaptive._step(self, moments, change, steps)
        made[~_agrees(moments[0], change)] = 0
        return made

    def _within(self, start: int, stop: int) -> Iterator[tuple[int, int, float | None]]:
        """Start, stop and scale of each tensor's part of a span."""
        low = start
        for tensor in self.tensors:
            if low < (high := min(tensor.stop, stop)):
                yield low, high, tensor.scale
                low = high


def _agreeing(momentum: Vector, change: Vector) -> int:
    """Values in which both point the same way."""
    found = 0
    for start, stop in spans(change.size, change.itemsize):
        found += int(np.count_nonzero(_agrees(momentum[start:stop], change[start:stop])))
        give_back(momentum, change)
    return found


def _agrees(momentum: Vector, change: Vector) -> NDArray[np.bool_]:
    """Whether both point the same way. What some processors take for 0 counts as that."""
    tiny = np.float32(TINY)
    return ((momentum > 0) & (change >= tiny)) | ((momentum < 0) & (change <= -tiny))
