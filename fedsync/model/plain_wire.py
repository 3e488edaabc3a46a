"""Wire formats of unencrypted updates: float32 vectors to bytes, and back, span by span.

| format | bytes a value | loss of an update, about |
|---|---|---|
| `Fp32` | 4 | none |
| `Bf16` | 2 | 0.2 % of each value |
| `Fp16` | 2.01 | 0.02 % of each value; more for a value far smaller than its neighbours |
| `Int8` | 1.01 | half a step, for each value: a step is 1/127 of the largest of the 512 values in its block |
| `TopK` | (4 + bytes of the inner format) times the share | all other values |

If the loss is a share of each value, no value is lost for good. So `Bf16` and `Fp16` need no error feedback. They round
to nearest, because the error of stochastic rounding is larger by the square root of two. `Int8` would lose values below
a step in every update. So it rounds stochastically, and its loss is added to the next update
(`fedsync.model.plain_replica`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ProtocolError
from fedsync.model.chunked_arrays import ArrayKeeper, give_back, spans
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload

MAX_MAGNITUDE = 1e30
"""Largest accepted value of an update: sums over any number of silos stay finite in float32."""

Draws = np.random.Generator | None
"""Source of stochastic rounding; None rounds to the nearest."""


class Spanned(Protocol):
    """Vector that is read in spans: an array, or a repeatable computation of its spans."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Vector: ...


class WireFormat(Protocol):
    """Encoding of a vector. A payload is a result of `encode`, or its bytes (uint8) as received from a peer."""

    @property
    def feedback(self) -> bool:
        """Whether the loss of an update must be added to the next update, because training would lose it for good."""

    def payload_bytes(self, values: int) -> int:
        """Return the encoded size of a vector of ``values`` values."""

    def encode(self, vector: Spanned, rng: Draws = None, keeper: ArrayKeeper | None = None) -> Payload:
        """Encode a vector, float32 [values]; the result may be the vector itself.

        ``vector`` is read in spans, more than once, except by `TopK`, which needs the whole vector. ``keeper`` stores
        the payload, in memory by default; `ConfigError` if it cannot. Formats that inspect values raise `ValueError`
        for a value that is not finite.
        """

    def check(self, payload: Payload, values: int, sender: str) -> None:
        """Check that a peer's payload encodes a vector of ``values`` values; `ProtocolError` if not. Afterwards
        `decode` raises nothing and allocates only its result. Values may still be infinite or NaN.
        """

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        """Decode values ``start`` to ``stop`` of a checked payload, float32 [stop - start]; read-only."""


class Fp32:
    """Uncompressed float32: 4 bytes a value."""

    feedback: ClassVar[bool] = False

    def payload_bytes(self, values: int) -> int:
        return 4 * values

    def encode(self, vector: Spanned, rng: Draws = None, keeper: ArrayKeeper | None = None) -> Payload:
        return vector[: vector.size]

    def check(self, payload: Payload, values: int, sender: str) -> None:
        if payload.dtype == np.uint8 and payload.ndim == 1:
            check_length(payload, self.payload_bytes(values), sender)
        elif payload.dtype != np.float32 or payload.shape != (values,):
            raise ProtocolError(sender, "shape", f"{payload.dtype} {payload.shape}, the model is float32 {(values,)}")

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        return payload[4 * start : 4 * stop].view(np.float32) if payload.dtype == np.uint8 else payload[start:stop]


FP32 = Fp32()


@dataclass(frozen=True, slots=True)
class Wire:
    """Wire formats of a run: ``up`` for updates, ``down`` for models."""

    up: WireFormat = FP32
    down: WireFormat = FP32


def check_values(wire: WireFormat, size: int, sender: str, payload: Payload) -> None:
    """Raise `ProtocolError` for a wrong type, shape or length, or a value not finite or beyond `MAX_MAGNITUDE`."""
    wire.check(payload, size, sender)
    for start, stop in spans(size, 4):
        span = wire.decode(payload, start, stop)
        low, high = np.min(span), np.max(span)  # NaN and infinity show without a temporary array
        give_back(payload)
        if not (low >= -MAX_MAGNITUDE and high <= MAX_MAGNITUDE):  # NaN fails every comparison
            told = f"values from {low} to {high}; finite ones of at most {MAX_MAGNITUDE:g} are accepted"
            raise ProtocolError(sender, "finite", told)


