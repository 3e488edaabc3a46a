"""What a transport carries: questions of the server to silos, and their answers, each a text with bytes beside it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Self

from fedsync.core.errors import SERVER, ProtocolError
from fedsync.core.transfer import Payload

BESIDE_BYTES = 2**18
"""Bytes that may go along with a text. What is larger is a blob, which is fetched, or an upload."""

MOST_TEXT_BYTES = 2**20
"""Bytes of a text."""

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
        payload: bytes beside it, uint8, at most `BESIDE_BYTES`; a blob for more; or None.
        most: bytes that may come beside the answer.
    """

    text: str
    payload: Payload | Blob | None = None
    most: int = BESIDE_BYTES


@dataclass(frozen=True, slots=True)
class SiloAnswer:
    """A silo's answer.

    Args:
        name: of the question, as `send` returned it.
        text: of the answer.
        payload: bytes beside it, uint8; or None.
    """

    name: str
    text: str
    payload: Payload | None = None


@dataclass(frozen=True, slots=True)
class FrameHead:
    """What a request or a reply says of its body, as a header: where the text ends, and what lies elsewhere.

    Args:
        text: bytes of the text; what follows it is the payload.
        number: of the question in its session.
        blob: digest of the payload where it has to be fetched.
        nbytes: of the blob.
        ticket: under which a large answer may be left, or was left.
        most: bytes that may come beside the answer.
    """

    text: int
    number: int
    blob: str = ""
    nbytes: int = 0
    ticket: str = ""
    most: int = 0

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
        numbers, digests = (self.text, self.number, self.nbytes, self.most), (self.blob, self.ticket)
        if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
            return False
        if not all(isinstance(digest, str) for digest in digests) or self.text > MOST_TEXT_BYTES:
            return False
        return all(not text or form.fullmatch(text) for form, text in ((_DIGEST, self.blob), (_TICKET, self.ticket)))
