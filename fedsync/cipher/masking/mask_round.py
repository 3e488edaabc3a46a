"""Secure-aggregation state of one silo for one masked sum, and the messages that remove the masks.

    sign       context | survivors: names, each with the beginning (*stub*) of its update's annex (data for masks)
    reveal     context | by name, signatures of that list | by name, annexes of the survivors that are lost
    signed     context | signature [64]
    revealed   context | the silo's own seed and pair seeds | by name, shares of the seeds of each lost survivor

The server sends ``sign`` and ``reveal``; silos answer ``signed`` and ``revealed``. A message is encoded as `frames`,
with its name (such as ``sign``) as the first frame.

| state | next | by |
|---|---|---|
| fresh | masked | `mask`, chunk after chunk, each once |
| masked | signed | `sign`: one list of survivors, and never a different list |
| signed | signed | `reveal`, with t signatures of that list, as often as requested: own seed, pair seeds with silos |
|  |  | that dropped out, and shares of the same two kinds of seeds of each lost survivor |

At most one list has t signatures, so the two kinds of mask are never both removed from one update.

Masks depend on the *context*, a digest of R (`silo.history`), attempt, roster, and all fields of the order except

| field | reason why the context does not include it |
|---|---|
| update_id, seed, round | each silo has its own; `round` is a number for people, and training code does not get it |
| base_version | the digest D of its history is included |
| batch_size, max_steps, budget_s | the work done is limited (`masked_work`); whether there is a budget is included |

Source: Bonawitz et al. 2017, figure 4, with commitments, and with shares of seeds instead of keys.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedsync.cipher.encoding.fields import ANNEX_HEAD, annex_stub, pack_frames, pack_named, unpack_frames, unpack_named
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.keys.material import KEY_BYTES, SIGNATURE_BYTES, PublicKeys, SiloKeys, is_signed
from fedsync.cipher.masking import annex
from fedsync.cipher.masking.annex import CONTEXT_BYTES, DIGEST_BYTES, SHARE_BYTES, Annex, Seeds
from fedsync.cipher.masking.mask_roster import MaskRoster
from fedsync.cipher.masking.masked_work import WorkDone, comparable
from fedsync.cipher.suites.pad import Numbers
from fedsync.cipher.suites.suite import BFV_PLAIN
from fedsync.common.errors import SERVER, PolicyError, ProtocolError
from fedsync.core.orders import WorkOrder
from fedsync.model.transfer import Payload

_SIGN, _REVEAL, _SIGNED, _REVEALED = b"sign", b"reveal", b"signed", b"revealed"
_LIST = b"mask survivors 3"
_STUB_BYTES = ANNEX_HEAD + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Survivors:
    """List of the silos in the sum, signed by each of these silos, with the stubs of their annexes by name. A stub has
    the commitment to a seed that was drawn for one update alone, so a list refers to these very updates.
    """

    context: bytes
    annexes: Mapping[str, bytes]

    def encode(self) -> Payload:
        return _payload(_SIGN, self.context, pack_named(self.annexes))

    def _text(self) -> bytes:
        return pack_frames([self.context, pack_named(self.annexes)])

    def works(self) -> list[WorkDone]:
        """Work behind each update; `ProtocolError` if a stub is malformed or has another context."""
        heads = [unpack_frames(stub[:ANNEX_HEAD], SERVER, 2) for stub in self.annexes.values()]
        if any(context != self.context for context, _ in heads):
            raise ProtocolError(SERVER, "survivors", "an update with masks of another context is in the list")
        return [WorkDone.unpack(work, SERVER) for _, work in heads]

    def sign(self, own: SiloKeys) -> bytes:
        return own.sign(_LIST, self._text())

    def signed_by(self, signing: bytes, signature: bytes) -> bool:
        return is_signed(signing, _LIST, self._text(), signature)

    def check(self, signatures: Mapping[str, bytes], keys: Mapping[str, PublicKeys], threshold: int) -> None:
        if len(signatures) < threshold:
            raise ProtocolError(SERVER, "survivors", f"{len(signatures)} signatures, {threshold} are needed")
        for name, signature in signatures.items():
            if name not in self.annexes or not self.signed_by(keys[name].signing, signature):
                raise ProtocolError(SERVER, "survivors", f"{name!r} did not sign the same list")


@dataclass(frozen=True, slots=True)
class RevealQuestion:
    """Request to reveal seeds that remove the masks from a signed sum; ``lost`` are annexes of silent survivors."""

    context: bytes
    signatures: Mapping[str, bytes]
    lost: Mapping[str, bytes]

    def encode(self) -> Payload:
        return _payload(_REVEAL, self.context, pack_named(self.signatures), pack_named(self.lost))


@dataclass(frozen=True, slots=True)
class SignAnswer:
    """Answer with the signature of the list, 64 bytes."""

    context: bytes
    signature: bytes

    def encode(self) -> Payload:
        return _payload(_SIGNED, self.context, self.signature)


@dataclass(frozen=True, slots=True)
class RevealAnswer:
    """Seeds of a survivor: its own, pair seeds with silos that dropped out; and shares of lost survivors' seeds."""

    context: bytes
    seeds: Seeds
    shares: Mapping[str, Seeds]

    def encode(self) -> Payload:
        shares = {name: one.pack() for name, one in self.shares.items()}
        return _payload(_REVEALED, self.context, self.seeds.pack(), pack_named(shares))


