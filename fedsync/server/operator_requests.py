"""Requests of the operator to a run, as files in the run's folder, which the server process answers.

Only the server's user can enter the folder (0700), so every file in it is from this user. Its files:

| file | written by | content |
|---|---|---|
| ``NAME.ask`` | the operator's process | the request; the server process removes the file when it has answered |
| ``NAME.answer`` | the server process, when a checkpoint contains the result | the answer; the operator removes it |
| ``listening`` | | locked by the server process while it runs |

If a server process dies, the next one reads the pending requests, and executes none twice
(`fedsync.core.operator.operator_commands`). A request older than `STALE_S` is refused. This module imports little, for
processes that only send requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedsync.common import codec, foreign
from fedsync.common.errors import ConfigError, FedSyncError, RunError
from fedsync.common.files import private_folder, read_private, write_private
from fedsync.common.locks import held, taken
from fedsync.core.actions import OperatorAnswered
from fedsync.core.events import OperatorAsked
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import ChangeStop, OperatorQuestion
from fedsync.observe.fate import LISTENING, OPERATOR, why_deaf

if TYPE_CHECKING:
    from fedsync.config.strategy import StrategyConfig

logger = foreign.logger(__name__)

MOST_WAITING = 16
"""Maximum number of pending requests."""

MOST_BYTES = 4096
"""Maximum size of a request or an answer."""

STALE_S = 600.0
"""Age above which an unread request is refused [s]."""

WAIT_S = 60.0
"""Timeout of an answer [s]; a server that adds up large models reads requests only in between."""

_KEPT, _PAUSE_S, _LONGEST = 64, 0.05, 400
_TICK_NS, _ANY_NS = 2_000_000_000, -1
_ASK, _ANSWER = ".ask", ".answer"


class Requests(Protocol):
    """Source of requests to a run from outside."""

    def events(self, now_s: float) -> list[OperatorAsked]:
        """Return new requests, oldest first; ``now_s`` is in seconds since the run began."""

    def settle(self, entry: JournalEntry) -> None:
        """Send the answers in a journal entry; call it after a checkpoint contains the entry."""

    def close(self) -> None: ...


class OperatorRequests:
    """Server process's side of the operator's requests; ``check`` returns why a request does not fit the run, or "".

    Raises:
        ConfigError: the folder cannot be made, or is open to other users.
        RunError: another process answers requests in this folder.
    """

    def __init__(self, out: Path, check: Callable[[OperatorQuestion], str] = lambda question: "") -> None:
        self._folder, self._check = private_folder(out / OPERATOR), check
        self._read: set[str] = set()
        self._listed_ns = _ANY_NS
        self._lock = ExitStack()
        if not self._lock.enter_context(taken(self._folder / LISTENING)):
            raise RunError(f"another process is at work on the run in {out}")

    def close(self) -> None:
        self._listed_ns = _ANY_NS
        for event in self.events(0.0):
            self._answer(OperatorAnswered(event.request, "the run is over"))
        self._lock.close()

    def events(self, now_s: float) -> list[OperatorAsked]:
        """Return new requests, oldest first; unreadable requests are refused at once."""
        if not self._changed():
            return []
        new = sorted(path for path in self._folder.glob(f"*{_ASK}") if path.name not in self._read)
        if len(new) > MOST_WAITING:
            self._listed_ns = _ANY_NS
        return [event for path in new[:MOST_WAITING] if (event := self._event(path, now_s)) is not None]

    def _changed(self) -> bool:
        """Whether the folder may have changed since it was last listed; avoids a listing at each turn."""
        try:
            at_ns = self._folder.stat().st_mtime_ns
        except OSError:
            return True  # the listing reports the error
        if at_ns == self._listed_ns:
            return False
        # A second change within one tick of the file system's clock does not change the time stamp.
        self._listed_ns = at_ns if time.time_ns() - at_ns > _TICK_NS else _ANY_NS
        return True

    def settle(self, entry: JournalEntry) -> None:
        for action in entry.actions:
            if isinstance(action, OperatorAnswered):
                self._answer(action)

    def _event(self, path: Path, now_s: float) -> OperatorAsked | None:
        self._read.add(path.name)
        try:
            age_s = abs(time.time() - path.stat().st_mtime)
            question: OperatorQuestion = codec.loads(OperatorQuestion, read_private(path, MOST_BYTES))
        except (FedSyncError, OSError, codec.DecodeError) as error:
            logger.warning("%s is no question of an operator: %s", path, error)
            # The request has no effect, so neither checkpoint nor journal needs it.
            self._answer(OperatorAnswered(path.stem, f"this is no question that can be read: {error}"[:_LONGEST]))
            return None
        stale = f"it was asked {age_s:.0f} s ago, and nobody was there to hear it" if age_s > STALE_S else ""
        return OperatorAsked(now_s, path.stem, question, stale or self._check(question))

    def _answer(self, answer: OperatorAnswered) -> None:
        path = self._folder / f"{answer.request}{_ANSWER}"
        try:
            write_private(path, codec.dumps(answer).encode())
        except ConfigError as error:  # the request is executed all the same, and the journal records it
            logger.warning("the operator's answer: %s", error)
        (self._folder / f"{answer.request}{_ASK}").unlink(missing_ok=True)
        self._read.discard(f"{answer.request}{_ASK}")
        for old in sorted(self._folder.glob(f"*{_ANSWER}"))[:-_KEPT]:
            old.unlink(missing_ok=True)


def problem_with(config: StrategyConfig, question: OperatorQuestion) -> str:
    """Return the reason why a request does not fit a strategy; "" if it fits."""
    if isinstance(question, ChangeStop) and not question.problem():
        try:
            config.stopping(question.given())
        except ConfigError as error:
            return f"{error.problem}: {error.remedy}"
    return ""


def ask(out: Path, question: OperatorQuestion, wait_s: float = WAIT_S) -> None:
    """Send a request to the run in ``out``, and wait until it is executed.

    Raises:
        ConfigError: no run is active, it belongs to another user, too many requests are pending, or it is refused.
        RunError: no answer arrived in time; the request may still be executed.
    """
    if isinstance(question, ChangeStop) and question.problem():
        raise ConfigError("stop-rule", question.problem(), "Nothing was changed")
    if not listens(out):
        raise why_deaf(out)
    folder = private_folder(out / OPERATOR)
    if len(list(folder.glob(f"*{_ASK}"))) >= MOST_WAITING:
        raise ConfigError(str(out), f"{MOST_WAITING} questions wait for an answer", "Try again in a minute")
    name = f"{time.time_ns():020d}-{secrets.token_hex(8)}"
    answer = folder / f"{name}{_ANSWER}"
    write_private(folder / f"{name}{_ASK}", codec.dumps(question, OperatorQuestion).encode())
    end_s = time.monotonic() + wait_s
    while not answer.exists():
        over = not listens(out)
        if (over or time.monotonic() >= end_s) and not answer.exists():
            problem = "has ended" if over else f"has not answered in {wait_s:g} s"
            raise RunError(f"the run in {out} {problem}; whether it was done says `fedsync watch`, and its journal")
        time.sleep(_PAUSE_S)
    told: OperatorAnswered = codec.loads(OperatorAnswered, read_private(answer, MOST_BYTES), own=True)
    answer.unlink(missing_ok=True)
    if told.refused:
        raise ConfigError(str(out), told.refused, "Nothing was changed")


def listens(out: Path) -> bool:
    return held(out / OPERATOR / LISTENING)
