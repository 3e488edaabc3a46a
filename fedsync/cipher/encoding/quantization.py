"""Quantiser: converts an update to packed integers before encryption, and a decrypted sum back to floats.

Each tensor has an *exponent* e that all silos agreed on. Its values lie within +-2^e, and its step is 2^(e - bits + 1).
All silos of a sum use equal exponents: the sum of the integers, times the step, is exactly the sum of rounded values.
The header (`tally`) takes the first slots of chunk 0 (`packing`), and the values follow: a separate chunk for the
header would add several percent to a small model's traffic.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding.packing import MAX_CAP, MAX_EXPONENT, MIN_EXPONENT, SLOTS, Integers, Packing, Slots
from fedsync.cipher.encoding.tally import header_form
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.evaluation.metrics.metric_types import Statistic
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_wire import fraction_bits, round_fixed

# Largest ratio of a tensor's step to its largest value; above it, the values are sent as zeros.
_COARSE = 16

# Chunks that are processed together: their buffers fit the cache.
_GROUP = 8


@dataclass(frozen=True)
class QuantizationGrid:
    """Parameters that silos must agree on before their integers can be added; `ValueError` if they do not fit.

    ``layout`` has the sealed tensors, and ``exponents`` one exponent for each, in the same order. ``cap`` is the
    largest weight n_i: an update is multiplied by n_i / cap before it is sent. The header has room for sums of
    ``statistics``.
    """

    layout: Layout
    packing: Packing
    exponents: tuple[int, ...]
    cap: int
    statistics: tuple[Statistic, ...] = ()

    def __post_init__(self) -> None:
        if len(self.exponents) != len(self.layout.names):
            raise ValueError(f"{len(self.exponents)} exponents for {len(self.layout.names)} tensors")
        if not all(MIN_EXPONENT <= exponent <= MAX_EXPONENT for exponent in self.exponents):
            raise ValueError(f"exponents lie within {MIN_EXPONENT}..{MAX_EXPONENT}")
        if not 1 <= self.cap <= MAX_CAP:
            raise ValueError(f"cap {self.cap} lies outside 1..{MAX_CAP}")

    @cached_property
    def head(self) -> int:
        return header_form(len(self.layout.names), self.statistics).slots

    @cached_property
    def chunks(self) -> int:
        """Chunks of an update, header included; the last is padded with zeros."""
        return 1 + -(-max(self.layout.size - self._first_values, 0) // self.packing.per_chunk)

    @cached_property
    def _first_values(self) -> int:
        return self.packing.count * (SLOTS - self.head)

    @cached_property
    def steps(self) -> tuple[float, ...]:
        return tuple(math.ldexp(1.0, exponent - self.packing.bits + 1) for exponent in self.exponents)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(np.array(self.layout.sizes, dtype=np.int64))

    @cached_property
    def digest(self) -> bytes:
        tensors = [[*pair] for pair in zip(self.layout.names, self.layout.shapes, strict=True)]
        lanes = [self.packing.bits, self.packing.count, self.packing.width]
        sums = [[each.key, each.size, each.whole] for each in self.statistics]
        value = {"tensors": tensors, "lanes": lanes, "exponents": self.exponents, "cap": self.cap, "sums": sums}
        return hashlib.sha256(b"fedsync grid 1\0" + json.dumps(value, sort_keys=True).encode()).digest()

    def encode(
        self, header: Slots, values: Vector, factor: float, rng: np.random.Generator
    ) -> Iterator[tuple[Slots, int]]:
        """Quantise and pack, a few chunks at a time.

        Rounding is stochastic, so the mean is right. A tensor whose values all lie below a sixteenth of its step is
        sent as zeros: steps that large would serve an attacker who wants a few values of a whole step each.

        Args:
            header: header of `fedsync.cipher.encoding.tally.build`, int64 [head].
            values: update, float32 [layout.size], all finite.
            factor: multiplier of the values: n_i / cap, divided by |a_i| for FedNova.

        Yields:
            Slots, int64 [at most 8, 4096], and the number of values that were clipped to their tensor's range.
        """
        self._check(values)
        if not math.isfinite(factor) or header.shape != (self.head,):
            raise ValueError(f"the factor is {factor}, the header has {header.shape} slots, not {self.head}")
        # Fixed point with all fractional bits that an int32 leaves: exact, and fast to round.
        fraction = fraction_bits(self.packing.bits)
        largest = _magnitudes(values, self.layout) * abs(factor)
        scales = [
            0.0 if most * _COARSE < step else factor / step * 2.0**fraction
            for most, step in zip(largest, self.steps, strict=True)
        ]
        for chunk, start, stop in self._groups():
            scaled = np.zeros(stop - start, dtype=np.float32)
            for low, high, tensor in self._tensors(start, stop):
                np.multiply(values[low:high], np.float32(scales[tensor]), out=scaled[low - start : high - start])
            integers, clipped = round_fixed(scaled, self.packing.bits, rng)
            yield self._packed(header, integers, chunk), clipped

    def pack(self, header: Slots, integers: Integers) -> Iterator[Slots]:
        """Pack quantised values, int32 [layout.size] or fewer, then zeros, a few chunks at a time, as `encode`."""
        for chunk, start, stop in self._groups():
            part = np.zeros(stop - start, dtype=np.int32)
            here = integers[start:stop]
            part[: here.size] = here
            yield self._packed(header, part, chunk)

    def _packed(self, header: Slots, integers: Integers, chunk: int) -> Slots:
        if chunk:
            return self.packing.pack(integers)
        whole = np.zeros((self.packing.count, SLOTS), dtype=np.int32)
        whole[:, self.head :] = integers.reshape(self.packing.count, -1)
        slots = self.packing.pack(whole)
        slots[0, : self.head] = header
        return slots

    def rounded(self, values: Vector, factor: float, rng: np.random.Generator) -> Vector:
        """Values after `encode` and `decode`, as receivers find them, float32 [layout.size]."""
        arrived, encoded = np.zeros_like(values), self.encode(np.zeros(self.head, np.int64), values, factor, rng)
        self.decode((slots for slots, _ in encoded), 1 / factor, arrived, updates=1)
        return arrived

    def decode(self, chunks: Iterable[Slots], factor: float, out: Vector, updates: int, sender: str = SERVER) -> None:
        """Unpack a sum of ``updates`` updates and add its numbers to ``out``, float32 [layout.size], in place.

        ``chunks`` are the slots of all chunks in order, in any portions; ``factor`` is `Tally.mean_factor`.
        `ProtocolError` if a value exceeds a sum of so many clipped updates, or lies behind the layout's last value.
        """
        self._check(out)
        units = [factor * step for step in self.steps]
        for integers, start in self._integers(chunks):
            bound = updates * self.packing.peak
            if integers.max(initial=0) > bound or integers.min(initial=0) < -bound:
                raise ProtocolError(sender, "clipping", f"a value is beyond what {updates} clipped updates add up to")
            if integers[max(self.layout.size - start, 0) :].any():
                raise ProtocolError(sender, "filling", "there are values after the model's last value")
            for low, high, tensor in self._tensors(start, start + integers.size):
                part = np.empty(high - low, dtype=np.float32)
                np.multiply(integers[low - start : high - start], units[tensor], out=part, casting="unsafe")
                out[low:high] += part

    def largest(self, chunks: Iterable[Slots]) -> tuple[int, bool]:
        """Largest absolute value in slots, and whether a value lies behind the layout's last value."""
        most, beyond = 0, False
        for integers, start in self._integers(chunks):
            most = max(most, int(integers.max(initial=0)), -int(integers.min(initial=0)))
            beyond |= bool(integers[max(self.layout.size - start, 0) :].any())
        return most, beyond

    def _integers(self, chunks: Iterable[Slots]) -> Iterator[tuple[Integers, int]]:
        """Yield the integers behind the header, and the index of each portion's first value; check the chunk count."""
        chunk = start = 0
        for slots in chunks:
            if chunk + len(slots) > self.chunks:
                raise ValueError(f"more than the {self.chunks} chunks that the layout takes")
            if chunk == 0 and len(slots):
                first = self.packing.unpack(slots[:1]).reshape(self.packing.count, SLOTS)[:, self.head :]
                yield first.reshape(-1), 0
                slots, chunk, start = slots[1:], 1, self._first_values
            integers = self.packing.unpack(slots)
            yield integers, start
            chunk, start = chunk + len(slots), start + integers.size
        if chunk != self.chunks:
            raise ValueError(f"{chunk} chunks, the layout takes {self.chunks}")

    def _check(self, vector: Vector) -> None:
        if vector.shape != (self.layout.size,) or vector.dtype != np.float32:
            raise ValueError(f"{vector.dtype} {vector.shape}, the layout is float32 ({self.layout.size},)")

    def _groups(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first chunk and the range of values of each group, padding included; chunk 0 is alone."""
        yield 0, 0, self._first_values
        per_chunk = self.packing.per_chunk
        for chunk in range(1, self.chunks, _GROUP):
            start = self._first_values + (chunk - 1) * per_chunk
            yield chunk, start, start + min(_GROUP, self.chunks - chunk) * per_chunk

    def _tensors(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        sizes = self.layout.sizes
        for index in range(int(np.searchsorted(self._ends, start, side="right")), len(sizes)):
            end = int(self._ends[index])
            low, high = max(start, end - sizes[index]), min(stop, end)
            if low >= stop:
                return
            if low < high:
                yield low, high, index


def needed_exponents(values: Vector, layout: Layout, factor: float, bits: int) -> tuple[int, ...]:
    """Smallest exponent of each tensor that clips nothing, within the allowed range; `ValueError` if not finite."""
    largest = _magnitudes(values, layout) * abs(factor)
    if not np.isfinite(largest).all():
        raise ValueError("the update has values that are not finite")
    # Exponent e covers a little less than 2^e: peak steps of 2^(e - bits + 1).
    margin = float(1 << (bits - 1)) / ((1 << (bits - 1)) - 1)
    mantissa, exponent = np.frexp(largest * margin)
    # m = f 2^k with 1/2 <= f < 1: 2^k covers it, and 2^(k - 1) does if f is exactly 1/2.
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    exponent = np.where(largest == 0, MIN_EXPONENT, exponent)
    return tuple(int(e) for e in np.clip(exponent, MIN_EXPONENT, MAX_EXPONENT))


def _magnitudes(values: Vector, layout: Layout) -> NDArray[np.float64]:
    """Largest absolute value of each tensor, float64 [tensors]; NaN if the tensor holds NaN; 0 if it is empty."""
    sizes = np.array(layout.sizes, dtype=np.int64)
    largest = np.zeros(len(sizes))
    filled = np.flatnonzero(sizes)
    if filled.size:
        starts = (np.cumsum(sizes) - sizes)[filled]
        high, low = np.maximum.reduceat(values, starts), np.minimum.reduceat(values, starts)
        largest[filled] = np.maximum(high, -low)
    return largest
