"""Sessions of a hub: which silo has which secret, and the questions that it has not answered yet. No network here.

| a silo is | until | then |
|---|---|---|
| invited | its first request, by the join's secret | here; the join admits nobody else any more |
| here | no request is held for ``AWAY_S`` | away: it may come back by itself, by its session's secret |
| away | any request of its session | here |
| any | it is invited anew | invited; the session that it has goes on until the new join is used |
| any | it is struck off | nobody: its secrets and its questions are gone |

| a question is | until | then |
|---|---|---|
| queued | its answer comes, in whichever order | answered: it is told to the server once, and forgotten |
| queued | the server forgets it | forgotten: an answer that still comes is acknowledged, and not looked at |

Questions stay until they are answered, so a line that breaks loses none. A silo says the number of the last one that it
has; it is given those behind. Numbers of a session only grow, also over a restart of the server.
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
from fedsync.transport.questions import Blob, SiloQuestion

logger = foreign.logger(__name__)

AWAY_S = 40.0
"""A silo that has held no request for so long is away. A request is held, and a line breaks, in less."""

MOST_QUEUED = 16
"""Questions that a silo has not answered, at most: an order, one behind it, and what is asked meanwhile."""


@dataclass(frozen=True, slots=True)
class Queued:
    """A question that waits for its answer.

    Args:
        number: in the session.
        name: for the server.
        question: what is asked.
        ticket: under which a large answer may be left; empty for none.
    """

    number: int
    name: str
    question: SiloQuestion
    ticket: str = ""


@dataclass(slots=True)
class HubSession:
    """One silo's.

    Args:
        silo: its name.
        secret: digest of the session's secret; empty before the first request.
        invited: digest of the secret of a join that was not used yet; empty for none.
        used: digest of the secret of the join that the session came of.
    """

    silo: str
    secret: str = ""
    invited: str = ""
    used: str = ""
    last: int = 0
    """Number of the newest question."""
    queued: dict[int, Queued] = field(default_factory=dict)
    seen_s: float | None = None
    """When its last request came or ended; None before the first one of this process."""
    holds: int = 0
    """Requests that are held now."""
    open: int = 0
    """Requests that are in work now, held ones too."""
    wake: Callable[[], None] = lambda: None
    """Ends the wait of the request that is held."""

    def after(self, number: int) -> Queued | None:
        """The first question behind this one that has no answer."""
        return next((each for each in list(self.queued.values()) if each.number > number), None)


class Sessions:
    """All of a run, on disk as far as a server that is started again needs them: never a secret, only digests.

    Args:
        file: where they are kept.
        clock: seconds, of no particular beginning.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._begun_s = clock()
        self._by_silo: dict[str, HubSession] = {}
        self.dropped: Callable[[Queued], None] = lambda queued: None
        """Called with each question that goes with its session."""
        self.run = secrets.token_hex(8)
        if file.exists():
            kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            self.run = str(kept["run"])
            self._by_silo = {name: HubSession(name, *each) for name, each in kept["sessions"].items()}
        self._by_secret = self._index()

    def _index(self) -> Mapping[str, HubSession]:
        return {each.secret: each for each in self._by_silo.values() if each.secret}

    def _save(self) -> None:
        self._by_secret = self._index()
        kept = {name: [each.secret, each.invited, each.used] for name, each in self._by_silo.items()}
        text = json.dumps({"run": self.run, "sessions": kept})
        write_atomically(self._file, text.encode(), OWNER_FILE)

    # Who may speak.

    def invite(self, silo: str) -> str:
        """A fresh secret for a join; one that was given out before, and not used, is void."""
        secret = new_secret()
        self._by_silo.setdefault(silo, HubSession(silo)).invited = digest_of(secret)
        self._save()
        return secret

    def begin(self, invitation: str, secret: str) -> HubSession | None:
        """A silo's first request.

        Args:
            invitation: the secret of its join.
            secret: digest, hexadecimal, of the secret of its session.

        Returns:
            The session; None where nobody was invited so, or somebody else has used the invitation.
        """
        found = digest_of(invitation)
        for session in self._by_silo.values():
            if session.invited == found:
                if secret in self._by_secret or secret == found:
                    return None  # a session's secret is nobody else's, and not the join's
                session.secret, session.invited, session.used = secret, "", found
                self._drop(session)  # whoever had its questions was another process
                self._save()
                return session
            if session.used == found and session.secret == secret:
                return session  # its answer was lost on the way
            if session.used == found:
                logger.warning("the join of %s was used a second time, with another secret: refused", session.silo)
                return None
        return None

    def caller(self, secret: str) -> HubSession | None:
        """Whose session has this secret."""
        return self._by_secret.get(digest_of(secret)) if secret else None

    def strike_off(self, silo: str) -> None:
        """End what a silo has; it may be invited again."""
        session = self._by_silo.pop(silo, None)
        if session is not None:
            self._drop(session)
            session.wake()
            self._save()

    def _drop(self, session: HubSession) -> None:
        for queued in session.queued.values():
            self.dropped(queued)
        session.queued = {}

    # Who is there.

    def seen(self, session: HubSession) -> None:
        session.seen_s = self._clock()

    def is_here(self, silo: str) -> bool:
        """Whether a silo has held a request lately."""
        session = self._by_silo.get(silo)
        if session is None or session.seen_s is None:
            return False
        return session.holds > 0 or self._clock() - session.seen_s < AWAY_S

    def returns(self, silo: str) -> bool:
        """Whether a silo that was here before this server was started may still come back by itself."""
        session = self._by_silo.get(silo)
        known = session is not None and bool(session.secret) and session.seen_s is None
        return known and self._clock() - self._begun_s < AWAY_S

    @property
    def silos(self) -> dict[str, str]:
        """All that are here, each with what names its session: another one after another join."""
        return {silo: self._by_silo[silo].used for silo in sorted(self._by_silo) if self.is_here(silo)}

    @property
    def blobs(self) -> set[str]:
        """Digests of blobs that questions without an answer speak of."""
        payloads = (each.question.payload for one in self._by_silo.values() for each in one.queued.values())
        return {payload.digest for payload in payloads if isinstance(payload, Blob)}

    def wake(self, silo: str) -> None:
        """End the wait of the request that a silo has held."""
        self._by_silo[silo].wake()

    # What is asked.

    def queue(self, silo: str, question: SiloQuestion, *, ticket: str = "") -> str | None:
        """Queue a question; returns its name, or None where the silo has no session.

        Raises:
            PolicyError: so many wait already that something is wrong.
        """
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
        """No answer to this question is waited for any more; returns it, if one was."""
        silo, _, number = name.rpartition("/")
        session = self._by_silo.get(silo)
        return None if session is None else session.queued.pop(int(number), None)

    def counts_on(self, session: HubSession, number: int) -> None:
        """A silo says that it has this question: numbers go on behind it, where the server was started again."""
        session.last = max(session.last, number)
