"""Annex of a masked update: commitments to the seeds of its `masks`, and secret shares of the seeds for other silos.

    context [32] | work [32] | commitment to the own seed [32] | by name of each other silo that masks: commitment
    to the pair seed [32] | by name of each of these silos: its encrypted shares: nonce [12], AES-GCM ciphertext

The parts are encoded as `frames`. A *commitment* is the SHA-256 of a seed. *Work* states steps and samples
(`masked_work`). The annex's digest covers context, work and the SHA-256 of the rest. The update's tag and signature
cover the digest. A seed that is revealed later is accepted only if it fits its commitment.

Every seed is split into *shares*. Each other silo gets one share of the own seed, then one of each pair seed by name.
The shares are encrypted with a key from the context and the two silos' key pairs for the run. A seed is the value at 0
of a polynomial with fresh uniform coefficients modulo a prime above 2^256. Holder x has the value at x. Fewer than
``threshold`` shares disclose nothing. A changed share yields a wrong seed, which only the commitment reveals.

Source: Shamir 1979, "How to share a secret".
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedsync.cipher.encoding.fields import pack_frames, pack_named, unpack_frames, unpack_named
from fedsync.cipher.keys.material import PublicKeys, SiloKeys
from fedsync.cipher.masking.masked_work import WorkDone
from fedsync.common.errors import SERVER, ProtocolError

CONTEXT_BYTES = DIGEST_BYTES = 32
_NONCE_BYTES, _TAG_BYTES = 12, 16

SECRET_BYTES = 32
PRIME = 2**256 + 297
"""The smallest prime above 2^256: every secret of 32 bytes is below it."""

SHARE_BYTES = 33


def split(
    secret: bytes, threshold: int, holders: Iterable[int], draw: Callable[[int], int] = secrets.randbelow
) -> dict[int, bytes]:
    """Split a secret of 32 bytes into shares of 33 bytes by holder (a number from 1 on); ``threshold`` of them restore
    it. ``draw`` returns a uniform number below its argument. `ValueError` if a number or a length is not allowed.
    """
    numbers = list(holders)
    if len(secret) != SECRET_BYTES or threshold < 1 or not all(0 < number < PRIME for number in numbers):
        raise ValueError(f"a secret of {SECRET_BYTES} bytes, a threshold and holders from 1 on are needed")
    coefficients = [int.from_bytes(secret, "little"), *(draw(PRIME) for _ in range(threshold - 1))]
    values = {number: sum(c * pow(number, n, PRIME) for n, c in enumerate(coefficients)) for number in numbers}
    return {number: (value % PRIME).to_bytes(SHARE_BYTES, "little") for number, value in values.items()}


def join(shares: Mapping[int, bytes]) -> bytes:
    """Reconstruct the secret, 32 bytes, from ``threshold`` shares by holder; `ValueError` if they do not fit."""
    values = {holder: int.from_bytes(share, "little") for holder, share in shares.items()}
    secret = 0
    for holder, value in values.items():
        above, below = 1, 1
        for other in values:
            if other != holder:
                above, below = above * other % PRIME, below * (other - holder) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    if not shares or secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError(f"{len(shares)} shares that belong to no secret")
    return secret.to_bytes(SECRET_BYTES, "little")


def commitment(seed: bytes) -> bytes:
    return hashlib.sha256(b"fedsync mask seed 1" + seed).digest()


@dataclass(frozen=True, slots=True)
class Seeds:
    """Seeds of one silo's masks: its own mask, and pair masks by name; or one holder's shares of these seeds."""

    own: bytes = field(repr=False)
    pairs: Mapping[str, bytes] = field(repr=False)

    def only(self, names: Sequence[str]) -> Seeds:
        return Seeds(self.own, {name: self.pairs[name] for name in names})

    def pack(self) -> bytes:
        return pack_frames([self.own, pack_named(self.pairs)])

    @classmethod
    def unpack(cls, data: bytes, sender: str, size: int = SECRET_BYTES) -> Seeds:
        own, pairs = unpack_frames(data, sender, 2)
        if len(own) != size:
            raise ProtocolError(sender, "masks", f"a seed of {len(own)} bytes, not {size}")
        return cls(own, unpack_named(pairs, sender, size))


@dataclass(frozen=True, slots=True)
class Annex:
    """Decoded annex; the module describes its format."""

    context: bytes
    work: WorkDone
    own: bytes
    pairs: Mapping[str, bytes]
    sealed: Mapping[str, bytes]

    def pack(self) -> bytes:
        return pack_frames([self.context, self.work.pack(), self.own, pack_named(self.pairs), pack_named(self.sealed)])

    @classmethod
    def unpack(cls, data: bytes, silo: str, sender: str) -> Annex:
        context, work, own, pairs, sealed = unpack_frames(data, sender, 5)
        names = unpack_named(pairs, sender, DIGEST_BYTES)
        size = _NONCE_BYTES + SHARE_BYTES * (len(names) + 1) + _TAG_BYTES
        annex = cls(context, WorkDone.unpack(work, sender), own, names, unpack_named(sealed, sender, size))
        lengths = (len(context), len(own)) == (CONTEXT_BYTES, DIGEST_BYTES)
        if not lengths or silo in names or names.keys() != annex.sealed.keys():
            raise ProtocolError(sender, "annex", f"the parts of the annex of {silo!r} do not match")
        return annex

    def check(self, seeds: Seeds, dropped: set[str], sender: str) -> None:
        """Check the own seed and the pair seeds with ``dropped`` silos; `ProtocolError` if a commitment differs."""
        told = {name: commitment(seed) for name, seed in seeds.pairs.items()}
        if told.keys() != dropped or not dropped <= self.pairs.keys() or commitment(seeds.own) != self.own:
            raise ProtocolError(sender, "reveals", "the seeds differ from the requested seeds, or from the commitments")
        if any(told[name] != self.pairs[name] for name in told):
            raise ProtocolError(sender, "reveals", "a pair's seed differs from its commitment")


def seal(
    own: SiloKeys, roster: Mapping[str, PublicKeys], threshold: int, context: bytes, work: WorkDone, seeds: Seeds
) -> Annex:
    """Make the annex of one update; ``own`` and ``roster`` (all silos) have the pairs for the run."""
    holders = {name: number for number, name in enumerate(sorted(roster), 1)}
    names = sorted(seeds.pairs)
    shares = [split(seed, threshold, holders.values()) for seed in (seeds.own, *(seeds.pairs[name] for name in names))]
    sealed = {}
    for name in names:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        text = b"".join(one[holders[name]] for one in shares)
        key = _key(own, own.name, name, roster[name], context)
        sealed[name] = nonce + AESGCM(key).encrypt(nonce, text, None)
    commitments = {name: commitment(seed) for name, seed in seeds.pairs.items()}
    return Annex(context, work, commitment(seeds.own), commitments, sealed)


def open_shares(annex: Annex, dealer: str, keys: PublicKeys, own: SiloKeys) -> Seeds:
    """Decrypt this silo's shares of the dealer's seeds; `ProtocolError` if they are of another silo or context."""
    sealed = annex.sealed.get(own.name, b"")
    key = _key(own, dealer, own.name, keys, annex.context)
    try:
        text = AESGCM(key).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
    except (InvalidTag, ValueError):
        raise ProtocolError(SERVER, "shares", f"the shares of {dealer!r} are not for this silo") from None
    parts = [text[at : at + SHARE_BYTES] for at in range(0, len(text), SHARE_BYTES)]
    return Seeds(parts[0], dict(zip(sorted(annex.pairs), parts[1:], strict=True)))


def _key(own: SiloKeys, dealer: str, holder: str, other: PublicKeys, context: bytes) -> bytes:
    return own.agree(other, b"mask shares 1\0" + pack_frames([context, dealer.encode(), holder.encode()]))
