"""Owner's consent that a silo examines single updates of one version: a signed statement in a small file.

The consent names group, key epoch, run, version and the version's additions, so it is valid for nothing else. It also
names the examiners, silos that may search for the bad update. There may be several examiners, because one examiner may
itself have sent the bad update. The silo's long-lived key signs the consent.

Under masks, the group key opens no single update. A consent then has the seeds of the masks that the silo shares with
each other silo in this version, sealed to each examiner's public key. So the consent discloses seeds of one update, and
no key. The seed of the silo's own mask was revealed with the sum.

*Required consents*: more than half of all silos with a key, and at least as many as a version of the run must have
updates. The administrator, not the server, decides how many silos have a key. Two groups of silos without a common
member cannot both be a majority. If nobody may see a sum of fewer than m updates, fewer than m consents must not be
enough to see single updates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import Field

from fedsync.cipher.encoding.fields import pack_named, unpack_named
from fedsync.cipher.keys.key_files import Epoch, Fingerprint, Key, Name, Record, Signature
from fedsync.cipher.keys.material import KEY_BYTES, PublicKeys, SiloKeys, is_signed
from fedsync.cipher.masking.mask_roster import fresh_pair
from fedsync.common.errors import ProtocolError
from fedsync.extras.tracing.notice import TraceSubject

MAX_CONSENT_BYTES = 2**20
_SIGNED, _SEALED = b"consent 1", b"consent masks 1\0"
_NONCE = bytes(12)


class _Statement(Record):
    kind: Literal["fedsync consent 1"] = "fedsync consent 1"
    group: Fingerprint
    epoch: Epoch
    run: Annotated[str, Field(min_length=1, max_length=200)]
    version: Annotated[int, Field(ge=0, lt=2**63)]
    content: Key
    silo: Name
    examiners: Annotated[tuple[Name, ...], Field(min_length=1, max_length=16)]


class _Unsigned(_Statement):
    masks: dict[Name, bytes]


class Consent(_Unsigned):
    """Consent of one owner; ``masks`` are the sealed seeds for each examiner, if any."""

    signature: Signature

    @property
    def matter(self) -> TraceSubject:
        return TraceSubject(self.group, self.epoch, self.run, self.version, self.content)

    def signed_by(self, signing: bytes) -> bool:
        body = _Unsigned.model_validate(self.model_dump(exclude={"signature"}))
        return is_signed(signing, _SIGNED, body.canonical(), self.signature)

    def pair_seeds(self, own: SiloKeys) -> dict[str, bytes]:
        """Decrypt the mask seeds for an examiner (``own``), by silo; empty without any. `ProtocolError` on failure."""
        sealed = self.masks.get(own.name)
        if sealed is None:
            return {}
        ephemeral, text = PublicKeys(sealed[:KEY_BYTES].ljust(KEY_BYTES, b"\0"), own.public.signing), sealed[KEY_BYTES:]
        about = _Statement.model_validate(self.model_dump(exclude={"signature", "masks"})).canonical()
        try:
            data = AESGCM(own.agree(ephemeral, _SEALED)).decrypt(_NONCE, text, about)
        except (InvalidTag, ValueError):
            raise ProtocolError(self.silo, "consent", "its masks cannot be decrypted with this silo's key") from None
        return unpack_named(data, self.silo, KEY_BYTES)


def give_consent(
    own: SiloKeys, matter: TraceSubject, examiners: Mapping[str, PublicKeys], pairs: Mapping[str, bytes] | None = None
) -> Consent:
    """Make a consent of this silo's owner.

    Args:
        own: the silo's long-lived keys.
        examiners: long-lived keys of the allowed examiners.
        pairs: seeds of the silo's masks with others in this version, by their names; None without masks.
    """
    statement = _Statement(
        group=matter.group,
        epoch=matter.epoch,
        run=matter.run,
        version=matter.version,
        content=matter.content,
        silo=own.name,
        examiners=tuple(examiners),
    )
    masks = {}
    for name, keys in examiners.items() if pairs is not None else ():
        # A fresh pair is used once, so the nonce may be constant; keys stolen from this silo later open nothing.
        ephemeral = fresh_pair(own)
        text = AESGCM(ephemeral.agree(keys, _SEALED)).encrypt(_NONCE, pack_named(pairs or {}), statement.canonical())
        masks[name] = ephemeral.public.exchange + text
    body = _Unsigned(**dict(statement), masks=masks)
    return Consent(**dict(body), signature=own.sign(_SIGNED, body.canonical()))


def needed(silos: int, members: int) -> int:
    """Number of consents required; ``silos`` have a key, ``members`` is the least number of updates of a version."""
    return max(silos // 2 + 1, members)


@dataclass(frozen=True, slots=True)
class Consents:
    """Valid consents for a version, by silo, and the reason why each other consent is invalid (``refused``)."""

    by_silo: Mapping[str, Consent]
    refused: tuple[str, ...]

    @classmethod
    def read(
        cls, files: Iterable[tuple[str, bytes]], matter: TraceSubject, senders: Mapping[str, bytes], examiner: str
    ) -> Consents:
        """Sort out the consents that count.

        Args:
            files: name in error messages and bytes of each file.
            senders: Ed25519 public keys of all silos of the group; no two share a key.
            examiner: name of the examining silo.
        """
        found: dict[str, Consent] = {}
        refused = []
        for source, data in files:
            try:
                consent = _read(data, source, matter, senders, examiner)
                found.setdefault(consent.silo, consent)
            except ProtocolError as error:
                refused.append(str(error))
        return cls(found, tuple(refused))

    def check(self, silos: int, members: int) -> None:
        """Check that there are enough consents, or raise `ProtocolError`; arguments as in `needed`."""
        wanted = needed(silos, members)
        if len(self.by_silo) < wanted:
            detail = f"{len(self.by_silo)} of {silos} silos' owners consent, {wanted} must"
            raise ProtocolError("the set of consents", "number", "; ".join([detail, *self.refused]))


def _read(data: bytes, source: str, matter: TraceSubject, senders: Mapping[str, bytes], examiner: str) -> Consent:
    if len(data) > MAX_CONSENT_BYTES:
        raise ProtocolError(source, "consent", f"{len(data)} bytes, at most {MAX_CONSENT_BYTES}")
    try:
        consent = Consent.read(data)
    except ValueError as error:
        raise ProtocolError(source, "consent", str(error)) from None
    if consent.silo not in senders:
        raise ProtocolError(source, "consent", f"{consent.silo!r} has no key of this group")
    if not consent.signed_by(senders[consent.silo]):
        raise ProtocolError(source, "consent", f"not signed by {consent.silo!r}, or changed")
    if consent.matter != matter:
        about = f"version {consent.version} of run {consent.run}, key epoch {consent.epoch}"
        raise ProtocolError(source, "consent", f"of {consent.silo!r} to something else: {about}, or to other updates")
    if examiner not in consent.examiners:
        named = ", ".join(consent.examiners)
        raise ProtocolError(source, "consent", f"{consent.silo!r} consents to examination by {named} only")
    return consent
