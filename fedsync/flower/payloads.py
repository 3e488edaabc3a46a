"""Models and updates as Flower payloads; data of a peer is checked before it is parsed.

Flower turns a message into a tree of objects, and every object into two requests. So a small payload is in the record
with the message's texts. A large payload is one flat array, whose bytes Flower sends once for all silos.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from types import MappingProxyType

import numpy as np
from flwr.app import Array, ArrayRecord

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.model.layout import REAL_KINDS, Layout, Vector, as_type, as_vector
from fedsync.model.transfer import Payload

SMALL_BYTES = 262_144
"""Maximum size of payloads in the record of the texts: saving three objects outweighs sending the bytes per silo."""

_FLAT, _RAW = "flat", "raw"
_LONGEST_NAME, _MOST_AXES = 256, 32
_NAMED = 4


def pack(payload: Payload) -> ArrayRecord | bytes:
    """Convert to the wire format: the bytes of a flat array, encrypted (uint8) or in the clear (float32)."""
    if payload.nbytes <= SMALL_BYTES:
        return payload.tobytes()
    return ArrayRecord({_FLAT: Array("uint8", (payload.nbytes,), _RAW, payload.tobytes())})


def unpack(packed: ArrayRecord | bytes, most: int, sender: str) -> Payload:
    """Return a peer's bytes, uint8 [n <= most], whatever type and shape it claims; `ProtocolError` if invalid."""
    data = packed if isinstance(packed, bytes) else _flat(packed, sender)
    if len(data) > most:
        raise ProtocolError(sender, "length", f"{len(data)} bytes, at most {most}")
    return np.frombuffer(data, dtype=np.uint8)


def _flat(record: ArrayRecord, sender: str) -> bytes:
    array = record.get(_FLAT)
    if array is None or len(record) != 1 or array.stype != _RAW:
        raise ProtocolError(sender, "arrays", f"{sorted(record)[:3]} instead of one array {_FLAT!r}")
    return array.data


def to_arrays(
    vector: Vector,
    layout: Layout,
    like: ArrayRecord | None = None,
    kept: Collection[str] = (),
    ties: Mapping[str, str] = MappingProxyType({}),
) -> ArrayRecord:
    """Convert a flat vector to Flower's named arrays: float32, or with the names, order and types of ``like``. Arrays
    named in ``kept`` do not travel, and are copied from ``like``. ``ties`` has further names of arrays in ``layout``.
    """
    parts = layout.split(vector)
    if like is None:
        return ArrayRecord({name: Array(part) for name, part in parts.items()})
    arrays = {name: array.numpy() for name, array in like.items()}
    found = {name: arrays[name] for name in kept if name in arrays}
    for name in arrays.keys() - found.keys():
        owner = ties.get(name, name)
        if owner in parts:
            found[name] = as_type(parts[owner], arrays[name].dtype)
    return ArrayRecord({name: Array(found[name]) for name in arrays if name in found})


def from_arrays(
    record: ArrayRecord,
    layout: Layout | None = None,
    kept: Collection[str] = (),
    ties: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Vector, Layout]:
    """Convert named arrays made by this process to a flat vector, float32 [layout.size].

    Arrays are matched by name, whatever their order and types. Tied weights have several names, as in ``ties``, and
    equal values, and travel under the name in ``layout``. Arrays in ``kept`` do not travel, and are left out: silos
    have their own. Raises `ConfigError` with the name of an array that is missing or
    unknown, has another shape, or has values that are not finite numbers.
    """
    arrays = {name: array.numpy() for name, array in record.items()}
    layout = layout or Layout.of(arrays)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in arrays:
            raise _misfit(f"they have no {name!r}, which the model at the silos has", arrays)
        if arrays[name].shape != shape:
            raise _misfit(f"{name!r} has the shape {arrays[name].shape}, and {shape} at the silos")
        if arrays[name].dtype.kind not in REAL_KINDS:
            raise _misfit(f"{name!r} is of type {arrays[name].dtype}, and what travels is float32")
    for name in arrays.keys() - {*layout.names, *kept}:
        if not np.array_equal(arrays[name], arrays.get(ties.get(name, ""), ())):
            raise _misfit(f"they have {name!r}, which the model at the silos has not", layout.names)
    with np.errstate(over="ignore"):  # overflow to infinity is reported below
        vector = layout.join(arrays)
    if not np.isfinite(vector).all():
        bad = next(name for name, part in layout.split(vector).items() if not np.isfinite(part).all())
        raise _misfit(f"{bad!r} has values that are not finite as float32")
    return vector, layout


def _misfit(problem: str, known: Iterable[str] = ()) -> ConfigError:
    names = [*islice(known, _NAMED + 1)]
    there = f": there is {', '.join(names[:_NAMED])}{', ...' if len(names) > _NAMED else ''}" if names else ""
    return ConfigError("initial_arrays", problem, f"Give the state dict of the silos' own model{there}")


def read_model(layout: Layout, payload: Payload | None, sender: str) -> tuple[Vector, Layout]:
    """Read a model, float32 [layout.size], whose layout comes from the peer.

    Memory is allocated only for bytes that have arrived, whatever size a shape claims. Raises `ProtocolError` if a name
    or shape is invalid, the shapes do not fit the bytes, or a value is not finite.
    """
    if payload is None:
        raise ProtocolError(sender, "message", "it brings no model")
    check_names(layout, sender)
    left = payload.nbytes
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if not (len(shape) <= _MOST_AXES and all(0 <= axis <= payload.nbytes for axis in shape)):
            raise ProtocolError(sender, "shape", f"{name} has the shape {shape!r:.200}")
        # A zero axis hides the length of the other axes, which NumPy could not handle, so it counts as 1.
        left -= 4 * math.prod(max(axis, 1) for axis in shape)
        if left < 0:
            raise ProtocolError(sender, "length", f"there are {payload.nbytes} bytes, too few for {name} {shape}")
    model = as_vector(payload, layout, sender)
    if not (model.size and np.isfinite(model).all()):
        raise ProtocolError(sender, "finite", f"not all of the {model.size} values of the model are finite")
    return model, layout


def check_names(layout: Layout, sender: str) -> None:
    """Raise `ProtocolError` unless a peer's layout has one unique name of allowed length for each shape."""
    names, shapes = layout.names, layout.shapes
    if not (len(names) == len(shapes) == len(set(names)) and all(1 <= len(name) <= _LONGEST_NAME for name in names)):
        raise ProtocolError(sender, "names", f"{len(names)} names, some twice or too long, of {len(shapes)} arrays")
