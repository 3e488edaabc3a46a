"""What a transport carries: questions of the server to silos, and their answers, each a text with bytes beside it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Literal, Self

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.transfer import Payload

BESIDE_BYTES = 2**18
"""Bytes that may go along with a text. What is larger is a blob, which is fetched, or an upload."""

MOST_TEXT_BYTES = 2**22
"""Bytes of a text: a relay is asked and answers for all of its silos at once."""

ANSWER_TEXT_BYTES = 2**20
"""Bytes of the text of an answer, unless its question allows more."""

BASE = "/v1/fedsync"
"""Path of all that a hub answers."""

HEAD, SESSION = "fedsync-head", "fedsync-session"
"""Headers: a `FrameHead`, and the digest of a session's secret."""

_DIGEST, _TICKET = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes that lie at the server for silos to fetch.

    Args:
        digest: SHA-256, hexadecimal.
        nbytes: how many.
    """

    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class SiloQuestion:
    """A question for a silo.

    Args:
        text: of the question.
        payload: bytes beside it, uint8, or a blob that has them; or None.
        most: bytes that may come beside the answer.
        spec: the run's specification as JSON, by which the silo finds its trainer.
        kind: of work, as Flower sorts messages.
        ttl_s: after which nobody waits for the answer.
        most_text: bytes of the answer's text.
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
    """A silo's answer, or what became of it.

    Args:
        name: of the question, as `Transport.send` returned it.
        text: of the answer.
        payload: bytes beside it, uint8; or None.
        problem: why there is no answer; empty where there is one.
        check: which check found the problem.
        code: of Flower's error, where that is the problem.
        relay: who answers says that it is a relay.
    """

    name: str
    text: str = ""
    payload: Payload | None = None
    problem: str = ""
    check: str = "answer"
    code: int | None = None
    relay: bool = False


@dataclass(frozen=True, slots=True)
class FrameHead:
    """What a request or a reply says of its body, as a header: where its parts end, and what lies elsewhere.

    Args:
        text: bytes of the text; what follows it is the payload.
        number: of the question in its session.
        blob: digest of the payload where it has to be fetched.
        nbytes: of the blob.
        ticket: under which a large answer may be left, or was left.
        most: bytes that may come beside the answer.
        spec: bytes of the run's specification, which comes before the text.
        relay: 1 if a relay answers.
    """

    text: int
    number: int
    blob: str = ""
    nbytes: int = 0
    ticket: str = ""
    most: int = 0
    spec: int = 0
    relay: int = 0

    def dump(self) -> str:
        return json.dumps({name: value for name, value in asdict(self).items() if value}, separators=(",", ":"))

    @classmethod
    def parse(cls, line: str, sender: str = SERVER) -> Self:
        """The inverse of `dump`.

        Raises:
            ProtocolError: the peer sent something else.
        """
        try:
            found = json.loads(line) if len(line) < 1000 else None
            head = cls(**{"text": 0, "number": 0, **found}) if isinstance(found, dict) else None
        except (ValueError, TypeError, RecursionError):
            head = None
        if head is None or not head._is_sound():
            raise ProtocolError(sender, "head", f"{line!r:.100}")
        return head

    def _is_sound(self) -> bool:
        numbers = (self.text, self.number, self.nbytes, self.most, self.spec, self.relay)
        digests = (self.blob, self.ticket)
        if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
            return False
        if not all(isinstance(digest, str) for digest in digests) or max(self.text, self.spec) > MOST_TEXT_BYTES:
            return False
        return all(not text or form.fullmatch(text) for form, text in ((_DIGEST, self.blob), (_TICKET, self.ticket)))


def needed(payload: Payload | None, sender: str) -> Payload:
    """The bytes beside a reply that is worth nothing without.

    Raises:
        ProtocolError: there are none.
    """
    if payload is None:
        raise ProtocolError(sender, "message", "it brings no 'payload'")
    return payload
