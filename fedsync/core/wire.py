"""How models and updates travel in the clear: float32 vectors to payloads, and back in spans."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from fedsync.core.errors import ProtocolError
from fedsync.core.layout import Vector
from fedsync.core.transfer import Payload

SPAN_VALUES = 2**18
"""Values that are decoded at once where the whole vector need not be in memory: 1 MiB as float32."""


class WireFormat(Protocol):
    """One way to write a vector. A payload is what `encode` made, or its bytes (uint8) as a peer sent them."""

    def payload_bytes(self, values: int) -> int:
        """Bytes that a vector of so many values takes."""

    def encode(self, vector: Vector) -> Payload:
        """A vector, float32 [values], for the wire; may be the vector itself."""

    def check(self, payload: Payload, values: int, sender: str) -> None:
        """Check that a peer's payload is a vector of so many values, before anything is made of it.

        What values it has, `decode` says.

        Raises:
            ProtocolError: it is something else.
        """

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        """The values ``start`` to ``stop`` of a payload that was checked, float32 [stop - start].

        Not to be written to: may be a view of the payload.
        """


class Fp32:
    """Values as they are."""

    def payload_bytes(self, values: int) -> int:
        return 4 * values

    def encode(self, vector: Vector) -> Payload:
        return vector

    def check(self, payload: Payload, values: int, sender: str) -> None:
        if payload.dtype == np.uint8 and payload.ndim == 1:
            if payload.nbytes != self.payload_bytes(values):
                raise ProtocolError(
                    sender, "length", f"it has {payload.nbytes} bytes, not {self.payload_bytes(values)}"
                )
        elif payload.dtype != np.float32 or payload.shape != (values,):
            raise ProtocolError(sender, "shape", f"{payload.dtype} {payload.shape}, the model is float32 {(values,)}")

    def decode(self, payload: Payload, start: int, stop: int) -> Vector:
        return payload[4 * start : 4 * stop].view(np.float32) if payload.dtype == np.uint8 else payload[start:stop]


FP32 = Fp32()
