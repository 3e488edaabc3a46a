"""Questions of the server and answers of silos that remove the masks from a sum.

    sign       context, survivors: by name the stub of the annex of the update that is in the sum
    reveal     context, signatures of that list by name, annexes of those survivors that are lost by name
    signed     context, signature [64]
    revealed   context, own seeds, shares of the seeds of each lost survivor by name

All are `fedsync.cipher.masking.frames`; the first frame is the word in the left column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsync.cipher.encoding.fields import ANNEX_HEAD
from fedsync.cipher.keys.material import SIGNATURE_BYTES, PublicKeys, SiloKeys, is_signed
from fedsync.cipher.masking.annex import CONTEXT_BYTES, DIGEST_BYTES, SHARE_BYTES, Seeds
from fedsync.cipher.masking.frames import pack, pack_named, unpack, unpack_named
from fedsync.cipher.masking.masked_work import WorkDone
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.transfer import Payload

_SIGN, _REVEAL, _SIGNED, _REVEALED = b"sign", b"reveal", b"signed", b"revealed"
_LIST = b"mask survivors 3"
_STUB_BYTES = ANNEX_HEAD + DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Survivors:
    """List that survivors sign: the silos in the sum, with the stubs of their annexes (`annex_stub`) by name.

    An annex has the commitment to a seed that was drawn for this update alone, so a list refers to these very updates.
    """

    context: bytes
    annexes: Mapping[str, bytes]

    def _text(self) -> bytes:
        return pack([self.context, pack_named(self.annexes)])

    def works(self) -> list[WorkDone]:
        """Work behind each update; raise `ProtocolError` if a stub is malformed or has another context."""
        heads = [unpack(stub[:ANNEX_HEAD], SERVER, 2) for stub in self.annexes.values()]
        if any(context != self.context for context, _ in heads):
            raise ProtocolError(SERVER, "survivors", "an update with masks of another context is in the list")
        return [WorkDone.unpack(work, SERVER) for _, work in heads]

    def sign(self, own: SiloKeys) -> bytes:
        return own.sign(_LIST, self._text())

    def signed_by(self, signing: bytes, signature: bytes) -> bool:
        return is_signed(signing, _LIST, self._text(), signature)

    def check(self, signatures: Mapping[str, bytes], keys: Mapping[str, PublicKeys], threshold: int) -> None:
        """Check that enough survivors, and nobody else, signed this list; raise `ProtocolError` otherwise."""
        if len(signatures) < threshold:
            raise ProtocolError(SERVER, "survivors", f"{len(signatures)} signatures, {threshold} are needed")
        for name, signature in signatures.items():
            if name not in self.annexes or not self.signed_by(keys[name].signing, signature):
                raise ProtocolError(SERVER, "survivors", f"{name!r} did not sign the same list")


@dataclass(frozen=True, slots=True)
class SignQuestion:
    """Request to sign the list of silos in a sum."""

    survivors: Survivors

    @property
    def context(self) -> bytes:
        return self.survivors.context

    def encode(self) -> Payload:
        return _payload(_SIGN, self.context, pack_named(self.survivors.annexes))


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
    """Signature of the list, 64 bytes."""

    context: bytes
    signature: bytes

    def encode(self) -> Payload:
        return _payload(_SIGNED, self.context, self.signature)


@dataclass(frozen=True, slots=True)
class RevealAnswer:
    """Seeds that a survivor reveals: its own, its pair seeds with silos that dropped out, and ``shares`` of the same
    two kinds of seeds of lost survivors, by name.
    """

    context: bytes
    seeds: Seeds
    shares: Mapping[str, Seeds]

    def encode(self) -> Payload:
        shares = {name: one.pack() for name, one in self.shares.items()}
        return _payload(_REVEALED, self.context, self.seeds.pack(), pack_named(shares))


def read_question(payload: Payload) -> SignQuestion | RevealQuestion:
    """Parse the server's question, or raise `ProtocolError`."""
    match _frames(payload, SERVER):
        case [kind, context, annexes] if kind == _SIGN:
            return SignQuestion(Survivors(context, unpack_named(annexes, SERVER, _STUB_BYTES)))
        case [kind, context, signatures, lost] if kind == _REVEAL:
            named = unpack_named(signatures, SERVER, SIGNATURE_BYTES)
            return RevealQuestion(context, named, unpack_named(lost, SERVER))
    raise ProtocolError(SERVER, "question", "not a question about masks")


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
    return np.frombuffer(pack(frames), dtype=np.uint8)


def _frames(payload: Payload, sender: str) -> list[bytes]:
    """Frames of a message; the second is a context."""
    if payload.dtype != np.uint8 or payload.ndim != 1:
        raise ProtocolError(sender, "masks", f"{payload.dtype} {payload.shape} instead of bytes")
    frames = unpack(payload.tobytes(), sender)
    if len(frames) < 2 or len(frames[1]) != CONTEXT_BYTES:
        raise ProtocolError(sender, "masks", "a message that is about no masks")
    return frames
