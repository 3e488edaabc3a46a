"""Bytes behind their SHA-256, for files whose damage has to be noticed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

_DIGEST_BYTES = 32

Data = TypeVar("Data", bytes, memoryview)


def checksum(*pieces: bytes | memoryview) -> bytes:
    """What stands in front of pieces that are written one after the other, 32 bytes."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.digest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digested(body: bytes) -> bytes:
    """The digest, 32 bytes, and ``body``."""
    return checksum(body) + body


def undigested(data: Data) -> Data | None:
    """The body, or None where it is not what was written."""
    body = data[_DIGEST_BYTES:]
    return body if hashlib.sha256(body).digest() == data[:_DIGEST_BYTES] else None
