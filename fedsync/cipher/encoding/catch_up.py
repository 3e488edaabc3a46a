"""What the server sends a silo under encryption: all that it has not seen since the version that it holds.

    magic [4] | version [2] | kind of start [2] | from [8] | to [8] | attempt [8] | start bytes [8]
    | calibration bytes [8] | groups [8] | start: nothing, a sealed snapshot of version ``from``, or that version in
    the clear; zeros to 8 | calibration: an aggregate of headers, or nothing; zeros to 8
    each group: sign [8] | versions [8] | sums [8] | clear bytes [8] | reveal bytes [8] | each sum: bytes [8],
    an aggregate | values in the clear; zeros to 8 | reveals; zeros to 8

Numbers are little-endian. The pieces are views of the message; what is in them is checked where they are used.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from fedsync.core.errors import ProtocolError
from fedsync.core.transfer import Payload

MAX_GROUPS = 4096
MAX_SUMS = 64

MAX_ATTEMPT = 2**32 - 1

_MAGIC, _VERSION, _ALIGN = b"FSPK", 2, 8
_HEAD = struct.Struct("<4sHHqqQQQQ")
_GROUP = struct.Struct("<qQQQQ")
_LENGTH = struct.Struct("<Q")

Piece = bytes | memoryview


class Start(IntEnum):
    """What a catch-up begins with. Numbers on the wire: never renumber."""

    HELD = 0
    """The version that the silo holds."""
    SNAPSHOT = 1
    """A version that another silo sealed."""
    CLEAR = 2
    """A version in the clear: the model before any training, where the user gave one."""


@dataclass(frozen=True, slots=True)
class SumGroup:
    """Sums that make up one version, or several whose commits weighed alike.

    Args:
        sign: 1 to add, -1 to take back.
        versions: how many there are.
        sums: aggregates, one for each grid on which updates were sealed.
        clear: what the values in the clear change by, float32 bytes.
        reveals: what takes masks off the sums; see `fedsync.cipher.masking.unmask`.
    """

    sign: int
    versions: int
    sums: tuple[Piece, ...]
    clear: Piece = b""
    reveals: Piece = b""


@dataclass(frozen=True, slots=True)
class CatchUp:
    """All that a silo has not seen; see the module for its form.

    Args:
        start: what it begins with.
        base: version that it continues.
        version: that it brings.
        groups: in order.
        model: of ``base``, sealed or in the clear, unless the silo holds it.
        calibration: what silos said at the start of how large updates are.
        attempt: of the round from ``version`` in which the silo is to seal; see `fedsync.cipher.masking.attempts`.
    """

    start: Start
    base: int
    version: int
    groups: tuple[SumGroup, ...] = ()
    model: Piece = b""
    calibration: Piece = b""
    attempt: int = 0

    def encode(self) -> Payload:
        """The message, uint8 [bytes]."""
        pieces: list[Piece] = [
            _HEAD.pack(
                *(_MAGIC, _VERSION, self.start, self.base, self.version, self.attempt),
                *(len(self.model), len(self.calibration), len(self.groups)),
            )
        ]
        pieces += [*_padded(self.model), *_padded(self.calibration)]
        for group in self.groups:
            lengths = (len(group.sums), len(group.clear), len(group.reveals))
            pieces.append(_GROUP.pack(group.sign, group.versions, *lengths))
            for one in group.sums:
                pieces += [_LENGTH.pack(len(one)), *_padded(one)]
            pieces += [*_padded(group.clear), *_padded(group.reveals)]
        return np.frombuffer(b"".join(pieces), dtype=np.uint8)


def decode(payload: Payload, sender: str = "server") -> CatchUp:
    """The inverse of `CatchUp.encode`; nothing is copied.

    Raises:
        ProtocolError: the message is not of that form.
    """
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise ProtocolError(sender, "catch-up", f"{payload.dtype} {payload.shape} instead of bytes")
    reader = _Reader(memoryview(payload.tobytes()), sender)
    magic, version, start, base, to, attempt, model_bytes, calibration_bytes, count = reader.fields(_HEAD)
    if magic != _MAGIC or version != _VERSION or start not in set(Start):
        reader.fail(f"it begins with {magic!r}, version {version}, start {start}")
    if count > MAX_GROUPS or not -1 <= base <= to or attempt > MAX_ATTEMPT:
        reader.fail(f"{count} groups from version {base} to {to}, attempt {attempt}")
    model, calibration = reader.piece(model_bytes), reader.piece(calibration_bytes)
    groups: list[SumGroup] = []
    for _ in range(count):
        sign, versions, sums, clear_bytes, reveal_bytes = reader.fields(_GROUP)
        if sign not in (-1, 1) or not 1 <= versions <= to + 1 or not 1 <= sums <= MAX_SUMS:
            reader.fail(f"a group of {sums} sums, {versions} versions and sign {sign}")
        pieces = tuple(reader.piece(reader.fields(_LENGTH)[0]) for _ in range(sums))
        groups.append(SumGroup(sign, versions, pieces, reader.piece(clear_bytes), reader.piece(reveal_bytes)))
    reader.end()
    return CatchUp(Start(start), base, to, tuple(groups), model, calibration, attempt)


class _Reader:
    """Cuts a message into pieces, and never reads beyond its end."""

    def __init__(self, view: memoryview, sender: str) -> None:
        self._view, self._sender, self._at = view, sender, 0

    def fail(self, detail: str) -> None:
        raise ProtocolError(self._sender, "catch-up", detail)

    def fields(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.piece(form.size))

    def piece(self, size: int) -> memoryview:
        """The next bytes, without the zeros that fill them up."""
        if size > len(self._view) - self._at:
            self.fail(f"it ends at {len(self._view)} bytes, within a piece")
        piece = self._view[self._at : self._at + size]
        self._at += size + -size % _ALIGN
        return piece

    def end(self) -> None:
        if self._at != len(self._view):
            self.fail(f"{len(self._view)} bytes, {self._at} of which mean something")


def _padded(piece: Piece) -> list[Piece]:
    return [piece, bytes(-len(piece) % _ALIGN)]
