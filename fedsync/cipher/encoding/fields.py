"""Variable-length fields of the cipher's messages: *members*, the updates in a sum, and frames for messages on masks.

name: length [1], UTF-8
member: update id as a name, round [8], nonce [16], chain: digest of the history behind the update [32]
digests of a member: SHA-256 of its ciphertext words [32], digest of its `annex` [32]; zeros if it has no annex
frames: each length [4], little-endian | bytes
frames by name: name, value, name, value, ...; names in ascending order, each once

Each value has exactly one encoding, so a digest of the encoding is a digest of the value.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping
from itertools import pairwise

import numpy as np

from fedsync.cipher.suites.suite import DIGEST_BYTES, NO_DIGEST, NONCE_BYTES, Member
from fedsync.common.errors import ProtocolError
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload

MAX_NAME_BYTES = 255

_MEMBER = struct.Struct(f"<Q{NONCE_BYTES}s{DIGEST_BYTES}s")
_DIGESTS = struct.Struct(f"<{DIGEST_BYTES}s{DIGEST_BYTES}s")


def check_same(sender: str, check: str, found: object, wanted: object) -> None:
    if found != wanted:
        shown = [value.hex() if isinstance(value, bytes) else repr(value) for value in (found, wanted)]
        raise ProtocolError(sender, check, f"{shown[0]}, expected {shown[1]}")


def read_name(header: memoryview, at: int, sender: str) -> tuple[str, int]:
    """Read a name of 1 to 255 bytes at ``at``; return the name and its end."""
    if at >= len(header):
        raise ProtocolError(sender, "header", "ends where a name is expected")
    end = at + 1 + header[at]
    if end > len(header) or end == at + 1:
        raise ProtocolError(sender, "header", "a name is empty or does not end")
    try:
        return str(header[at + 1 : end], "utf-8"), end
    except UnicodeDecodeError:
        raise ProtocolError(sender, "header", "a name is no UTF-8") from None


def read_member(header: memoryview, at: int, sender: str, *, digests: bool) -> tuple[Member, int]:
    update_id, at = read_name(header, at, sender)
    end = at + _MEMBER.size + (_DIGESTS.size if digests else 0)
    if end > len(header):
        raise ProtocolError(sender, "header", "ends within a member")
    base, nonce, chain = _MEMBER.unpack_from(header, at)
    found = _DIGESTS.unpack_from(header, at + _MEMBER.size) if digests else ()
    return Member(update_id, base, nonce, chain, *found), end


def write_name(name: str) -> bytes:
    data = name.encode()
    if not 1 <= len(data) <= MAX_NAME_BYTES:
        raise ValueError(f"a name has {len(data)} bytes, at most {MAX_NAME_BYTES}")
    return bytes([len(data)]) + data


def write_member(member: Member, *, digests: bool) -> bytes:
    """Encode for `read_member`, or raise `ValueError` if the name or the round cannot be written."""
    try:
        fixed = _MEMBER.pack(member.round, member.nonce, member.chain)
    except struct.error as error:
        raise ValueError(f"round {member.round} cannot be encoded: {error}") from None
    return write_name(member.update_id) + fixed + (_DIGESTS.pack(member.digest, member.annex) if digests else b"")


ANNEX_HEAD = 72
"""Bytes of an annex that can be shown without the rest; see `fedsync.cipher.masking.annex`."""


def annex_stub(annex: bytes) -> bytes:
    """Beginning of an annex and SHA-256 of the rest: enough to read the beginning and to compute the annex's digest."""
    return annex[:ANNEX_HEAD] + hashlib.sha256(annex[ANNEX_HEAD:]).digest()


def annex_digest(annex: bytes) -> bytes:
    """`Member.annex` of an update with this annex: SHA-256 of the stub, or `NO_DIGEST` without one."""
    return hashlib.sha256(annex_stub(annex)).digest() if annex else NO_DIGEST


def clear_values(data: bytes | memoryview | Payload, size: int, sender: str) -> Vector:
    """Decode values in the clear, float32 [size]; `ProtocolError` for a wrong number or a non-finite value."""
    if len(data) != 4 * size:
        raise ProtocolError(sender, "length", f"{len(data)} bytes in the clear, not {4 * size}")
    values = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise ProtocolError(sender, "finite", "unencrypted values are not finite")
    return values


MAX_BYTES = 2**24
_LENGTH = 4


def pack_frames(frames: Iterable[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(_LENGTH, "little") + frame for frame in frames)


def unpack_frames(data: bytes, sender: str, count: int | None = None) -> list[bytes]:
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
    return pack_frames(part for name in sorted(values) for part in (name.encode(), values[name]))


def unpack_named(data: bytes, sender: str, size: int | None = None) -> dict[str, bytes]:
    """Decode named values, or raise `ProtocolError`; ``size`` is the size of each value [bytes], None allows any."""
    frames = unpack_frames(data, sender)
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
