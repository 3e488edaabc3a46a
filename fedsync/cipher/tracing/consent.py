"""An owner's consent that a silo examines single updates of one version: a signed statement in a small file.

It names group, key epoch, run, version and what that added, so it is good for nothing else; and it names who may
examine, several perhaps, for one of them may be who is looked for. The silo's long-lived key signs it.

Under masks the group key opens no single update. There a consent has the seeds of the masks that the silo shares with
each other one in this version, for each examiner sealed to its public key: those of one update, and no key. The seed of
the silo's own mask was revealed with the sum.

*How many must consent*: more than half of all that have a key, and no fewer than the updates that a version of the run
must have. How many have a key is the administrator's word and not the server's; no two groups of silos that have
nobody in common can both be a majority; and owners who let nobody see a sum of fewer than m updates do not have single
ones shown on the word of fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from pydantic import Field

from fedsync.cipher.keys.key_files import Epoch, Fingerprint, Key, Name, Record, Signature
from fedsync.cipher.keys.material import KEY_BYTES, PublicKeys, SiloKeys, is_signed
from fedsync.cipher.masking.frames import pack_named, unpack_named
from fedsync.cipher.masking.mask_roster import fresh_pair
from fedsync.cipher.tracing.notice import Matter
from fedsync.common.errors import ProtocolError

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
    """One owner's; ``masks`` are the seeds for each examiner, where there are any."""

    signature: Signature

    @property
    def matter(self) -> Matter:
        return Matter(self.group, self.epoch, self.run, self.version, self.content)

    def signed_by(self, signing: bytes) -> bool:
        """Whether the signature is that of this Ed25519 key."""
        body = _Unsigned.model_validate(self.model_dump(exclude={"signature"}))
        return is_signed(signing, _SIGNED, body.canonical(), self.signature)

    def pair_seeds(self, own: SiloKeys) -> dict[str, bytes]:
        """Seeds of the silo's masks with others, by their names; none if there are none for this examiner.

        Args:
            own: the examiner's keys.

        Raises:
            ProtocolError: they do not open.
        """
        sealed = self.masks.get(own.name)
        if sealed is None:
            return {}
        ephemeral, text = PublicKeys(sealed[:KEY_BYTES].ljust(KEY_BYTES, b"\0"), own.public.signing), sealed[KEY_BYTES:]
        about = _Statement.model_validate(self.model_dump(exclude={"signature", "masks"})).canonical()
        try:
            data = AESGCM(own.agree(ephemeral, _SEALED)).decrypt(_NONCE, text, about)
        except (InvalidTag, ValueError):
            raise ProtocolError(self.silo, "consent", "its masks do not open with this silo's key") from None
        return unpack_named(data, self.silo, KEY_BYTES)


def give_consent(
    own: SiloKeys, matter: Matter, examiners: Mapping[str, PublicKeys], pairs: Mapping[str, bytes] | None = None
) -> Consent:
    """A consent of this silo's owner.

    Args:
        own: the silo's long-lived keys.
        matter: what is to be examined.
        examiners: who may, with their long-lived keys.
        pairs: seeds of the silo's masks with others in this version, by their names; None where there are none.
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
        # Used once, so the nonce may be constant; and what is at rest later opens nothing.
        ephemeral = fresh_pair(own)
        text = AESGCM(ephemeral.agree(keys, _SEALED)).encrypt(_NONCE, pack_named(pairs or {}), statement.canonical())
        masks[name] = ephemeral.public.exchange + text
    body = _Unsigned(**dict(statement), masks=masks)
    return Consent(**dict(body), signature=own.sign(_SIGNED, body.canonical()))


def needed(silos: int, members: int) -> int:
    """Consents without which nothing is examined.

    Args:
        silos: that have a key.
        members: least number of updates of a version.
    """
    return max(silos // 2 + 1, members)


@dataclass(frozen=True, slots=True)
class Consents:
    """Those of a version that count.

    Args:
        by_silo: one of each silo.
        refused: why each of the others does not count.
    """

    by_silo: Mapping[str, Consent]
    refused: tuple[str, ...]

    @classmethod
    def read(
        cls, files: Iterable[tuple[str, bytes]], matter: Matter, senders: Mapping[str, bytes], examiner: str
    ) -> Consents:
        """Sort out what counts.

        Args:
            files: what each is called in errors, and its bytes.
            matter: that is to be examined.
            senders: Ed25519 public keys of all silos of the group; no two have one.
            examiner: who is to examine.
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
        """Check that there are enough; arguments as of `needed`.

        Raises:
            ProtocolError: there are not.
        """
        wanted = needed(silos, members)
        if len(self.by_silo) < wanted:
            detail = f"{len(self.by_silo)} of {silos} silos' owners consent, {wanted} must"
            raise ProtocolError("the set of consents", "number", "; ".join([detail, *self.refused]))


def _read(data: bytes, source: str, matter: Matter, senders: Mapping[str, bytes], examiner: str) -> Consent:
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