def read_question(payload: Payload) -> Survivors | RevealQuestion:
    match _frames(payload, SERVER):
        case [kind, context, annexes] if kind == _SIGN:
            return Survivors(context, unpack_named(annexes, SERVER, _STUB_BYTES))
        case [kind, context, signatures, lost] if kind == _REVEAL:
            named = unpack_named(signatures, SERVER, SIGNATURE_BYTES)
            return RevealQuestion(context, named, unpack_named(lost, SERVER))
    raise ProtocolError(SERVER, "question", "not a request about masks")


def read_answer(silo: str, payload: Payload) -> SignAnswer | RevealAnswer:
    match _frames(payload, silo):
        case [kind, context, signature] if kind == _SIGNED and len(signature) == SIGNATURE_BYTES:
            return SignAnswer(context, signature)
        case [kind, context, seeds, shares] if kind == _REVEALED:
            named = unpack_named(shares, silo)
            of = {name: Seeds.unpack(data, silo, SHARE_BYTES) for name, data in named.items()}
            return RevealAnswer(context, Seeds.unpack(seeds, silo), of)
    raise ProtocolError(silo, "answer", "not an answer about masks")


def _payload(*frames: bytes) -> Payload:
    return np.frombuffer(pack_frames(frames), dtype=np.uint8)


def _frames(payload: Payload, sender: str) -> list[bytes]:
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise ProtocolError(sender, "masks", f"{payload.dtype} {payload.shape} instead of bytes")
    frames = unpack_frames(payload.tobytes(), sender)
    if len(frames) < 2 or len(frames[1]) != CONTEXT_BYTES:
        raise ProtocolError(sender, "masks", "a message that is not about masks")
    return frames


def masked(slots: Slots, masks: Sequence[tuple[bytes, bool]], first: int) -> Slots:
    """Add (True) or subtract (False) the masks that seeds expand to, modulo the suite's t and centred."""
    keys = [(hmac.digest(seed, b"fedsync mask 1\0slots", "sha256"), added) for seed, added in masks]
    streams = [(Numbers(key, BFV_PLAIN, first), added) for key, added in keys]
    half, plain = BFV_PLAIN // 2, np.int64(BFV_PLAIN)
    out = np.empty_like(slots)
    # One chunk at a time stays in the cache for any number of masks.
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


OWN = {"update_id", "seed", "round", "base_version", "batch_size", "max_steps", "budget_s"}
"""Fields of an order that the context does not include as they are."""


def mask_context(run: bytes, order: WorkOrder, chain: bytes, attempt: int, roster: MaskRoster) -> bytes:
    """Compute the digest that masks are bound to, 32 bytes. ``run`` is the run's digest, ``chain`` the D of the order's
    base version; ``attempt`` counts from this version.
    """
    names = [field.name for field in dataclasses.fields(order) if field.name not in OWN]
    # A float's repr is exact.
    said = {name: repr(getattr(order, name)).encode() for name in names}
    said["budget"] = str(order.budget_s is None).encode()
    bound = [b"fedsync mask context 3", run, chain, attempt.to_bytes(8, "little"), roster.digest, pack_named(said)]
    return hashlib.sha256(pack_frames(bound)).digest()


_PAIR = b"mask pair 2\0"