def check_length(payload: Payload, nbytes: int, sender: str) -> None:
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise ProtocolError(sender, "shape", f"{payload.dtype} {payload.shape} instead of bytes")
    if payload.nbytes != nbytes:
        raise ProtocolError(sender, "length", f"it has {payload.nbytes} bytes, not {nbytes}")


BLOCK = 512
"""Number of values that share a scale. Spans of `fedsync.model.chunked_arrays` are whole blocks."""

_EXPONENT, _LARGEST_BF16 = 0x7F80, 0x7F7F


class Bf16:
    """Upper half of each float32, rounded to the nearest, ties to even, on integer words: NumPy has no bfloat16."""

    feedback: ClassVar[bool] = False

    def payload_bytes(self, values: int) -> int:
        return 2 * values

    def encode(self, vector: Spanned, rng: Draws = None, keeper: ArrayKeeper | None = None) -> Payload:
        keeper, nbytes = keeper or ArrayKeeper(), self.payload_bytes(vector.size)
        return keeper.write_again(nbytes, lambda: self._halves(vector))

    @staticmethod
    def _halves(vector: Spanned) -> Iterator[memoryview]:
        for start, stop in spans(vector.size, 4):
            values = vector[start:stop]
            words = values.view(np.uint32)
            rounded = words >> 16
            rounded &= 1
            rounded += 0x7FFF
            rounded += words  # no overflow for finite numbers
            rounded >>= 16
            if np.any((rounded & _EXPONENT) == _EXPONENT):
                _check_finite(values)
                over = (rounded & _EXPONENT) == _EXPONENT  # rounded up beyond the largest bfloat16: use the largest
                rounded[over] = (rounded[over] & 0x8000) | _LARGEST_BF16
            yield rounded.astype(np.uint16).view(np.uint8).data

    def check(self, payload: Payload, values: int, sender: str) -> None:
        check_length(payload, self.payload_bytes(values), sender)

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        words = payload[2 * start : 2 * stop].view(np.uint16).astype(np.uint32)
        words <<= 16
        return words.view(np.float32)


