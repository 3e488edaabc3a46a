"""Interface of transports, and their messages: the server's requests (*questions*) and silos' answers.

A transport carries them by a hub, or by Flower's messages, as text with an optional payload.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, Protocol, Self

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.transfer import Payload


@dataclass(frozen=True, slots=True)
class Peer:
    """Connected node; its ``node_id`` is negative behind a relay. ``name`` is the name of its registered key, empty for
    none. ``since`` changes when the node was away and came back, and so has lost its questions.
    """

    node_id: int
    name: str = ""
    since: str = ""


class Transport(Protocol):
    """Carrier of questions to silos and of their answers. Call it from one thread only."""

    def peers(self) -> Sequence[Peer]:
        """Return the connected nodes."""

    def send(self, questions: Sequence[tuple[int, SiloQuestion]]) -> list[str | None]:
        """Send each question to a node; return the questions' names, None for an unknown node."""

    def receive(self) -> list[SiloAnswer]:
        """Return new answers, each once."""

    def wait(self, seconds: float) -> None:
        """Wait for answers, at most ``seconds``."""

    def waiting(self, names: Collection[str]) -> set[str]:
        """Return the questions among ``names`` that cannot be lost, so that the driver need not repeat them."""

    def keep(self, names: Collection[str]) -> None:
        """Drop all other questions, whose answers are no longer expected."""


BESIDE_BYTES = 2**18  # largest payload of a message; a larger payload is a blob, which silos fetch, or an upload

MOST_TEXT_BYTES = 2**22  # largest text of a question: a relay is asked and answers for all of its silos at once

ANSWER_TEXT_BYTES = 2**20  # largest text of an answer, unless its question allows more

BASE = "/v1/fedsync"  # base path of all of a hub's URLs

HEAD, SESSION = "fedsync-head", "fedsync-session"  # HTTP headers: a `FrameHead`; digest of a session's secret

_DIGEST, _TICKET = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Blob:
    """Payload that lies at the server for silos to fetch; ``digest`` is its SHA-256, hexadecimal."""

    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SiloQuestion:
    """Question to a silo.

    Args:
        payload: uint8 payload, or a blob in its place; or None.
        most: largest payload of the answer [bytes], whose text has at most ``most_text`` bytes.
        spec: the run's specification as JSON, by which the silo finds its trainer.
        kind: message type in Flower.
        ttl_s: time after which the answer is no longer expected [s].
    """

    text: str
    payload: Payload | Blob | None = None
    most: int = BESIDE_BYTES
    spec: str = ""
    kind: Literal["query", "train", "evaluate"] = "query"
    ttl_s: float = 3600.0
    most_text: int = ANSWER_TEXT_BYTES


@dataclass(frozen=True, slots=True)
class SiloAnswer:
    """Answer of a silo to the question ``name``, or the reason (``problem``) why there is none.

    ``check`` names the check that found the problem; ``code`` is Flower's error code, if any. ``relay``: the sender
    claims to be a relay. ``summed``: the update is in a region's sum, which the aggregator has, so there is no payload.
    ``again``: the aggregator refused that sum; the update must be requested again, and is then sent alone.
    """

    name: str
    text: str = ""
    payload: Payload | None = None
    problem: str = ""
    check: str = "answer"
    code: int | None = None
    relay: bool = False
    summed: bool = False
    again: bool = False


@dataclass(frozen=True, slots=True)
class FrameHead:
    """Header of a request or response: lengths of the parts of its body [bytes], and references to parts elsewhere.

    The body is the run's specification (``spec``), the text, and the payload, unless the payload is a ``blob`` (digest)
    of ``nbytes``. ``number`` is that of the question, ``ticket`` admits the upload of a large answer of at most
    ``most`` bytes, and ``relay`` is 1 if a relay answers. ``empty`` is 1 if there is a payload, of 0 bytes.
    """

    text: int
    number: int
    blob: str = ""
    nbytes: int = 0
    ticket: str = ""
    most: int = 0
    spec: int = 0
    relay: int = 0
    empty: int = 0

    def dump(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value}, separators=(",", ":"))

    @classmethod
    def parse(cls, line: str, sender: str = SERVER) -> Self:
        """Parse the result of `dump`; `ProtocolError` if it is invalid."""
        try:
            found = json.loads(line) if len(line) < 1000 else None
            head = cls(**{"text": 0, "number": 0, **found}) if isinstance(found, dict) else None
        except (ValueError, TypeError, RecursionError):
            head = None
        if head is None or not head._is_sound():
            raise ProtocolError(sender, "head", f"{line!r:.100}")
        return head

    def _is_sound(self) -> bool:
        numbers = (self.text, self.number, self.nbytes, self.most, self.spec, self.relay, self.empty)
        digests = (self.blob, self.ticket)
        if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
            return False
        if not all(isinstance(digest, str) for digest in digests) or max(self.text, self.spec) > MOST_TEXT_BYTES:
            return False
        return all(not text or form.fullmatch(text) for form, text in ((_DIGEST, self.blob), (_TICKET, self.ticket)))


def needed(payload: Payload | None, sender: str) -> Payload:
    if payload is None:
        raise ProtocolError(sender, "message", "it brings no 'payload'")
    return payload
