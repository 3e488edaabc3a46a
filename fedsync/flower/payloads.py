"""Models and updates as Flower carries them; what a peer sent is checked before anything is made of it.

Flower makes a message a tree of objects, and every object two requests. So a small model or update travels in the
record that the texts are in, and a large one as one flat array, whose bytes Flower sends once for all silos.
"""

from __future__ import annotations

import io
import math

import numpy as np
from flwr.app import Array, ArrayRecord

from fedsync.core.errors import ProtocolError
from fedsync.core.layout import Layout, Vector
from fedsync.core.transfer import Payload

SMALL_BYTES = 262_144
"""Payloads up to this size travel beside the texts: three objects fewer weigh more than their bytes once a silo."""

_FLAT, _RAW = "flat", "raw"
_NPY_HEADER = 10_000
_LONGEST_NAME, _MOST_AXES = 256, 32

Packed = ArrayRecord | bytes
"""A payload for the wire: an array, or if it is small its bytes."""


def pack(payload: Payload) -> Packed:
    """For the wire: sealed bytes, uint8, or a flat vector, float32."""
    if payload.nbytes <= SMALL_BYTES:
        return payload.tobytes()
    if payload.dtype == np.uint8:
        return ArrayRecord({_FLAT: Array("uint8", (len(payload),), _RAW, payload.tobytes())})
    return ArrayRecord({_FLAT: Array(payload)})


def unpack(packed: Packed, layout: Layout, sender: str) -> Vector:
    """A peer's flat vector, float32 [layout.size].

    Raises:
        ProtocolError: it is not the one array that it should be, or not of the model's size.
    """
    if isinstance(packed, bytes):
        if len(packed) != layout.nbytes:
            raise ProtocolError(sender, "length", f"it has {len(packed)} bytes, not {layout.nbytes}")
        return np.frombuffer(packed, dtype=np.float32)
    if set(packed) != {_FLAT}:
        raise ProtocolError(sender, "arrays", f"{sorted(packed)[:3]} instead of one array {_FLAT!r}")
    return _values(packed[_FLAT], (layout.size,), layout.size, "it", sender)


def unpack_sealed(packed: Packed, most: int, sender: str) -> Payload:
    """A peer's sealed bytes, uint8 [n <= most].

    Raises:
        ProtocolError: it is not the one array that it should be, or too large.
    """
    data = packed if isinstance(packed, bytes) else _sealed(packed, sender)
    if len(data) > most:
        raise ProtocolError(sender, "length", f"{len(data)} sealed bytes, at most {most}")
    return np.frombuffer(data, dtype=np.uint8)


def _sealed(record: ArrayRecord, sender: str) -> bytes:
    array = record.get(_FLAT)
    if array is None or len(record) != 1 or array.stype != _RAW:
        raise ProtocolError(sender, "arrays", f"{sorted(record)[:3]} instead of one sealed array {_FLAT!r}")
    return array.data


def to_arrays(vector: Vector, layout: Layout) -> ArrayRecord:
    """A flat vector as Flower's named arrays."""
    return ArrayRecord({name: Array(part) for name, part in layout.split(vector).items()})


def from_arrays(record: ArrayRecord, layout: Layout, sender: str) -> Vector:
    """Named arrays of a peer as a flat vector, float32 [layout.size].

    The bytes are not given to NumPy's loader, which would allocate what a header claims: the header
    has to say what the layout says, and the data to be exactly as long.

    Raises:
        ProtocolError: names, types, shapes or lengths are not those of the model.
    """
    if set(record) != set(layout.names):
        missing, extra = set(layout.names) - set(record), set(record) - set(layout.names)
        raise ProtocolError(sender, "arrays", f"missing {sorted(missing)[:3]}, unexpected {sorted(extra)[:3]}")
    flat = np.empty(layout.size, dtype=np.float32)
    start = 0
    for name, shape, size in zip(layout.names, layout.shapes, layout.sizes, strict=True):
        flat[start : start + size] = _values(record[name], shape, size, name, sender)
        start += size
    return flat


def layout_of(record: ArrayRecord) -> Layout:
    """Layout of arrays that this process made itself."""
    return Layout(tuple(record), tuple(tuple(array.shape) for array in record.values()))


def read_model(record: ArrayRecord, sender: str) -> tuple[Vector, Layout]:
    """A model, float32 [layout.size], whose layout is the peer's say.

    What a shape claims is not allocated before there are as many bytes.

    Raises:
        ProtocolError: a name or shape is none, the arrays are not what they claim, or a value is not finite.
    """
    for name, array in record.items():
        if not (1 <= len(name) <= _LONGEST_NAME and name.isprintable()):
            raise ProtocolError(sender, "arrays", f"one is called {name[:_LONGEST_NAME]!r}")
        shape = array.shape
        if not (len(shape) <= _MOST_AXES and all(type(axis) is int and 0 <= axis <= len(array.data) for axis in shape)):
            raise ProtocolError(sender, "shape", f"{name} has {len(array.data)} bytes and the shape {shape!r:.200}")
        # An axis of no length hides how long the others are, and NumPy would trip over them.
        if 4 * math.prod(max(axis, 1) for axis in shape) > len(array.data):
            raise ProtocolError(sender, "length", f"{name} has {len(array.data)} bytes and the shape {shape}")
    layout = layout_of(record)
    model = from_arrays(record, layout, sender)
    if not (model.size and np.isfinite(model).all()):
        raise ProtocolError(sender, "finite", f"not all of the {model.size} values of the model are finite")
    return model, layout


def _values(array: Array, shape: tuple[int, ...], size: int, name: str, sender: str) -> Vector:
    stream = io.BytesIO(array.data)
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"npy version {version}")
        found_shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream, max_header_size=_NPY_HEADER)
    except Exception as error:  # it goes through Python's own parser and tokenizer, which raise what they like
        raise ProtocolError(sender, "array header", f"{name}: {type(error).__name__}: {str(error)[:200]}") from error
    if dtype != np.float32 or found_shape != shape or (fortran and len(shape) > 1):
        raise ProtocolError(sender, "shape", f"{name} is {dtype} {found_shape}, not float32 {shape}")
    if len(array.data) - stream.tell() != 4 * size:
        raise ProtocolError(sender, "length", f"{name} has {len(array.data) - stream.tell()} bytes, not {4 * size}")
    return np.frombuffer(array.data, dtype=np.float32, count=size, offset=stream.tell())
