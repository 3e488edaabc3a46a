"""Key bundle: carries the group secret from the administrator to one silo, unreadable for the server.

    magic [8] | administrator's Ed25519 key [32] | length of header [4] | header (JSON) | ephemeral X25519 key [32]
    | AES-256-GCM of group key [32] and BFV context | signature [64]

The wrapping key is HKDF-SHA256 of an X25519 exchange between the ephemeral key and the silo's pinned key. The header is
input of HKDF and associated data of AES-GCM. The signature covers all bytes before it; it is checked before parsing.

Source: HPKE (RFC 9180) in its base mode, with a signature around it.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedsync.cipher.keys.key_files import Epoch, Fingerprint, Key, Name, Record, Signature
from fedsync.cipher.keys.material import (
    KEY_BYTES,
    SIGNATURE_BYTES,
    GroupKey,
    PublicKeys,
    SiloKeys,
    hkdf,
    is_signed,
    sign,
)
from fedsync.common.errors import ADMINISTRATOR, ConfigError, ProtocolError

SUITE = "bfv-4096-60-16"  # the only kind of context that is issued: N = 4096, coefficient modulus of 60 and 16 bits

MAX_BUNDLE_BYTES = 4 * 2**20
MAX_LINE_BYTES = 4096

_MAGIC = b"FSKEYS1\0"
_SENDER = ADMINISTRATOR
# Signature contexts: a signature of one kind never passes for another.
_BUNDLE, _SERVER, _LINE = b"key bundle 1", b"server keys 1", b"silo keys 1"
_HEAD_BYTES = len(_MAGIC) + KEY_BYTES + 4
_NONCE = bytes(12)


class _Header(Record):
    silo: Name
    epoch: Epoch
    suite: str
    fingerprint: Fingerprint
    members: dict[Name, PublicKeys]


class _Announcement(Record):
    silo: Name
    exchange: Key
    signing: Key


class _SignedAnnouncement(_Announcement):
    proof: Signature


class ServerKeys(Record):
    """Keys and names that the server has; none of them decrypts an update. ``senders`` are the Ed25519 public keys of
    the silos, ``administrator`` is the issuer's.
    """

    epoch: Epoch
    fingerprint: Fingerprint
    suite: str
    senders: dict[Name, Key]
    administrator: Key

    @classmethod
    def of(cls, group: GroupKey) -> ServerKeys:
        senders = {name: member.signing for name, member in group.members.items()}
        epoch, fingerprint, issuer = group.epoch, group.fingerprint, group.administrator
        return cls(epoch=epoch, fingerprint=fingerprint, suite=SUITE, senders=senders, administrator=issuer)


class _ServerFile(ServerKeys):
    signature: Signature


def announce(keys: SiloKeys) -> str:
    """Encode a silo's public keys as a line of JSON for the administrator; signed, so that damage is noticed."""
    public = keys.public
    body = _Announcement(silo=keys.name, exchange=public.exchange, signing=public.signing)
    proof = keys.sign(_LINE, body.canonical())
    return _SignedAnnouncement(**dict(body), proof=proof).model_dump_json()


def read_announcement(line: bytes, source: str) -> tuple[str, PublicKeys]:
    """Read name and public keys from a line of `announce`; `ConfigError` if the line was changed. Only people can check
    whether the keys are that silo's.
    """
    remedy = "Ask the silo for the line of `fedsync keys silo`, and copy it whole"
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(source, f"{len(line)} bytes, at most {MAX_LINE_BYTES}", remedy)
    try:
        found = _SignedAnnouncement.read(line)
    except ValueError as error:
        raise ConfigError(source, f"not what `fedsync keys silo` prints: {error}", remedy) from None
    public = PublicKeys(found.exchange, found.signing)
    if not public.usable:
        raise ConfigError(source, f"{found.silo!r} has an invalid exchange key", remedy)
    body = _Announcement(**found.model_dump(exclude={"proof"}))
    if not is_signed(public.signing, _LINE, body.canonical(), found.proof):
        raise ConfigError(source, f"the line of {found.silo!r} was changed in transit", remedy)
    return found.silo, public


def wrap(group: GroupKey, name: str, signing: bytes) -> bytes:
    recipient = group.members[name].exchange
    members, fingerprint = dict(group.members), group.fingerprint
    header = _Header(silo=name, epoch=group.epoch, suite=SUITE, fingerprint=fingerprint, members=members).canonical()
    ephemeral = X25519PrivateKey.generate()
    public = ephemeral.public_key().public_bytes_raw()
    shared = ephemeral.exchange(X25519PublicKey.from_public_bytes(recipient))
    body = _cipher(shared, public, recipient, header).encrypt(_NONCE, group.key + group.context, header)
    message = _MAGIC + group.administrator + len(header).to_bytes(4, "little") + header + public + body
    return message + sign(signing, _BUNDLE, message)


