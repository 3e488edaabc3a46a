"""Sessions of a hub: each silo's secret and unanswered questions (requests), without network code.

| state of a silo | event | next state |
|---|---|---|
| invited | its first request, with the join's secret | connected; the join admits nobody else |
| connected | no request is held for ``AWAY_S`` | away: it may return by itself, with its session's secret |
| away | any request of its session | connected |
| any | a new invitation | invited; the present session continues until the new join is used |
| any | it is removed | unknown: its secrets and questions are deleted |

A question is queued until its answer arrives, the server drops it, or the silo begins a new session. Each answer is
delivered to the server once; a repeated answer is acknowledged and ignored. So a lost connection loses no question. A
silo sends the number of its last received question and gets the later questions. A session's questions have growing
numbers, also across a restart of the server: a silo may still answer a question of the earlier process.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsync.common import foreign
from fedsync.common.errors import PolicyError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.transport.join import digest_of, new_secret
from fedsync.transport.port import Blob, SiloQuestion

logger = foreign.logger(__name__)

AWAY_S = 40.0  # time without a held request after which a silo is away; longer than a hold or a broken connection

_NUMBERS = 2**30  # question numbers of each process of the server; more than the questions of any run

MOST_QUEUED = 16  # unanswered questions of a silo: an order, and questions meanwhile


@dataclass(frozen=True, slots=True)
class Queued:
    """Unanswered question, with its number in the session, its name at the server, and the ticket of a large answer."""

    number: int
    name: str
    question: SiloQuestion
    ticket: str = ""


@dataclass(slots=True)
class HubSession:
    """Session of one silo, with SHA-256 digests of secrets, empty for none. ``secret`` is of the session, ``invited``
    of an unused join, and ``used`` of the join that began the session.
    """

    silo: str
    secret: str = ""
    invited: str = ""
    used: str = ""
    last: int = 0  # number of the newest question
    queued: dict[int, Queued] = field(default_factory=dict)
    seen_s: float | None = None  # start or end of its last request to this process; None before
    holds: int = 0  # requests that are held now
    open: int = 0  # requests in progress now, including held requests
    wake: Callable[[], None] = lambda: None  # ends the wait of the held request

    def after(self, number: int) -> Queued | None:
        return next((each for each in list(self.queued.values()) if each.number > number), None)


class Sessions:
    """All sessions of a run. The file for restarts contains only digests, never a secret."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._begun_s = clock()
        self._by_silo: dict[str, HubSession] = {}
        self.dropped: Callable[[Queued], None] = lambda queued: None
        """Callback for each question that is deleted with its session."""
        self.run, self._restarts = secrets.token_hex(8), 0
        if file.exists():
            kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            self.run, self._restarts = str(kept["run"]), int(kept.get("restarts", 0)) + 1
            first = self._restarts * _NUMBERS
            for silo, (secret, invited, used) in kept["sessions"].items():
                self._by_silo[silo] = HubSession(silo, secret, invited, used, first)
            self._save()  # before any question, so that no later process uses these numbers
        self._by_secret = self._index()

    def _index(self) -> Mapping[str, HubSession]:
        return {each.secret: each for each in self._by_silo.values() if each.secret}

    def _save(self) -> None:
        self._by_secret = self._index()
        kept = {name: [each.secret, each.invited, each.used] for name, each in self._by_silo.items()}
        text = json.dumps({"run": self.run, "restarts": self._restarts, "sessions": kept})
        write_atomically(self._file, text.encode(), OWNER_FILE)

    # Authentication.

    def invite(self, silo: str) -> str:
        """Return a fresh secret for a join; an earlier unused invitation becomes void."""
        secret = new_secret()
        self._by_silo.setdefault(silo, HubSession(silo)).invited = digest_of(secret)
        self._save()
        return secret

    def begin(self, invitation: str, secret: str) -> HubSession | None:
        """Handle a silo's first request, with its join's ``invitation`` and the digest of its session's new secret.
        Return None if the invitation is unknown or was used by another process.
        """
        found = digest_of(invitation)
        for session in self._by_silo.values():
            if session.invited == found:
                if secret in self._by_secret or secret == found:
                    return None  # a session's secret must be unique, and differ from the join's
                session.secret, session.invited, session.used = secret, "", found
                self._drop(session)  # its questions went to an earlier process of the silo
                self._save()
                return session
            if session.used == found and session.secret == secret:
                return session  # a retry: the first response was lost
            if session.used == found:
                logger.warning("the join of %s was used a second time, with another secret: refused", session.silo)
                return None
        return None

    def caller(self, secret: str) -> HubSession | None:
        return self._by_secret.get(digest_of(secret)) if secret else None

    def strike_off(self, silo: str) -> None:
        session = self._by_silo.pop(silo, None)
        if session is not None:
            self._drop(session)
            session.wake()
            self._save()

    def _drop(self, session: HubSession) -> None:
        for queued in session.queued.values():
            self.dropped(queued)
        session.queued = {}

    # Presence.

    def seen(self, session: HubSession) -> None:
        session.seen_s = self._clock()

    def returns(self, silo: str) -> bool:
        """Whether a silo of an earlier server process may still return by itself."""
        session = self._by_silo.get(silo)
        known = session is not None and bool(session.secret) and session.seen_s is None
        return known and self._clock() - self._begun_s < AWAY_S

    @property
    def silos(self) -> dict[str, str]:
        """Connected silos, each with an identifier of its session, which changes with each join."""
        seen = [(silo, each, each.seen_s) for silo, each in sorted(self._by_silo.items()) if each.seen_s is not None]
        return {silo: each.used for silo, each, at_s in seen if each.holds or self._clock() - at_s < AWAY_S}

    @property
    def blobs(self) -> set[str]:
        payloads = (each.question.payload for one in self._by_silo.values() for each in one.queued.values())
        return {payload.digest for payload in payloads if isinstance(payload, Blob)}

    def wake(self) -> None:
        for session in self._by_silo.values():
            session.wake()

    # Questions.

    def queue(self, silo: str, question: SiloQuestion, *, ticket: str = "") -> str | None:
        """Queue a question; return its name, or None without a session; a full queue is a bug, `PolicyError`."""
        session = self._by_silo.get(silo)
        if session is None or not session.secret:
            return None
        if len(session.queued) >= MOST_QUEUED:
            raise PolicyError(f"{silo} has {MOST_QUEUED} questions that wait for an answer")
        session.last += 1
        name = f"{silo}/{session.last}"
        session.queued[session.last] = Queued(session.last, name, question, ticket)
        session.wake()
        return name

    def forget(self, name: str) -> Queued | None:
        silo, _, number = name.rpartition("/")
        session = self._by_silo.get(silo)
        return None if session is None else session.queued.pop(int(number), None)
