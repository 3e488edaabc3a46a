"""Masks inside the encryption: so that server and one silo together see no single update.

All silos share one secret key, so a server that has a silo on its side could decrypt every update. With masks, what
it decrypts is uniform. Before encryption, silo i of a cohort adds to its slots, modulo t,

    a self mask from a seed b_i that it drew itself, and for every other silo j of the cohort
    a pair mask from a seed s_ij that only the two can compute: plus if i < j, minus otherwise.

In the sum of the whole cohort the pair masks cancel. When the server has the updates of the *survivors*, each of
them signs their names; and once it has seen that all survivors signed the same names, it *reveals* its own b_i, and
its s_id with every silo d that dropped out. Every silo can then take the rest of the masks off the sum. Nobody
reveals both kinds for one silo: b_i is revealed by i alone and only if it survived, s_id only if d did not, and all
signed one list. Who disappears between upload and reveal costs another attempt of the round, with fresh seeds.

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", section 4,
with a repeated round in place of secret sharing.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.keys.material import KEY_BYTES, PublicKeys, SiloKeys, is_signed
from fedsync.cipher.suites.pad import Numbers
from fedsync.cipher.suites.suite import BFV_PLAIN, Form, Member, Sealer, Words
from fedsync.core.errors import PolicyError, ProtocolError

MIN_SURVIVORS = 3
"""With two, each would learn the other's update from the sum."""

_SIGNED = b"mask survivors 1"


@dataclass(frozen=True, slots=True)
class Reveal:
    """What a survivor tells so that the masks come off the sum.

    Args:
        silo: who.
        own: seed of its self mask, 32 bytes.
        pairs: seeds that it shares with silos that dropped out.
    """

    silo: str
    own: bytes = field(repr=False)
    pairs: Mapping[str, bytes] = field(repr=False)


class MaskRound:
    """One silo's part in one attempt of one round. Its masks blind one update, once, and none after it signed.

    The self mask is drawn here. The pair masks follow from the keys and the context, so nobody may make a second round
    with both the same: see `fedsync.cipher.masking.mask_log`.

    Args:
        own: the silo's keys.
        cohort: public keys of all silos that take part, this one included.
        context: what names the attempt: key epoch, round, number of the attempt; the same at every silo.

    Raises:
        ValueError: the silo is not in the cohort, or under another key.
    """

    def __init__(self, own: SiloKeys, cohort: Mapping[str, PublicKeys], context: bytes) -> None:
        if cohort.get(own.name) != own.public:
            raise ValueError(f"{own.name!r} is not in the cohort with its own key")
        self._own = own
        self._cohort = dict(cohort)
        self._context = context
        self._self_seed = secrets.token_bytes(KEY_BYTES)
        self._pairs = {
            name: own.agree(keys, b"mask pair 1\0" + context) for name, keys in cohort.items() if name != own.name
        }
        self._survivors: tuple[str, ...] | None = None
        self._masked = 0

    @property
    def _masks(self) -> list[tuple[bytes, bool]]:
        """(seed, added?) of every mask that this silo puts on."""
        pairs = [(seed, self._own.name < name) for name, seed in self._pairs.items()]
        return [(self._self_seed, True), *pairs]

    def mask(self, slots: Slots, first: int = 0) -> Slots:
        """Masked slots, int64 [chunks, 4096], which look uniform within +-t/2.

        Args:
            slots: int64 [chunks, 4096].
            first: number of the first of the chunks; they come in order, each once.

        Raises:
            PolicyError: a mask would be put on twice.
        """
        if first != self._masked or self._survivors is not None:
            raise PolicyError(f"chunk {first} is to be masked after {self._masked}: masks are for one update, once")
        self._masked += len(slots)
        return _masked(slots, self._masks, first)

    def sign(self, survivors: Sequence[str]) -> bytes:
        """Sign the names of those whose updates are in the sum, 64 bytes; one list an attempt.

        Raises:
            ProtocolError: the silo is not among them, they are not of the cohort or too few, or another list was
                signed before.
        """
        names = tuple(sorted(survivors))
        if self._survivors not in (None, names):
            raise ProtocolError("server", "survivors", "asked to sign a second list for one attempt")
        unknown = [name for name in names if name not in self._cohort]
        if unknown or len(set(names)) != len(names) or self._own.name not in names:
            raise ProtocolError("server", "survivors", f"{len(names)} names that are no part of the cohort with us")
        if len(names) < MIN_SURVIVORS:
            raise ProtocolError("server", "survivors", f"{len(names)} silos; their sum would tell too much")
        self._survivors = names
        return self._own.sign(_SIGNED, _list(names, self._context))

    def reveal(self, signatures: Mapping[str, bytes]) -> Reveal:
        """What this silo tells once all survivors signed the list that it signed.

        Raises:
            ProtocolError: a signature is missing or wrong, or nothing was signed here.
        """
        names = self._survivors
        if names is None:
            raise ProtocolError("server", "survivors", "asked to reveal before a list was signed")
        text = _list(names, self._context)
        for name in names:
            if not is_signed(self._cohort[name].signing, _SIGNED, text, signatures.get(name, b"")):
                raise ProtocolError("server", "survivors", f"{name!r} did not sign the same list")
        dropped = {name: seed for name, seed in self._pairs.items() if name not in names}
        return Reveal(self._own.name, self._self_seed, dropped)