def unwrap(bundle: bytes, own: SiloKeys, administrator: bytes, held_epoch: int = 0) -> GroupKey:
    """Check a silo's bundle, signed by the pinned ``administrator``, and return its group key. ``held_epoch`` is that
    of the group key that the silo holds; 0 if none. `ProtocolError` at the first failed check.
    """
    message = _signed_part(bundle, administrator)
    # The signature is valid: everything below is as the administrator wrote it.
    end = _HEAD_BYTES + int.from_bytes(message[_HEAD_BYTES - 4 : _HEAD_BYTES], "little")
    head, public, body = message[_HEAD_BYTES:end], message[end : end + KEY_BYTES], message[end + KEY_BYTES :]
    try:
        header = _Header.read(head)
    except ValueError as error:
        raise ProtocolError(_SENDER, "header", f"not one that this version reads: {error}") from None
    members = header.members
    if header.suite != SUITE:
        raise ProtocolError(_SENDER, "suite", f"{header.suite!r}, this version uses {SUITE!r}")
    if header.silo != own.name:
        raise ProtocolError(_SENDER, "silo", f"the bundle is for {header.silo!r}, this is {own.name!r}")
    if members.get(own.name) != own.public:
        raise ProtocolError(_SENDER, "silo key", f"wrapped for a key of {own.name!r} that this silo does not have")
    if header.epoch <= held_epoch:
        detail = f"the bundle has epoch {header.epoch}, but this silo already has epoch {held_epoch}"
        raise ProtocolError(_SENDER, "epoch", detail)
    try:
        shared = X25519PrivateKey.from_private_bytes(own.exchange).exchange(X25519PublicKey.from_public_bytes(public))
        secret = _cipher(shared, public, own.public.exchange, head).decrypt(_NONCE, body, head)
    except (InvalidTag, ValueError):
        secret = b""
    if len(secret) <= KEY_BYTES:
        raise ProtocolError(_SENDER, "wrapping", "the secret cannot be decrypted with this silo's key")
    group = GroupKey(header.epoch, secret[KEY_BYTES:], secret[:KEY_BYTES], members, administrator)
    if group.fingerprint != header.fingerprint:
        raise ProtocolError(_SENDER, "fingerprint", "the secret is not the one that the header names")
    return group


def _signed_part(bundle: bytes, administrator: bytes) -> bytes:
    if not _HEAD_BYTES + SIGNATURE_BYTES <= len(bundle) <= MAX_BUNDLE_BYTES or not bundle.startswith(_MAGIC):
        raise ProtocolError(_SENDER, "bundle", f"{len(bundle)} bytes are no key bundle")
    signer = bundle[len(_MAGIC) : len(_MAGIC) + KEY_BYTES]
    if signer != administrator:
        detail = f"signed by {signer.hex()}, pinned is {administrator.hex()}"
        raise ProtocolError(_SENDER, "administrator", detail)
    message, signature = bundle[:-SIGNATURE_BYTES], bundle[-SIGNATURE_BYTES:]
    if not is_signed(administrator, _BUNDLE, message, signature):
        raise ProtocolError(_SENDER, "signature", "the bundle was changed or truncated in transit")
    return message


def _cipher(shared: bytes, ephemeral: bytes, recipient: bytes, header: bytes) -> AESGCM:
    """Wrapping cipher. Its key is used once, so its nonce may be constant."""
    info = b"fedsync key wrap 1\0" + hashlib.sha256(header).digest()
    return AESGCM(hkdf(shared, ephemeral + recipient, info))


def server_file(server: ServerKeys, signing: bytes) -> bytes:
    return _ServerFile(**dict(server), signature=sign(signing, _SERVER, server.canonical())).canonical()


def read_server_file(data: bytes, source: str, administrator: bytes | None = None) -> ServerKeys:
    """Read the server's file, signed by ``administrator`` or, if None, by the key in the file. `ConfigError` if the
    file is damaged, or of another version or administrator.
    """
    remedy = "Copy the server.json that `fedsync keys issue` wrote"
    try:
        found = _ServerFile.read(data)
    except ValueError as error:
        raise ConfigError(source, f"not the server's key file: {error}", remedy) from None
    server = ServerKeys(**found.model_dump(exclude={"signature"}))
    if administrator is not None and server.administrator != administrator:
        raise ConfigError(source, f"signed by {server.administrator.hex()}, not by the administrator", remedy)
    if not is_signed(server.administrator, _SERVER, server.canonical(), found.signature):
        raise ConfigError(source, "its signature is wrong: it was changed", remedy)
    if server.suite != SUITE:
        raise ConfigError(source, f"for {server.suite!r}, this version uses {SUITE!r}", remedy)
    return server
