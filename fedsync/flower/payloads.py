"""Models and updates as Flower carries them; what a peer sent is checked before anything is made of it.

Flower makes a message a tree of objects, and every object two requests. So a small model or update travels in the
record that the texts are in, and a large one as one flat array, whose bytes Flower sends once for all silos.
"""

from __future__ import annotations

import math

import numpy as np
from flwr.app import Array, ArrayRecord

from fedsync.core.errors import ProtocolError
from fedsync.core.layout import Layout, Vector, as_vector
from fedsync.core.transfer import Payload

SMALL_BYTES = 262_144
"""Payloads up to this size travel beside the texts: three objects fewer weigh more than their bytes once a silo."""

_FLAT, _RAW = "flat", "raw"
_LONGEST_NAME, _MOST_AXES = 256, 32

Packed = ArrayRecord | bytes
"""A payload for the wire: an array, or if it is small its bytes."""


def pack(payload: Payload) -> Packed:
    """For the wire: the bytes of a flat array, sealed (uint8) or in the clear (float32)."""
    if payload.nbytes <= SMALL_BYTES:
        return payload.tobytes()
    return ArrayRecord({_FLAT: Array("uint8", (payload.nbytes,), _RAW, payload.tobytes())})


def unpack(packed: Packed, most: int, sender: str) -> Payload:
    """A peer's bytes, uint8 [n <= most]; what an array says of its type and shape is not looked at.

    Raises:
        ProtocolError: it is not the one array that it should be, or too large.
    """
    data = packed if isinstance(packed, bytes) else _flat(packed, sender)
    if len(data) > most:
        raise ProtocolError(sender, "length", f"{len(data)} bytes, at most {most}")
    return np.frombuffer(data, dtype=np.uint8)


def _flat(record: ArrayRecord, sender: str) -> bytes:
    array = record.get(_FLAT)
    if array is None or len(record) != 1 or array.stype != _RAW:
        raise ProtocolError(sender, "arrays", f"{sorted(record)[:3]} instead of one array {_FLAT!r}")
    return array.data


def to_arrays(vector: Vector, layout: Layout) -> ArrayRecord:
    """A flat vector as Flower's named arrays."""
    return ArrayRecord({name: Array(part) for name, part in layout.split(vector).items()})


def from_arrays(record: ArrayRecord) -> tuple[Vector, Layout]:
    """Named arrays that this process made itself, as a flat vector, float32 [layout.size], and their layout."""
    arrays = {name: array.numpy() for name, array in record.items()}
    layout = Layout.of(arrays)
    return layout.join(arrays), layout


def read_model(layout: Layout, payload: Payload | None, sender: str) -> tuple[Vector, Layout]:
    """A model, float32 [layout.size], whose layout is the peer's say.

    What a shape claims is not allocated before there are as many bytes.

    Raises:
        ProtocolError: a name or shape is none, the bytes are not what they claim, or a value is not finite.
    """
    if payload is None:
        raise ProtocolError(sender, "message", "it brings no model")
    names, shapes = layout.names, layout.shapes
    if not (len(names) == len(shapes) == len(set(names)) and all(1 <= len(name) <= _LONGEST_NAME for name in names)):
        raise ProtocolError(sender, "names", f"{len(names)} names, some twice or too long, of {len(shapes)} arrays")
    left = payload.nbytes
    for name, shape in zip(names, shapes, strict=True):
        if not (len(shape) <= _MOST_AXES and all(0 <= axis <= payload.nbytes for axis in shape)):
            raise ProtocolError(sender, "shape", f"{name} has the shape {shape!r:.200}")
        # An axis of no length hides how long the others are, and NumPy would trip over them.
        left -= 4 * math.prod(max(axis, 1) for axis in shape)
        if left < 0:
            raise ProtocolError(sender, "length", f"there are {payload.nbytes} bytes, too few for {name} {shape}")
    model = as_vector(payload, layout, sender)
    if not (model.size and np.isfinite(model).all()):
        raise ProtocolError(sender, "finite", f"not all of the {model.size} values of the model are finite")
    return model, layout
