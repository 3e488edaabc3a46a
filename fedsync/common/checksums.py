"""Bytes behind their SHA-256, for files whose damage has to be noticed."""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 32


def digested(body: bytes) -> bytes:
    """The digest, 32 bytes, and ``body``."""
    return hashlib.sha256(body).digest() + body


def undigested(data: bytes) -> bytes | None:
    """The body, or None where it is not what was written."""
    body = data[_DIGEST_BYTES:]
    return body if hashlib.sha256(body).digest() == data[:_DIGEST_BYTES] else None