def pair_seeds(own: SiloKeys, keys: Mapping[str, PublicKeys], context: bytes) -> dict[str, bytes]:
    """Seeds of the pair masks by name of the other silo; ``own`` has the silo's pair for the run."""
    return {name: own.agree(other, _PAIR + context) for name, other in keys.items() if name != own.name}


class MaskRound:
    """Masks of one silo for one update: they mask one update only, and none after the silo has signed.

    The own mask is drawn here. Pair masks follow from the keys and the context, so a second round with the same keys
    and context must never be made: see `fedsync.cipher.masking.mask_log`. `ProtocolError` if the silo is not in the
    roster with its pair for the run.
    """

    def __init__(self, own: SiloKeys, roster: MaskRoster, context: bytes, work: WorkDone, ratio: float) -> None:
        if roster.keys.get(own.name) != own.public:
            raise ProtocolError(SERVER, "roster", f"{own.name!r} is not in it with the key that it announced")
        self._own, self._roster, self.context = own, roster, context
        self._seeds = Seeds(secrets.token_bytes(KEY_BYTES), pair_seeds(own, roster.keys, context))
        self._ratio = ratio
        self.annex = annex.seal(own, roster.keys, roster.threshold, context, work, self._seeds).pack()
        self._survivors: Survivors | None = None
        self._masked = 0

    def mask(self, slots: Slots, first: int = 0) -> Slots:
        """Mask slots, int64 [chunks, 4096]; the result looks uniform within +-t/2. Chunks come in order, each once."""
        if first != self._masked or self._survivors is not None:
            raise PolicyError(f"chunk {first} follows chunk {self._masked}: masks are for one update only")
        self._masked += len(slots)
        pairs = [(seed, self._own.name < name) for name, seed in self._seeds.pairs.items()]
        return masked(slots, [(self._seeds.own, True), *pairs], first)

    def sign(self, survivors: Survivors) -> bytes:
        """Sign the list of updates in the sum, 64 bytes. Raise `ProtocolError` if this silo's update is not in the
        list; silos are too few or not of the roster; the work of updates differs too much; or another list was signed
        before.
        """
        names = survivors.annexes.keys()
        if self._survivors not in (None, survivors):
            raise ProtocolError(SERVER, "survivors", "asked to sign a second list for one attempt")
        if survivors.context != self.context or not names <= self._roster.keys.keys():
            raise ProtocolError(SERVER, "survivors", f"{len(names)} names that are not in the roster")
        if survivors.annexes.get(self._own.name) != annex_stub(self.annex):
            raise ProtocolError(SERVER, "survivors", "the list lacks the update that this silo encrypted")
        if len(names) < self._roster.least:
            raise ProtocolError(SERVER, "survivors", f"{len(names)} silos; their sum would disclose too much")
        if not comparable(survivors.works(), self._ratio):
            detail = f"one update is more than {self._ratio:g} times the work of another, and would stand out"
            raise ProtocolError(SERVER, "survivors", detail)
        self._survivors = survivors
        return survivors.sign(self._own)

    def reveal(self, question: RevealQuestion) -> RevealAnswer:
        """Reveal seeds and shares that remove the masks. Raise `ProtocolError` if this silo has signed no list, too few
        silos signed the same list, or the annex of a lost silo is not the annex in the list.
        """
        survivors = self._survivors
        if survivors is None:
            raise ProtocolError(SERVER, "survivors", "asked to reveal before a list was signed")
        survivors.check(question.signatures, self._roster.keys, self._roster.threshold)
        dropped = sorted(self._roster.keys.keys() - survivors.annexes.keys())
        shares = {name: self._shares(survivors, name, data).only(dropped) for name, data in question.lost.items()}
        return RevealAnswer(self.context, self._seeds.only(dropped), shares)

    def _shares(self, survivors: Survivors, name: str, data: bytes) -> Seeds:
        if survivors.annexes.get(name) != annex_stub(data) or name == self._own.name:
            raise ProtocolError(SERVER, "shares", f"the annex of {name!r} is not the one in the list")
        of = Annex.unpack(data, name, SERVER)
        if of.context != self.context or of.pairs.keys() | {name} != self._roster.keys.keys():
            raise ProtocolError(SERVER, "shares", f"the annex of {name!r} is of another context")
        return annex.open_shares(of, name, self._roster.keys[name], self._own)
