"""Catch-up message to a silo in an encrypted run: all model changes since the version that the silo holds.

    magic [4] | format version [2] | kind of start [2] | from: version [8] | to: version [8] | attempt [8]
    | lengths of start, calibration and roster [3 x 8] | number of links [8] | start | calibration | roster | links
    start: model of version ``from``, in a sealed snapshot or in the clear; empty if the silo holds it or has no model
    calibration: sum of headers that sets the first exponents, or empty | roster: silos' public keys for masks, or empty
    each link: kind [8] | number of entries [8] | entries
    each entry: version [8] | number of sums [8] | lengths of clear and reveals [2 x 8]
    | each sum: length [8], an aggregate | clear: values in the clear | reveals: data that removes masks

    snapshot: author: length [1], UTF-8 | run digest R [32] | version [8] | Ed25519 signature over these three fields
    and the SHA-256 of the rest [64] | the rest: sealed, see `fedsync.cipher.silo.replica_state`

A *link* has the changes from one version to the next. Zeros fill each part of variable length to a multiple of 8 bytes.
Numbers are little-endian. Decoded parts are views of the message; their content is still unchecked.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

import numpy as np

from fedsync.cipher.encoding.fields import read_name, write_name
from fedsync.cipher.keys.material import SIGNATURE_BYTES, SiloKeys, is_signed
from fedsync.cipher.suites.suite import DIGEST_BYTES
from fedsync.common.errors import ProtocolError
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.chunked_arrays import pieces as array_pieces
from fedsync.model.transfer import Payload

WINDOW = 512
"""Versions that silos remember: an update with an older base can no longer be added."""

MAX_LINKS = 4096
MAX_ENTRIES = 4096
MAX_SUMS = 64

MAX_ATTEMPT = 2**32 - 1

_MAGIC, _VERSION, _ALIGN = b"FSPK", 3, 8
_HEAD = struct.Struct("<4sHHqqQQQQQ")
_LINK = struct.Struct("<QQ")
_ENTRY = struct.Struct("<qQQQ")
_LENGTH = struct.Struct("<Q")

Piece = bytes | memoryview | Payload
"""Bytes of a message; a uint8 array may lie in a file."""


def attesters(silos: int) -> int:
    """Number of silos that must vouch for a snapshot, its author included: half of all silos with a key, rounded up.

    The server could lie about the silos of a run. Keys come from the administrator, so all silos with a key count.
    """
    return -(-silos // 2)


class Start(IntEnum):
    """Kinds of start of a catch-up. Numbers on the wire: never renumber.

    HELD: the version that the silo holds; SNAPSHOT: a version that another silo sealed; CLEAR: a version in the clear,
    the untrained model that the user gave.
    """

    HELD = 0
    SNAPSHOT = 1
    CLEAR = 2


class LinkKind(IntEnum):
    """Effects of a link on the model. Numbers on the wire: never renumber.

    ADD adds the mean of its single entry's sums. UNDO reverts earlier links: its entries are those of the reverted
    links, newest first. EMPTY, an empty commit, changes nothing.
    """

    ADD = 1
    UNDO = 2
    EMPTY = 3


@dataclass(frozen=True, slots=True)
class LinkEntry:
    """Contribution of one link, which leads to ``version``. ``sums`` are aggregates, one for each grid on which updates
    were sealed; ``clear`` is the change of the values in the clear, float32 bytes; ``reveals`` is data that removes
    masks from the sums.
    """

    version: int
    sums: tuple[Piece, ...]
    clear: Piece = b""
    reveals: Piece = b""


@dataclass(frozen=True, slots=True)
class Link:
    """Step from one version to the next; exactly one entry for ADD, at least one for UNDO, none for EMPTY."""

    kind: LinkKind
    entries: tuple[LinkEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class CatchUp:
    """Everything that a silo has missed; the module describes the wire format.

    Args:
        base: version that the catch-up continues; -1 where the silo holds no model and begins with version 0.
        model: model of ``base``, sealed or in the clear; empty where the silo holds it.
        calibration: aggregate of the silos' headers from the start of the run, with the size of their updates.
        attempt: attempt at ``version`` in which the silo must seal; see `fedsync.cipher.masking.unmask.Attempts`.
    """

    start: Start
    base: int
    version: int
    links: tuple[Link, ...] = ()
    model: Piece = b""
    calibration: Piece = b""
    attempt: int = 0
    roster: Piece = b""

    def encode(self, keeper: ArrayKeeper | None = None) -> Payload:
        """Encode, uint8 [bytes]; ``keeper`` stores the message, by default in memory."""
        pieces = self._pieces()
        parts = (array_pieces(piece) if isinstance(piece, np.ndarray) else (piece,) for piece in pieces)
        return (keeper or ArrayKeeper()).write(sum(map(len, pieces)), chain.from_iterable(parts))

    def _pieces(self) -> list[Piece]:
        whole = (self.model, self.calibration, self.roster)
        fixed = (_MAGIC, _VERSION, self.start, self.base, self.version, self.attempt)
        pieces: list[Piece] = [_HEAD.pack(*fixed, *map(len, whole), len(self.links))]
        pieces += [part for piece in whole for part in _padded(piece)]
        for link in self.links:
            pieces.append(_LINK.pack(link.kind, len(link.entries)))
            for entry in link.entries:
                pieces.append(_ENTRY.pack(entry.version, len(entry.sums), len(entry.clear), len(entry.reveals)))
                for one in entry.sums:
                    pieces += [_LENGTH.pack(len(one)), *_padded(one)]
                pieces += [*_padded(entry.clear), *_padded(entry.reveals)]
        return pieces


def decode(payload: Payload, sender: str = "server") -> CatchUp:
    """Decode what `CatchUp.encode` wrote, without copies; raise `ProtocolError` if it is malformed."""
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise ProtocolError(sender, "catch-up", f"{payload.dtype} {payload.shape} instead of bytes")
    reader = _Reader(payload.data, sender)
    magic, version, start, base, to, attempt, *lengths, count = reader.fields(_HEAD)
    if magic != _MAGIC or version != _VERSION or start not in set(Start):
        reader.fail(f"it begins with {magic!r}, version {version}, start {start}")
    if count > MAX_LINKS or not -1 <= base <= to or attempt > MAX_ATTEMPT:
        reader.fail(f"{count} links from version {base} to {to}, attempt {attempt}")
    if count != to - max(base, 0):
        reader.fail(f"{count} links from version {base} to {to}: one link per version is needed")
    model, calibration, roster = (reader.piece(length) for length in lengths)
    links = tuple(_link(reader, to) for _ in range(count))
    if reader.at != len(reader.view):
        reader.fail(f"{len(reader.view)} bytes, but its content ends at byte {reader.at}")
    return CatchUp(Start(start), base, to, links, model, calibration, attempt, roster)


def _link(reader: _Reader, newest: int) -> Link:
    kind, count = reader.fields(_LINK)
    if kind not in set(LinkKind) or count > MAX_ENTRIES:
        reader.fail(f"a link of kind {kind} with {count} entries")
    entries: list[LinkEntry] = []
    for _ in range(count):
        version, sums, clear_bytes, reveal_bytes = reader.fields(_ENTRY)
        if not 1 <= version <= newest or not 1 <= sums <= MAX_SUMS:
            reader.fail(f"an entry of {sums} sums, of version {version}")
        pieces = tuple(reader.piece(reader.fields(_LENGTH)[0]) for _ in range(sums))
        entries.append(LinkEntry(version, pieces, reader.piece(clear_bytes), reader.piece(reveal_bytes)))
    link = Link(LinkKind(kind), tuple(entries))
    if not {LinkKind.ADD: count == 1, LinkKind.UNDO: count >= 1, LinkKind.EMPTY: count == 0}[link.kind]:
        reader.fail(f"a link of kind {link.kind.name} with {count} entries")
    return link


class _Reader:
    def __init__(self, view: memoryview, sender: str) -> None:
        self.view, self._sender, self.at = view, sender, 0

    def fail(self, detail: str) -> None:
        raise ProtocolError(self._sender, "catch-up", detail)

    def fields(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.piece(form.size))

    def piece(self, size: int) -> memoryview:
        if size > len(self.view) - self.at:
            self.fail(f"it ends at {len(self.view)} bytes, inside a field")
        piece = self.view[self.at : self.at + size]
        self.at += size + -size % _ALIGN
        return piece


def _padded(piece: Piece) -> list[Piece]:
    return [piece, bytes(-len(piece) % _ALIGN)]


_SIGNED_SNAPSHOT = b"snapshot 2"
_SNAPSHOT = struct.Struct(f"<{DIGEST_BYTES}sq")


@dataclass(frozen=True, slots=True)
class SignedSnapshot:
    """Parts of a snapshot that are readable without a key; ``run`` is R, ``signed`` the bytes that were signed."""

    author: str
    run: bytes
    version: int
    signed: bytes
    signature: bytes
    sealed: memoryview

    @classmethod
    def make(cls, own: SiloKeys, run: bytes, version: int, sealed: bytes) -> bytes:
        head = write_name(own.name) + _SNAPSHOT.pack(run, version)
        return head + own.sign(_SIGNED_SNAPSHOT, head + hashlib.sha256(sealed).digest()) + sealed

    @classmethod
    def read(cls, data: bytes | memoryview, sender: str) -> SignedSnapshot:
        """Parse a snapshot without checking the signature; raise `ProtocolError` if it is malformed."""
        content = memoryview(data)
        name, at = read_name(content, 0, sender)
        start = at + _SNAPSHOT.size + SIGNATURE_BYTES
        if len(content) < start:
            raise ProtocolError(sender, "snapshot", f"it ends at {len(content)} bytes")
        run, version = _SNAPSHOT.unpack_from(content, at)
        signed = bytes(content[: at + _SNAPSHOT.size]) + hashlib.sha256(content[start:]).digest()
        return cls(name, run, version, signed, bytes(content[at + _SNAPSHOT.size : start]), content[start:])

    def is_of(self, signing: bytes) -> bool:
        return is_signed(signing, _SIGNED_SNAPSHOT, self.signed, self.signature)
