"""How models and updates travel in the clear: float32 vectors to payloads, and back in spans.

A format that loses something says whether that has to be made up for: see `WireFormat.feedback`, and
`fedsync.model.plain_replica` for how.
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
"""Largest value accepted in an update: sums of any number of silos stay finite in float32."""


class Spanned(Protocol):
    """A vector that is read in spans: an array, or what works them out; the same ones each time."""

    @property
    def size(self) -> int: ...

    def __getitem__(self, span: slice, /) -> Vector: ...


class WireFormat(Protocol):
    """One way to write a vector. A payload is what `encode` made, or its bytes (uint8) as a peer sent them."""

    @property
    def feedback(self) -> bool:
        """Whether what an update loses has to be added to the next one, for else training loses it for good."""

    def payload_bytes(self, values: int) -> int:
        """Bytes that a vector of so many values takes."""

    def encode(
        self, vector: Spanned, rng: np.random.Generator | None = None, keeper: ArrayKeeper | None = None
    ) -> Payload:
        """A vector, float32 [values], for the wire; may be the vector itself.

        Args:
            vector: what is to travel; read in spans, more than once, but by `TopK`, which needs all of it.
            rng: what a format draws from that rounds stochastically; None has it round to the nearest.
            keeper: where the payload comes to lie; by default in memory.

        Raises:
            ValueError: a value is not finite, in a format that has to look at them.
            ConfigError: ``keeper`` cannot have it.
        """

    def check(self, payload: Payload, values: int, sender: str) -> None:
        """Check that a peer's payload is a vector of so many values, before anything is made of it.

        After that `decode` raises nothing and allocates what it returns; whether values are finite is to be seen there.

        Raises:
            ProtocolError: it is something else.
        """

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        """The values ``start`` to ``stop`` of a payload that was checked, float32 [stop - start].

        Not to be written to: may be a view of the payload.
        """


class Fp32:
    """Values as they are: 4 bytes each."""

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
    """How a run's updates go up and its models go down."""

    up: WireFormat = FP32
    down: WireFormat = FP32


def check_length(payload: Payload, nbytes: int, sender: str) -> None:
    """Check that a payload is so many bytes.

    Raises:
        ProtocolError: it is something else.
    """
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise ProtocolError(sender, "shape", f"{payload.dtype} {payload.shape} instead of bytes")
    if payload.nbytes != nbytes:
        raise ProtocolError(sender, "length", f"it has {payload.nbytes} bytes, not {nbytes}")
