"""A snapshot's outside: who made it, of which run and version, and the signature. It needs no key to be checked.

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
    """What may be known of a snapshot without a key.

    Args:
        author: who says that it made it.
        run: R.
        version: of the state.
        signed: what the author has to have signed.
        signature: that came with it.
        sealed: the state.
    """

    author: str
    run: bytes
    version: int
    signed: bytes
    signature: bytes
    sealed: memoryview

    @classmethod
    def make(cls, own: SiloKeys, run: bytes, version: int, sealed: bytes) -> bytes:
        """The message of a state that ``own`` sealed; arguments as above."""
        head = write_name(own.name) + _HEAD.pack(run, version)
        return head + own.sign(_SIGNED, head + hashlib.sha256(sealed).digest()) + sealed

    @classmethod
    def read(cls, data: bytes | memoryview, sender: str) -> SignedSnapshot:
        """Raises `ProtocolError` where ``sender`` sent something else."""
        content, check = memoryview(data), FieldCheck(sender)
        name, at = read_name(content, 0, check)
        start = at + _HEAD.size + SIGNATURE_BYTES
        if len(content) < start:
            check.fail("snapshot", f"it ends at {len(content)} bytes")
        run, version = _HEAD.unpack_from(content, at)
        signed = bytes(content[: at + _HEAD.size]) + hashlib.sha256(content[start:]).digest()
        return cls(name, run, version, signed, bytes(content[at + _HEAD.size : start]), content[start:])

    def is_of(self, signing: bytes) -> bool:
        """Whether who has this key, 32 bytes, signed it."""
        return is_signed(signing, _SIGNED, self.signed, self.signature)
