"""Wire formats without encryption: float32 vectors to payloads, and back in spans.

For the compensation of losses see `WireFormat.feedback` and `fedsync.model.plain_replica`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from fedsync.common.errors import ProtocolError
from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload

MAX_MAGNITUDE = 1e30
"""Largest accepted value of an update: sums over any number of silos stay finite in float32."""


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

    def encode(
        self, vector: Spanned, rng: np.random.Generator | None = None, keeper: ArrayKeeper | None = None
    ) -> Payload:
        """Encode a vector, float32 [values]; the result may be the vector itself.

        Args:
            vector: read in spans, more than once, except by `TopK`, which needs the whole vector.
            rng: source of stochastic rounding, for formats with it; None rounds to the nearest.
            keeper: storage of the payload; in memory by default.

        Raises:
            ValueError: a value is not finite, for formats that must inspect the values.
            ConfigError: ``keeper`` cannot store the payload.
        """

    def check(self, payload: Payload, values: int, sender: str) -> None:
        """Check that a peer's payload encodes a vector of ``values`` values; raises `ProtocolError` if not.

        Afterwards `decode` raises nothing and allocates only its result. Values may still be infinite or NaN.
        """

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        """Decode values ``start`` to ``stop`` of a checked payload, float32 [stop - start]; read-only."""


class Fp32:
    """Uncompressed float32: 4 bytes a value."""

    feedback: ClassVar[bool] = False

    def payload_bytes(self, values: int) -> int:
        return 4 * values

    def encode(
        self, vector: Spanned, rng: np.random.Generator | None = None, keeper: ArrayKeeper | None = None
    ) -> Payload:
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


def check_length(payload: Payload, nbytes: int, sender: str) -> None:
    """Check that a payload is a flat array of ``nbytes`` bytes; raises `ProtocolError` if not."""
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise ProtocolError(sender, "shape", f"{payload.dtype} {payload.shape} instead of bytes")
    if payload.nbytes != nbytes:
        raise ProtocolError(sender, "length", f"it has {payload.nbytes} bytes, not {nbytes}")
