"""File of encrypted single updates that the server gives to an examiner (a silo that searches for a bad update).

    magic [8] | length of the notice [8], of the consents [8] | notice | consents | each update
    each update: length of the id [2], of the message [8] | update id | message as sent by its silo

The notice lists the updates (`notice`). Consents are signed statements of silos' owners (`consent`), each encoded as
one of `frames`. Files are memory-mapped, so an update takes memory only while it is read.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from fedsync.cipher.encoding.fields import pack_frames, unpack_frames
from fedsync.common.errors import SERVER, ConfigError, ProtocolError
from fedsync.common.files import OWNER_FILE, write_pieces

_MAGIC = b"FSDISC1\0"
_LENGTHS = struct.Struct("<QQ")
_RECORD = struct.Struct("<HQ")
_PORTION = 2**20


@dataclass(frozen=True, slots=True)
class KeptUpdate:
    """Update that the server keeps: its id, the bytes of its message, and a file that begins with the message."""

    update_id: str
    nbytes: int
    file: Path

    def pieces(self) -> Iterator[bytes]:
        name, left = self.update_id.encode(), self.nbytes
        yield _RECORD.pack(len(name), left) + name
        with self.file.open("rb") as file:
            while portion := file.read(min(_PORTION, left)):
                left -= len(portion)
                yield portion


@dataclass(frozen=True, slots=True)
class Disclosure:
    """Content of a disclosure file: notice, consent files, and id and message of each update."""

    notice: bytes
    consents: tuple[bytes, ...]
    updates: tuple[tuple[str, memoryview], ...]

    @classmethod
    def open(cls, path: Path) -> Disclosure:
        """Read what `disclose` wrote; updates are not parsed. Raises `ConfigError` if the file cannot be read, and
        `ProtocolError` if the file is of another kind, or ends early.
        """
        try:
            with path.open("rb") as file:
                whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise ConfigError(str(path), f"cannot be read: {error}", "Check the path") from None
        start = len(_MAGIC) + _LENGTHS.size
        if len(whole) < start or whole[: len(_MAGIC)] != _MAGIC:
            raise ProtocolError(SERVER, "disclosure", "not what `fedsync server disclose` writes")
        notice, consents = _LENGTHS.unpack_from(whole, len(_MAGIC))
        if notice + consents > len(whole) - start:
            raise ProtocolError(SERVER, "disclosure", "it ends early")
        at = start + notice
        given = tuple(unpack_frames(bytes(whole[at : at + consents]), SERVER))
        return cls(bytes(whole[start:at]), given, tuple(_records(whole[at + consents :])))


def disclose(out: Path, notice: bytes, consents: Iterable[bytes], kept: Iterable[KeptUpdate]) -> None:
    """Write a disclosure file, for its owner alone; raise `ConfigError` if a file cannot be read or written."""
    packed = pack_frames(consents)
    head = _MAGIC + _LENGTHS.pack(len(notice), len(packed)) + notice + packed

    write_pieces(out, chain((head,), *(update.pieces() for update in kept)), OWNER_FILE)


def _records(view: memoryview) -> Iterator[tuple[str, memoryview]]:
    at = 0
    while at < len(view):
        start = at + _RECORD.size
        name, size = _RECORD.unpack_from(view, at) if start <= len(view) else (0, len(view))
        at = start + name + size
        if at > len(view):
            raise ProtocolError(SERVER, "disclosure", "it ends within an update")
        yield str(view[start : start + name], "utf-8", "replace"), view[start + name : at]
