"""SHA-256 checksums in front of data, for files whose damage must be detected."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TypeVar

_DIGEST_BYTES = 32

Data = TypeVar("Data", bytes, memoryview)


def checksum(*pieces: bytes | memoryview) -> bytes:
    """Return the SHA-256 of consecutive pieces, 32 bytes."""
    whole = hashlib.sha256()
    for piece in pieces:
        whole.update(piece)
    return whole.digest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digested(body: bytes) -> bytes:
    """Return the digest, 32 bytes, followed by ``body``."""
    return checksum(body) + body


def undigested(data: Data) -> Data | None:
    """Return the body, or None if it does not match its digest."""
    body = data[_DIGEST_BYTES:]
    return body if hashlib.sha256(body).digest() == data[:_DIGEST_BYTES] else None
