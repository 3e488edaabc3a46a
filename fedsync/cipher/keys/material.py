"""Keys of encrypted aggregation, their holders, and the keys derived from them.

The silos share a *group secret* that the server never sees: a BFV context with its secret key, and 32 bytes from which
every other shared key is derived. One group secret and one list of members form an *epoch*. Every change of members
starts the next epoch. Each silo also has two key pairs of its own: X25519 for key agreement, Ed25519 for signatures.
`fedsync.cipher.keys.keywrap` transports the group secret to the silos; `fedsync.cipher.keys.keyring` stores the files.

Source: HKDF, RFC 5869; AES-GCM, NIST SP 800-38D; X25519, RFC 7748; Ed25519, RFC 8032.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedsync.common.errors import ProtocolError
from fedsync.common.names import check_silo_name

KEY_BYTES = 32
SIGNATURE_BYTES = 64
FINGERPRINT_BYTES = 16
MAX_EPOCH = 2**32 - 1
PART_BYTES = 2**30  # largest part of a blob; one AES-GCM call of the library takes less than 2^31 bytes

_NONCE_BYTES, _TAG_BYTES = 12, 16
_BLOB_MAGIC = b"FSBLOB1\0"


class Purpose(StrEnum):
    """Purposes of keys derived from the group key: no two uses share a key. Never rename."""

    FINGERPRINT = "fingerprint"
    PAD = "pad"
    TAG = "tag"
    SNAPSHOT = "snapshot"
    NAME = "name"


@dataclass(frozen=True, slots=True)
class PublicKeys:
    """Public half of a silo's keys: X25519 and Ed25519, 32 bytes each; `ValueError` for another length."""

    exchange: bytes
    signing: bytes

    def __post_init__(self) -> None:
        if len(self.exchange) != KEY_BYTES or len(self.signing) != KEY_BYTES:
            raise ValueError(f"public keys have {KEY_BYTES} bytes each")

    @property
    def usable(self) -> bool:
        """Whether a secret can be agreed on with the exchange key; a point of low order would make the secret zero."""
        try:
            X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(self.exchange))
        except ValueError:
            return False
        return True

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits for people to compare over the telephone."""
        return hashlib.sha256(b"fedsync silo 1" + self.exchange + self.signing).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class SiloKeys:
    """Secret half of a silo's keys, X25519 and Ed25519, 32 bytes each; it never leaves the silo. `ConfigError` if the
    name is not allowed, `ValueError` if a key has the wrong length.
    """

    name: str
    exchange: bytes = field(repr=False)
    signing: bytes = field(repr=False)
    public: PublicKeys = field(init=False)

    def __post_init__(self) -> None:
        check_silo_name(self.name)
        exchange = X25519PrivateKey.from_private_bytes(self.exchange).public_key().public_bytes_raw()
        object.__setattr__(self, "public", PublicKeys(exchange, verification_key(self.signing)))

    @classmethod
    def generate(cls, name: str) -> SiloKeys:
        return cls(name, secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES))

    def sign(self, context: bytes, data: bytes) -> bytes:
        """Ed25519 signature, 64 bytes. ``context`` names the use: a signature is never valid for another use."""
        return sign(self.signing, context, data)

    def agree(self, other: PublicKeys, context: bytes, length: int = KEY_BYTES) -> bytes:
        """Derive a secret of ``length`` bytes that only this silo and the other can compute, one per ``context``.
        `ValueError` if the other's key is not `PublicKeys.usable`; members' keys were checked when pinned.

        Source: X25519, then HKDF-SHA256 with both public keys in order as salt.
        """
        public = X25519PublicKey.from_public_bytes(other.exchange)
        shared = X25519PrivateKey.from_private_bytes(self.exchange).exchange(public)
        salt = b"".join(sorted((self.public.exchange, other.exchange)))
        return hkdf(shared, salt, b"fedsync agree 1\0" + context, length)


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Group secret of one epoch with the list of its holders. Only silos and the administrator have it.

    ``epoch`` counts from 1. ``context`` is the serialised BFV context with its secret key. ``key`` has 32 bytes; use
    `derive`, never the key itself. ``administrator`` is the issuer's Ed25519 public key, 32 bytes. ``fingerprint``, 16
    bytes, identifies context, key and epoch on the wire, and discloses nothing about them. `ValueError` if a value is
    out of range.
    """

    epoch: int
    context: bytes = field(repr=False)
    key: bytes = field(repr=False)
    members: Mapping[str, PublicKeys]
    administrator: bytes
    fingerprint: bytes = field(init=False)
    _naming: bytes = field(init=False, repr=False)  # key of `conceal`

    def __post_init__(self) -> None:
        if not 1 <= self.epoch <= MAX_EPOCH:
            raise ValueError(f"epoch {self.epoch} lies outside 1..{MAX_EPOCH}")
        if len(self.key) != KEY_BYTES or len(self.administrator) != KEY_BYTES or not self.context:
            raise ValueError("a group key needs a context, and keys of 32 bytes")
        salt = hashlib.sha256(self.context).digest()
        object.__setattr__(self, "fingerprint", self.derive(Purpose.FINGERPRINT, salt, FINGERPRINT_BYTES))
        object.__setattr__(self, "_naming", self.derive(Purpose.NAME))

    def derive(self, purpose: Purpose, salt: bytes = b"", length: int = KEY_BYTES) -> bytes:
        """Derive a key of ``length`` bytes (8,160 at most) for one purpose in this epoch. Keys for different purposes
        disclose nothing about each other. ``salt`` is public, for example a fresh nonce; each value gives another key.
        """
        return hkdf(self.key, salt, f"fedsync group 1/{self.epoch}/{purpose}".encode(), length)

    def conceal(self, digest: bytes) -> bytes:
        """Keyed digest, 32 bytes, for the server to compare; the server could guess the input of a plain digest."""
        return hmac.digest(self._naming, digest, "sha256")


