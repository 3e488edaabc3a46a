"""Envelope of a snapshot: author, run, version and signature. It can be checked without a key.

author: length [1], UTF-8 | R [32] | version [8] | Ed25519 signature over these and the SHA-256 of the rest [64]
| the rest: sealed, see `fedsync.cipher.silo.snapshot`
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from fedsync.cipher.encoding.fields import FieldCheck, read_name, write_name
from fedsync.cipher.keys.material import SIGNATURE_BYTES, SiloKeys, is_signed
from fedsync.cipher.suites.suite import DIGEST_BYTES

_SIGNED = b"snapshot 2"
_HEAD = struct.Struct(f"<{DIGEST_BYTES}sq")


@dataclass(frozen=True, slots=True)
class SignedSnapshot:
    """Parts of a snapshot that are readable without a key.

    Args:
        author: silo that claims to have made the snapshot.
        run: R, the run's digest.
        signed: bytes that the author must have signed.
        sealed: the sealed state.
    """

    author: str
    run: bytes
    version: int
    signed: bytes
    signature: bytes
    sealed: memoryview

    @classmethod
    def make(cls, own: SiloKeys, run: bytes, version: int, sealed: bytes) -> bytes:
        head = write_name(own.name) + _HEAD.pack(run, version)
        return head + own.sign(_SIGNED, head + hashlib.sha256(sealed).digest()) + sealed

    @classmethod
    def read(cls, data: bytes | memoryview, sender: str) -> SignedSnapshot:
        """Parse a snapshot without checking the signature; raise `ProtocolError` if it is malformed."""
        content, check = memoryview(data), FieldCheck(sender)
        name, at = read_name(content, 0, check)
        start = at + _HEAD.size + SIGNATURE_BYTES
        if len(content) < start:
            check.fail("snapshot", f"it ends at {len(content)} bytes")
        run, version = _HEAD.unpack_from(content, at)
        signed = bytes(content[: at + _HEAD.size]) + hashlib.sha256(content[start:]).digest()
        return cls(name, run, version, signed, bytes(content[at + _HEAD.size : start]), content[start:])

    def is_of(self, signing: bytes) -> bool:
        """Whether the signature is of this key, 32 bytes."""
        return is_signed(signing, _SIGNED, self.signed, self.signature)
