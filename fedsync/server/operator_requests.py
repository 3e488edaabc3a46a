"""What an operator asks of a run, as files in the run's folder: one process asks, the server process answers.

Only the server's user can enter the folder (0700), so whoever puts a file there is that user. Its files:

| file | written by | holds |
|---|---|---|
| ``NAME.ask`` | who asks | the question; the server process removes it when it is answered |
| ``NAME.answer`` | the server process, once a checkpoint has what follows | the answer; who asked removes it |
| ``listening`` | | locked by the server process while it goes on |

A question that is there when a server process dies is read by the next one, and not done twice
(`fedsync.core.operator.operator_commands`); one that is older than `STALE_S` is refused. Light, for those who only ask.
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
"""Questions that wait for their answer at most."""

MOST_BYTES = 4096
"""Of a question or an answer."""

STALE_S = 600.0
"""After which a question that nobody has read means nothing any more [s]."""

WAIT_S = 60.0
"""How long an answer is waited for [s]; a server that adds up large models reads questions in between."""

_KEPT, _PAUSE_S, _LONGEST = 64, 0.05, 400
_TICK_NS, _ANY_NS = 2_000_000_000, -1
_ASK, _ANSWER = ".ask", ".answer"


class Requests(Protocol):
    """Questions to a run from outside."""

    def events(self, now_s: float) -> list[OperatorAsked]:
        """Questions that are new, oldest first; ``now_s`` is in seconds since the run began."""

    def settle(self, entry: JournalEntry) -> None:
        """Tell who asked what came of it; a checkpoint has it when this is called."""

    def close(self) -> None: ...


class OperatorRequests:
    """The server process's side.

    Args:
        out: folder of the run's files.
        check: says why a question does not fit the run's configuration; "" where it does.

    Raises:
        ConfigError: the folder cannot be made, or is open to others.
        RunError: another process answers here.
    """

    def __init__(self, out: Path, check: Callable[[OperatorQuestion], str] = lambda question: "") -> None:
        self._folder, self._check = private_folder(out / OPERATOR), check
        self._read: set[str] = set()
        self._listed_ns = _ANY_NS
        self._lock = ExitStack()
        if not self._lock.enter_context(taken(self._folder / LISTENING)):
            raise RunError(f"another process is at work on the run in {out}")

    def close(self) -> None:
        """Nobody listens any more; questions that wait are refused."""
        self._listed_ns = _ANY_NS
        for event in self.events(0.0):
            self._answer(OperatorAnswered(event.request, "the run is over"))
        self._lock.close()

    def events(self, now_s: float) -> list[OperatorAsked]:
        """Questions that are new, oldest first; what cannot be read is refused at once.

        Args:
            now_s: seconds since the run began.
        """
        if not self._changed():
            return []
        found = sorted(self._folder.glob(f"*{_ASK}"))
        new = [path for path in found if path.name not in self._read]
        if len(new) > MOST_WAITING:
            self._listed_ns = _ANY_NS
        waiting = new[:MOST_WAITING]
        return [event for event in (self._event(path, now_s) for path in waiting) if event is not None]

    def _changed(self) -> bool:
        """Whether a file may have come or gone since the folder was listed last, which a server does at each turn."""
        try:
            at_ns = self._folder.stat().st_mtime_ns
        except OSError:
            return True  # the listing says what is wrong
        if at_ns == self._listed_ns:
            return False
        # What comes within a tick of the file system's clock after the last change would not show.
        self._listed_ns = at_ns if time.time_ns() - at_ns > _TICK_NS else _ANY_NS
        return True

    def settle(self, entry: JournalEntry) -> None:
        """Tell who asked what came of it; a checkpoint has it when this is called."""
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
            # Nothing follows from it, so no checkpoint has to have it, nor the journal.
            self._answer(OperatorAnswered(path.stem, f"this is no question that can be read: {error}"[:_LONGEST]))
            return None
        stale = f"it was asked {age_s:.0f} s ago, and nobody was there to hear it" if age_s > STALE_S else ""
        return OperatorAsked(now_s, path.stem, question, stale or self._check(question))

    def _answer(self, answer: OperatorAnswered) -> None:
        path = self._folder / f"{answer.request}{_ANSWER}"
        try:
            write_private(path, codec.dumps(answer).encode())
        except ConfigError as error:  # it is done all the same, and the journal says so
            logger.warning("the operator's answer: %s", error)
        (self._folder / f"{answer.request}{_ASK}").unlink(missing_ok=True)
        self._read.discard(f"{answer.request}{_ASK}")
        for old in sorted(self._folder.glob(f"*{_ANSWER}"))[:-_KEPT]:
            old.unlink(missing_ok=True)


def problem_with(config: StrategyConfig, question: OperatorQuestion) -> str:
    """Why a question does not fit a strategy; "" where it does."""
    if isinstance(question, ChangeStop) and not question.problem():
        try:
            config.stopping(question.given())
        except ConfigError as error:
            return f"{error.problem}: {error.remedy}"
    return ""


def ask(out: Path, question: OperatorQuestion, wait_s: float = WAIT_S) -> None:
    """Ask something of the run whose files are in ``out``; returns when it is done.

    Raises:
        ConfigError: there is no run at work, it belongs to somebody else, too much is being asked, or it is refused.
        RunError: no answer has come in time; it may still be done.
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
    """Whether a server process is at work on the run in this folder, and can be asked."""
    return held(out / OPERATOR / LISTENING)