def hkdf(secret: bytes, salt: bytes, info: bytes, length: int = KEY_BYTES) -> bytes:
    return HKDF(hashes.SHA256(), length, salt, info).derive(secret)


def sign(private: bytes, context: bytes, data: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).sign(_signed(context, data))


def verification_key(private: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def is_signed(public: bytes, context: bytes, data: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed(context, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed(context: bytes, data: bytes) -> bytes:
    return b"fedsync " + len(context).to_bytes(2, "little") + context + data


def seal_blob(group: GroupKey, purpose: Purpose, associated: bytes, data: bytes) -> bytes:
    """Encrypt bytes so that only a holder of the group key can read them, and nobody can change them.

    The blob opens only under the same ``purpose`` and with the same ``associated`` bytes (silo, version). It has magic,
    epoch, salt, and for each part of `PART_BYTES` ciphertext and tag: 60 bytes more than ``data`` for one part.

    Source: AES-256-GCM. The key is derived from a fresh salt and used once. So the nonce can be the number of the part,
    and the number of blobs has no bound. Each part is bound to the number of parts: no part can be left out.
    """
    head = _BLOB_MAGIC + group.epoch.to_bytes(4, "little")
    salt = secrets.token_bytes(KEY_BYTES)
    cipher, bound = AESGCM(group.derive(purpose, salt)), head + group.fingerprint + associated
    parts = _parts(data, PART_BYTES, bound)
    return b"".join((head, salt, *(cipher.encrypt(nonce, part, about) for nonce, part, about in parts)))


def open_blob(group: GroupKey, purpose: Purpose, associated: bytes, blob: bytes, sender: str = "peer") -> bytes:
    """Decrypt a blob of `seal_blob`, called with the same arguments. `ProtocolError` if the blob is malformed or
    damaged, or was sealed in another epoch, for another use or with another key.
    """
    start = len(_BLOB_MAGIC) + 4
    if not blob.startswith(_BLOB_MAGIC) or len(blob) < start + KEY_BYTES + _TAG_BYTES:
        raise ProtocolError(sender, "sealed blob", f"{len(blob)} bytes are no sealed blob")
    head, salt = blob[:start], blob[start : start + KEY_BYTES]
    epoch = int.from_bytes(head[len(_BLOB_MAGIC) :], "little")
    if epoch != group.epoch:
        raise ProtocolError(sender, "key epoch", f"sealed in epoch {epoch}, this is epoch {group.epoch}")
    cipher, bound = AESGCM(group.derive(purpose, salt)), head + group.fingerprint + associated
    parts = _parts(memoryview(blob)[start + KEY_BYTES :], PART_BYTES + _TAG_BYTES, bound)
    try:
        return b"".join(cipher.decrypt(nonce, part, about) for nonce, part, about in parts)
    except InvalidTag:
        detail = f"not a {purpose} of this group for this request, or damaged"
    raise ProtocolError(sender, "sealed blob", detail)


def _parts(data: bytes | memoryview, size: int, bound: bytes) -> Iterator[tuple[bytes, memoryview, bytes]]:
    count = max(-(-len(data) // size), 1)
    about = bound if count == 1 else bound + count.to_bytes(8, "little")
    for number in range(count):
        yield number.to_bytes(_NONCE_BYTES, "little"), memoryview(data)[number * size : (number + 1) * size], about
