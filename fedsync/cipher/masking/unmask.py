"""The server's part in taking masks off a sum: it carries lists, signatures and seeds between silos, and has no key.

Two questions go to every silo whose update is in the sum: sign the names of all of them; then, once everybody signed
one list, reveal the seeds that take the masks off. Whoever does not answer cannot be done without: the sum stays
closed, the commit brings nothing, and the next round begins from the model as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsync.cipher.keys.material import KEY_BYTES, SIGNATURE_BYTES
from fedsync.cipher.masking.masks import Reveal
from fedsync.core.errors import ProtocolError
from fedsync.core.transfer import Payload

MAX_ANSWER_BYTES = 2**20
"""A reveal has 64 characters for each silo that dropped out."""


@dataclass(frozen=True, slots=True)
class UnmaskQuestion:
    """What a silo is asked.

    Args:
        base: version that the updates in the sum started from.
        attempt: of the round from this version, see `fedsync.cipher.masking.attempts`.
        survivors: names of the silos whose updates are in it; to be signed if there are no signatures.
        signatures: of all of them, by name; then seeds are to be revealed.
    """

    base: int
    attempt: int
    survivors: tuple[str, ...]
    signatures: Mapping[str, bytes] | None = None

    def encode(self) -> Payload:
        """JSON, uint8 [bytes]."""
        signatures = None
        if self.signatures is not None:
            signatures = {name: signature.hex() for name, signature in self.signatures.items()}
        value = {"base": self.base, "attempt": self.attempt, "survivors": self.survivors, "signatures": signatures}
        return _packed(value)

    @classmethod
    def decode(cls, payload: Payload) -> UnmaskQuestion:
        """The inverse of `encode`.

        Raises:
            ProtocolError: the server sent something else.
        """
        try:
            value = _unpacked(payload, "server")
            given = value["signatures"]
            signatures = None if given is None else {str(k): bytes.fromhex(v) for k, v in given.items()}
            survivors = tuple(str(name) for name in value["survivors"])
            return cls(int(value["base"]), int(value["attempt"]), survivors, signatures)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProtocolError("server", "question", f"not a question about masks: {error!r}") from error


class Unmasking:
    """Collects what opens one masked sum.

    Args:
        base: version that its updates started from.
        attempt: of the round from this version.
        survivors: names of the silos whose updates are in it.
    """

    def __init__(self, base: int, attempt: int, survivors: tuple[str, ...]) -> None:
        self.base = base
        self.attempt = attempt
        self.survivors = survivors
        self._signatures: dict[str, bytes] = {}
        self._reveals: dict[str, Reveal] = {}
        self._asked: set[tuple[str, bool]] = set()

    def questions(self) -> dict[str, Payload]:
        """What is to be asked now, by silo; each question comes up once."""
        signed = len(self._signatures) == len(self.survivors)
        question = UnmaskQuestion(
            self.base, self.attempt, self.survivors, self._signatures if signed else None
        ).encode()
        due = [name for name in self.survivors if (name, signed) not in self._asked]
        self._asked.update((name, signed) for name in due)
        return dict.fromkeys(due, question)

    def answer(self, silo: str, payload: Payload) -> None:
        """A silo's answer to its last question.

        Raises:
            ProtocolError: it is not one.
        """
        if silo not in self.survivors:
            raise ProtocolError(silo, "reveal", "nobody asked")
        if silo not in self._signatures:
            signature = payload.tobytes()
            if payload.dtype != np.uint8 or len(signature) != SIGNATURE_BYTES:
                raise ProtocolError(silo, "signature", f"{len(signature)} bytes instead of {SIGNATURE_BYTES}")
            self._signatures[silo] = signature
        else:
            self._reveals[silo] = decode_reveal(silo, payload)

    @property
    def done(self) -> bool:
        """Whether every survivor has revealed."""
        return len(self._reveals) == len(self.survivors)

    def reveals(self) -> bytes:
        """All reveals as JSON, for silos; see `decode_reveals`."""
        value = {name: _plain(self._reveals[name]) for name in sorted(self._reveals)}
        return json.dumps(value, separators=(",", ":")).encode()


def encode_reveal(reveal: Reveal) -> Payload:
    """A silo's reveal as it travels, uint8 [bytes]."""
    return _packed(_plain(reveal))


def decode_reveal(silo: str, payload: Payload) -> Reveal:
    """The inverse of `encode_reveal`.

    Raises:
        ProtocolError: the silo sent something else.
    """
    return _reveal(silo, _unpacked(payload, silo), silo)


def decode_reveals(data: bytes) -> list[Reveal]:
    """The reveals that came with a sum.

    Raises:
        ProtocolError: the server sent something else.
    """
    value = _unpacked(np.frombuffer(data, dtype=np.uint8), "server")
    return [_reveal(str(name), one, "server") for name, one in value.items()]


def _plain(reveal: Reveal) -> dict[str, Any]:
    return {"own": reveal.own.hex(), "pairs": {name: seed.hex() for name, seed in reveal.pairs.items()}}


def _reveal(silo: str, value: Any, sender: str) -> Reveal:
    try:
        pairs = {str(name): bytes.fromhex(seed) for name, seed in value["pairs"].items()}
        reveal = Reveal(silo, bytes.fromhex(value["own"]), pairs)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProtocolError(sender, "reveal", f"not the seeds of masks: {type(error).__name__}") from None
    if any(len(seed) != KEY_BYTES for seed in (reveal.own, *pairs.values())):
        raise ProtocolError(sender, "reveal", f"a seed has not {KEY_BYTES} bytes")
    return reveal


def _packed(value: dict[str, Any]) -> Payload:
    return np.frombuffer(json.dumps(value, separators=(",", ":")).encode(), dtype=np.uint8)


def _unpacked(payload: Payload, sender: str) -> dict[str, Any]:
    if payload.dtype != np.uint8 or len(payload) > MAX_ANSWER_BYTES:
        raise ProtocolError(sender, "message", f"{len(payload)} bytes about masks, at most {MAX_ANSWER_BYTES}")
    try:
        value = json.loads(payload.tobytes())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(sender, "message", "not JSON") from error
    if not isinstance(value, dict):
        raise ProtocolError(sender, "message", "not a JSON object")
    return value