class _Blocks(ABC):
    """Base of block formats: float32 scales of all blocks, then each value over its block's scale."""

    code: ClassVar[type[np.float16 | np.int8]]
    largest: ClassVar[float]
    """Largest value of a code in any payload, including a malicious peer's."""

    def payload_bytes(self, values: int) -> int:
        return 4 * -(-values // BLOCK) + np.dtype(self.code).itemsize * values

    def encode(self, vector: Spanned, rng: Draws = None, keeper: ArrayKeeper | None = None) -> Payload:
        scales, factors = self._scale(_largest(vector))
        keeper, nbytes = keeper or ArrayKeeper(), self.payload_bytes(vector.size)
        return keeper.write_again(nbytes, lambda: self._codes(vector, scales, factors, deepcopy(rng)))

    def _codes(self, vector: Spanned, scales: Vector, factors: Vector, rng: Draws) -> Iterator[memoryview]:
        yield scales.view(np.uint8).data
        for start, stop in spans(vector.size, 4):
            spread = _spread(factors[start // BLOCK : -(-stop // BLOCK)], 0, stop - start)
            yield self._round(vector[start:stop] * spread, rng).astype(self.code).view(np.uint8).data

    def check(self, payload: Payload, values: int, sender: str) -> None:
        check_length(payload, self.payload_bytes(values), sender)
        scales = self._parts(payload, values)[0]
        most = MAX_MAGNITUDE / self.largest
        low, high = scales.min(initial=0), scales.max(initial=0)
        if not (low >= 0 and high <= most):  # NaN fails every comparison
            raise ProtocolError(sender, "finite", f"scales from {low} to {high}; 0 to {most:g} are accepted")

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        scales, codes = self._parts(payload, self._values(payload.nbytes))
        values = codes[start:stop].astype(np.float32)
        values *= _spread(scales[start // BLOCK : -(-stop // BLOCK)], start % BLOCK, stop - start)
        return values

    def _parts(self, payload: Payload, values: int) -> tuple[Vector, NDArray[np.float16 | np.int8]]:
        head = 4 * -(-values // BLOCK)
        return payload[:head].view(np.float32), payload[head:].view(self.code)

    def _values(self, nbytes: int) -> int:
        """Return the inverse of `payload_bytes`."""
        item = np.dtype(self.code).itemsize
        blocks = -(-nbytes // (4 + item * BLOCK))
        return (nbytes - 4 * blocks) // item

    @abstractmethod
    def _scale(self, most: Vector) -> tuple[Vector, Vector]:
        """Return the blocks' scales from their largest magnitudes, and the factors of the values for `_round`."""

    @abstractmethod
    def _round(self, scaled: Vector, rng: Draws) -> NDArray[np.generic]:
        """Return the codes of scaled values."""


class Fp16(_Blocks):
    """Half precision over a power-of-two scale for each block, to the nearest: never overflows, rarely underflows."""

    feedback: ClassVar[bool] = False
    code = np.float16
    largest: ClassVar[float] = 65504.0

    def _scale(self, most: Vector) -> tuple[Vector, Vector]:
        # The largest value lands in [2^14, 2^15); below 2^-110 its place does not matter.
        exponents = np.maximum(np.frexp(most)[1], -110) - 15
        one = np.float32(1)
        return np.ldexp(one, exponents), np.ldexp(one, -exponents)

    def _round(self, scaled: Vector, rng: Draws) -> NDArray[np.generic]:
        return scaled.astype(np.float16)


class Int8(_Blocks):
    """Integers within +-127 over a scale for each block."""

    feedback: ClassVar[bool] = True
    code = np.int8
    largest: ClassVar[float] = 128.0

    _PEAK: ClassVar[int] = 127
    _TINY: ClassVar[float] = 1e-28
    """Blocks below this are sent as zeros: their factor would overflow float32."""

    def _scale(self, most: Vector) -> tuple[Vector, Vector]:
        sent = most >= self._TINY
        scales = np.where(sent, most / np.float32(self._PEAK), np.float32(0))
        whole = np.float32(self._PEAK << fraction_bits(8))
        return scales, np.divide(whole, most, out=np.zeros_like(most), where=sent)

    def _round(self, scaled: Vector, rng: Draws) -> NDArray[np.generic]:
        return round_fixed(scaled, 8, rng)[0]


@dataclass(frozen=True, slots=True)
class TopK:
    """Values of largest magnitude: their number and ascending indices, all uint32, then the values. ``share`` of the
    values, 0..1 and rounded up, are sent, in the format ``inner``.
    """

    share: float
    inner: WireFormat = FP32

    feedback: ClassVar[bool] = True

    def count(self, values: int) -> int:
        # 0.07 x 100 is 7.000000000000001: rounding up must not make it 8.
        return min(math.ceil(self.share * values - 1e-9), values)

    def payload_bytes(self, values: int) -> int:
        count = self.count(values)
        return 4 + 4 * count + self.inner.payload_bytes(count)

    def encode(self, vector: Spanned, rng: Draws = None, keeper: ArrayKeeper | None = None) -> Payload:
        whole = vector[: vector.size]
        _check_finite(whole)
        indices = self._largest(whole)
        head = np.concatenate([[indices.size], indices]).astype(np.uint32)
        return (keeper or ArrayKeeper()).join([head, self.inner.encode(whole[indices], rng)])

    def _largest(self, vector: Vector) -> NDArray[np.int64]:
        """Return the indices of the sent values, ascending; of equal values, the first."""
        count = self.count(vector.size)
        if not count:
            return np.empty(0, np.int64)
        sizes = np.abs(vector)
        sizes.partition(vector.size - count)
        least = sizes[vector.size - count]
        del sizes  # it is as large as the model
        above, equal = (
            np.concatenate([start + np.flatnonzero(test(np.abs(vector[start:stop]), least)) for start, stop in parts])
            for test, parts in ((np.greater, spans(vector.size, 4)), (np.equal, spans(vector.size, 4)))
        )
        return np.sort(np.concatenate([above, equal[: count - above.size]]))

    def check(self, payload: Payload, values: int, sender: str) -> None:
        check_length(payload, self.payload_bytes(values), sender)
        count = self.count(values)
        told = int(payload[:4].view(np.uint32)[0])
        if told != count:
            raise ProtocolError(sender, "indices", f"it says that there are {told}, not {count}")
        indices, sent = self._parts(payload)
        if count and not (indices[-1] < values and bool(np.all(indices[1:] > indices[:-1]))):
            raise ProtocolError(sender, "indices", f"they do not ascend, or not all are below {values}")
        self.inner.check(sent, count, sender)

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        indices, sent = self._parts(payload)
        low, high = np.searchsorted(indices, [start, stop])
        values = np.zeros(stop - start, np.float32)
        values[indices[low:high] - np.uint32(start)] = self.inner.decode(sent, int(low), int(high))
        return values

    @staticmethod
    def _parts(payload: Payload) -> tuple[NDArray[np.uint32], Payload]:
        end = 4 + 4 * int(payload[:4].view(np.uint32)[0])
        return payload[4:end].view(np.uint32), payload[end:]


def _largest(vector: Spanned) -> Vector:
    """Return the largest magnitude of each block."""
    most = np.empty(-(-vector.size // BLOCK), np.float32)
    for start, stop in spans(vector.size, 4):
        values, firsts = vector[start:stop], np.arange(0, stop - start, BLOCK)
        blocks = slice(start // BLOCK, -(-stop // BLOCK))
        most[blocks] = np.maximum(np.maximum.reduceat(values, firsts), -np.minimum.reduceat(values, firsts))
    _check_finite(most)
    return most


def _spread(scales: Vector, first: int, count: int) -> Vector:
    """Return the scale of each of ``count`` values; the first value is number ``first`` of its block."""
    return np.repeat(scales, BLOCK)[first : first + count]


def _check_finite(vector: Vector) -> None:
    if not np.isfinite(vector).all():
        raise ValueError("the vector has values that are not finite")


def fraction_bits(bits: int) -> int:
    """Number of fractional bits in an int32 next to an integer of ``bits`` bits, sign included."""
    return 32 - bits


def round_fixed(
    scaled: NDArray[np.float32], bits: int, rng: np.random.Generator | None
) -> tuple[NDArray[np.int32], int]:
    """Round fixed-point numbers to integers within +-(2^(bits - 1) - 1); ValueError for infinity or NaN.

    Args:
        scaled: numbers times 2^`fraction_bits`, float32 [n]; overwritten.
        bits: width of an integer, 8 to 16.
        rng: source of unbiased stochastic rounding; None rounds to the nearest.

    Returns integers, int32 [n], and the number of clipped values.
    """
    fraction = fraction_bits(bits)
    limit = np.float32(((1 << (bits - 1)) - 1) << fraction)
    # The array may be empty: the header of a sealed model with very many tensors can fill its whole chunk.
    low, high = scaled.min(initial=0), scaled.max(initial=0)
    clipped = 0
    # NaN fails every comparison, so this test finds NaN too.
    if not (low >= -limit and high <= limit):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("the update has values that are not finite, or far beyond any range")
        clipped = int(np.count_nonzero(np.abs(scaled) > limit))
        np.clip(scaled, -limit, limit, out=scaled)
    np.rint(scaled, out=scaled)
    integers = scaled.astype(np.int32)
    # At the limit the largest draw still fits: peak * 2^fraction + 2^fraction - 1 = 2^31 - 1.
    if rng is None:
        np.add(integers, 1 << (fraction - 1), out=integers)
    else:
        np.add(integers, _draws(integers.size, fraction, rng), out=integers, casting="unsafe")
    np.right_shift(integers, fraction, out=integers)
    return integers, clipped


def _draws(count: int, fraction: int, rng: np.random.Generator) -> NDArray[np.generic]:
    kind = np.uint16 if fraction == 16 else np.uint32
    words = rng.integers(0, 2**64 - 1, -(-count * kind().itemsize // 8), dtype=np.uint64, endpoint=True)
    draws = words.view(kind)[:count]
    if kind is np.uint32:
        np.right_shift(draws, 32 - fraction, out=draws)
    return draws
