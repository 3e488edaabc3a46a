"""Length-prefixed byte strings: the format of all messages about masks between silos.

    frames    each: length [4], little-endian | bytes
    by name   name, value, name, value, ...; names in ascending order, each once

Each value has exactly one encoding, so a digest of the encoding is a digest of the value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from fedsync.common.errors import ProtocolError

MAX_BYTES = 2**24
_LENGTH = 4


def pack(frames: Iterable[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(_LENGTH, "little") + frame for frame in frames)


def unpack(data: bytes, sender: str, count: int | None = None) -> list[bytes]:
    """Decode frames, or raise `ProtocolError`; ``count`` is the required number, None allows any."""
    if len(data) > MAX_BYTES:
        raise ProtocolError(sender, "masks", f"{len(data)} bytes, at most {MAX_BYTES}")
    frames: list[bytes] = []
    at = 0
    while at < len(data):
        start = at + _LENGTH
        at = start + int.from_bytes(data[at:start], "little")
        if start > len(data) or at > len(data):
            raise ProtocolError(sender, "masks", "bytes that end within a frame")
        frames.append(data[start:at])
    if count is not None and len(frames) != count:
        raise ProtocolError(sender, "masks", f"{len(frames)} frames, not {count}")
    return frames


def pack_named(values: Mapping[str, bytes]) -> bytes:
    return pack(part for name in sorted(values) for part in (name.encode(), values[name]))


def unpack_named(data: bytes, sender: str, size: int | None = None) -> dict[str, bytes]:
    """Decode named values, or raise `ProtocolError`; ``size`` is the size of each value [bytes], None allows any."""
    frames = unpack(data, sender)
    try:
        names = [frame.decode() for frame in frames[::2]]
    except UnicodeDecodeError:
        raise ProtocolError(sender, "masks", "a name that is no text") from None
    values = frames[1::2]
    if len(values) != len(names) or any(one >= other for one, other in pairwise(names)):
        raise ProtocolError(sender, "masks", "names that are not in order, or without values")
    if size is not None and any(len(value) != size for value in values):
        raise ProtocolError(sender, "masks", f"a value has not {size} bytes")
    return dict(zip(names, values, strict=True))