class Unmasker:
    """Takes the masks off a sum.

    Args:
        cohort: names of all silos that took part.
        reveals: of every survivor.

    Raises:
        ProtocolError: a reveal is missing, double or of nobody in the cohort, or names other silos than dropped out.
    """

    def __init__(self, cohort: Sequence[str], reveals: Sequence[Reveal]) -> None:
        survivors = {reveal.silo for reveal in reveals}
        if len(survivors) != len(reveals) or not survivors <= set(cohort) or len(survivors) < MIN_SURVIVORS:
            raise ProtocolError("server", "reveals", f"{len(reveals)} reveals are not those of survivors")
        dropped = set(cohort) - survivors
        # What was added is subtracted.
        self._masks: list[tuple[bytes, bool]] = []
        for reveal in reveals:
            seeds = (reveal.own, *reveal.pairs.values())
            if set(reveal.pairs) != dropped or any(len(seed) != KEY_BYTES for seed in seeds):
                raise ProtocolError("server", "reveals", f"{reveal.silo!r} revealed other seeds than were asked for")
            self._masks.append((reveal.own, False))
            self._masks += [(seed, reveal.silo > name) for name, seed in reveal.pairs.items()]
        self.survivors = frozenset(survivors)

    def unmask(self, slots: Slots, first: int = 0) -> Slots:
        """Sums of slots as they were before masking, int64 [chunks, 4096], within +-t/2."""
        return _masked(slots, self._masks, first)


class Masked:
    """A `Sealer` that masks before sealing and unmasks after opening.

    Args:
        inner: `bfv` with the form `MASKED`.
        round: to seal in; None if it only opens.
        unmasker: to open with; None if it only seals.
    """

    def __init__(self, inner: Sealer, round: MaskRound | None = None, unmasker: Unmasker | None = None) -> None:
        self._inner = inner
        self._round = round
        self._unmasker = unmasker

    @property
    def form(self) -> Form:
        return self._inner.form

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        if self._round is None:
            raise PolicyError("masked sealing needs a round")
        return self._inner.seal(self._round.mask(slots, first), member, first)

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        if self._unmasker is None:
            raise PolicyError("opening a masked sum needs the survivors' reveals")
        if {member.update_id.rpartition("/")[0] for member in members} != self._unmasker.survivors:
            raise ProtocolError(sender, "members", "the sum is of other silos than revealed their masks")
        return self._unmasker.unmask(self._inner.open(words, members, first, sender), first)


def _list(names: Sequence[str], context: bytes) -> bytes:
    """What survivors sign; no two lists or contexts make the same bytes."""
    encoded = [name.encode() for name in names]
    parts = [context, *encoded]
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def _masked(slots: Slots, masks: Sequence[tuple[bytes, bool]], first: int) -> Slots:
    """Slots plus or minus masks, modulo t and centred."""
    streams = [(_stream(seed, first), added) for seed, added in masks]
    half, plain = BFV_PLAIN // 2, np.int64(BFV_PLAIN)
    out = np.empty_like(slots)
    # A chunk at a time stays in the cache, whatever the number of masks.
    for into, chunk in zip(out, slots, strict=True):
        total = np.remainder(chunk, plain).view(np.uint64)
        for stream, added in streams:
            words = stream.chunk()
            # Fewer than 2^16 numbers below 2^48: no overflow.
            np.add(total, words if added else np.uint64(BFV_PLAIN) - words, out=total)
        np.remainder(total, np.uint64(BFV_PLAIN), out=total)
        np.copyto(into, total.view(np.int64))
        np.subtract(into, plain, out=into, where=into > half)
    return out


def _stream(seed: bytes, first: int) -> Numbers:
    """Numbers below t of one mask, from one chunk on."""
    return Numbers(hmac.digest(seed, b"fedsync mask 1\0slots", "sha256"), BFV_PLAIN, first)
