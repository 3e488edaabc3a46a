"""Running statistics of norm layers and other buffers: values of a model that are counted or averaged, not trained.

A silo's update changes them far more than weights (a counter by the number of steps), and a variance below 0 makes the
model useless. So no server optimizer steps them, and no wire format that keeps a loss for the next update rounds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedsync.common.errors import ProtocolError
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Layout, Vector, matches
from fedsync.model.plain_wire import FP32, MAX_MAGNITUDE, Draws, Spanned, Wire, WireFormat, check_length
from fedsync.model.transfer import Payload

NAMES = ("*running_mean", "*running_var", "*num_batches_tracked", "*moving_mean", "*moving_variance")
"""Patterns of the names that torch and Keras give them; Keras keeps them as parameters without a gradient."""

INSTEAD = f"group norm, or keep them at the silos: model.private: {list(NAMES)}"

Ranges = tuple[tuple[int, int], ...]
"""Start and stop of ranges in the flat vector, ascending."""


def is_statistic(name: str, layout: Layout) -> bool:
    return name in layout.buffers or matches(name, NAMES)


def statistics_of(layout: Layout) -> Ranges:
    stops = np.cumsum(layout.sizes).tolist()
    parts = zip(layout.names, layout.sizes, stops, strict=True)
    return tuple((stop - size, stop) for name, size, stop in parts if size and is_statistic(name, layout))


def within(ranges: Ranges, start: int, stop: int) -> Iterator[slice]:
    """Yield the parts of ``ranges`` in the span from ``start`` to ``stop``, counted from ``start``."""
    for low, high in ranges:
        first, last = max(low, start), min(high, stop)
        if first < last:
            yield slice(first - start, last - start)


def fitted(wire: Wire, layout: Layout) -> Wire:
    """Return the formats of a run whose models have this layout."""
    ranges = statistics_of(layout)
    if not ranges:
        return wire
    up, down = (ExactStatistics(each, ranges) if each.feedback else each for each in (wire.up, wire.down))
    return Wire(up, down)


@dataclass(frozen=True, slots=True)
class ExactStatistics:
    """Values of ``ranges`` as float32, then the vector in the format ``inner``, with zeros in their place."""

    inner: WireFormat
    ranges: Ranges

    @property
    def feedback(self) -> bool:
        return self.inner.feedback

    @property
    def _bytes(self) -> int:
        return FP32.payload_bytes(sum(stop - start for start, stop in self.ranges))

    def payload_bytes(self, values: int) -> int:
        return self._bytes + self.inner.payload_bytes(values)

    def encode(self, vector: Spanned, rng: Draws = None, keeper: ArrayKeeper | None = None) -> Payload:
        exact = np.concatenate([vector[start:stop] for start, stop in self.ranges])
        if not np.isfinite(exact).all():
            raise ValueError("the vector has values that are not finite")
        return (keeper or ArrayKeeper()).join([exact, self.inner.encode(_Without(vector, self.ranges), rng)])

    def check(self, payload: Payload, values: int, sender: str) -> None:
        check_length(payload, self.payload_bytes(values), sender)
        exact = payload[: self._bytes].view(np.float32)
        if not (np.abs(exact) <= MAX_MAGNITUDE).all():  # NaN fails every comparison
            raise ProtocolError(sender, "finite", f"running statistics beyond {MAX_MAGNITUDE:g}")
        self.inner.check(payload[self._bytes :], values, sender)

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        values = self.inner.decode(payload[self._bytes :], start, stop)
        exact = payload[: self._bytes].view(np.float32)
        place = sum(part.stop - part.start for part in within(self.ranges, 0, start))
        for part in within(self.ranges, start, stop):
            following = place + part.stop - part.start
            values[part] = exact[place:following]
            place = following
        return values


@dataclass(frozen=True, slots=True)
class _Without:
    """Vector with zeros in the place of ``ranges``."""

    vector: Spanned
    ranges: Ranges

    @property
    def size(self) -> int:
        return self.vector.size

    def __getitem__(self, span: slice, /) -> Vector:
        values = self.vector[span].copy()
        for part in within(self.ranges, span.start or 0, span.stop):
            values[part] = 0
        return values
