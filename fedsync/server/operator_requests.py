"""Operator's requests to a running server, as files, and the search for silos that send invalid encrypted updates.

Only the server's user can enter the folder (0700). Its files:

| file | written by | content |
|---|---|---|
| ``NAME.ask`` | the operator's process | the request; the server process removes the file when it has answered |
| ``NAME.answer`` | the server process, when a checkpoint contains the result | the answer; the operator removes it |
| ``listening`` | | locked by the server process while it runs |

If a server process dies, the next one reads the pending requests, and executes none twice. A request older than
`STALE_S` is refused. This module imports little, for processes that only send requests.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common import codec, foreign
from fedsync.common.errors import ConfigError, FedSyncError, RunError
from fedsync.common.files import private_folder, read_private, write_private
from fedsync.common.locks import held, taken
from fedsync.core.actions import Attested, Commit, OperatorAnswered
from fedsync.core.events import Event, OperatorAsked
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import ChangeStop, DropSilo, OperatorQuestion, ReadmitSilo
from fedsync.observe.run_state import LISTENING, OPERATOR, why_deaf
from fedsync.observe.steered import answered_in
from fedsync.server.driver_extension import DriverExtension

if TYPE_CHECKING:
    from fedsync.config.strategy import StrategyConfig

logger = foreign.logger(__name__)

MOST_WAITING = 16

MOST_BYTES = 4096

STALE_S = 600.0
"""Age above which an unread request is refused [s]."""

WAIT_S = 60.0
"""Timeout of an answer [s]; a server that adds up large models reads requests only in between."""

_KEPT_ANSWERS, _PAUSE_S, _LOOK_S, _LONGEST_TEXT = 64, 0.05, 0.05, 400
_ASK, _ANSWER = ".ask", ".answer"


class OperatorRequests(DriverExtension):
    """Server process's side of the operator's requests; ``check`` returns why a request does not fit the run, or "".
    Raises `ConfigError` if the folder is unusable, `RunError` if another process answers requests in it.
    """

    def __init__(self, out: Path, check: Callable[[OperatorQuestion], str] = lambda question: "") -> None:
        self._folder, self._check = private_folder(out / OPERATOR), check
        self._read: set[str] = set()
        self._next_s = 0.0
        self._lock = ExitStack()
        if not self._lock.enter_context(taken(self._folder / LISTENING)):
            raise RunError(f"another process is at work on the run in {out}")

    def close(self) -> None:
        self._next_s = 0.0
        for event in self.events(0.0):
            self._answer(OperatorAnswered(event.request, "the run is over"))
        self._lock.close()

    def events(self, now_s: float) -> list[OperatorAsked]:
        """Return new requests, oldest first; unreadable requests are refused at once."""
        if time.monotonic() < self._next_s:
            return []  # the driver asks at each turn, and a listing takes longer than many turns
        new = sorted(path for path in self._folder.glob(f"*{_ASK}") if path.name not in self._read)
        if len(new) <= MOST_WAITING:
            self._next_s = time.monotonic() + _LOOK_S
        return [event for path in new[:MOST_WAITING] if (event := self._event(path, now_s)) is not None]

    def on_saved(self, entry: JournalEntry) -> None:
        for action in entry.actions:
            if isinstance(action, OperatorAnswered):
                self._answer(action)

    def _event(self, path: Path, now_s: float) -> OperatorAsked | None:
        self._read.add(path.name)
        try:
            age_s = abs(time.time() - path.stat().st_mtime)
            question: OperatorQuestion = codec.loads(OperatorQuestion, read_private(path, MOST_BYTES))
        except (FedSyncError, OSError, codec.DecodeError) as error:
            logger.warning("%s is not an operator's request: %s", path, error)
            # The request has no effect, so neither checkpoint nor journal needs it.
            self._answer(OperatorAnswered(path.stem, f"this request cannot be read: {error}"[:_LONGEST_TEXT]))
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
        for old in sorted(self._folder.glob(f"*{_ANSWER}"))[:-_KEPT_ANSWERS]:
            old.unlink(missing_ok=True)


def problem_with(config: StrategyConfig, question: OperatorQuestion) -> str:
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
            raise RunError(f"the run in {out} {problem}; `fedsync watch` and the journal show whether it was done")
        time.sleep(_PAUSE_S)
    told: OperatorAnswered = codec.loads(OperatorAnswered, read_private(answer, MOST_BYTES), own=True)
    answer.unlink(missing_ok=True)
    if told.refused:
        raise ConfigError(str(out), told.refused, "Nothing was changed")


def listens(out: Path) -> bool:
    return held(out / OPERATOR / LISTENING)


PATIENCE, _LONGEST = 4, 64
"""Versions for which half of the suspects is excluded: at first, and at most."""

_OUT, _GUILTY, _BACK, _KEPT_COMMITS = "suspect", "spoils", "back", 64
_WHY = "it may be the silo that makes sums invalid"
_SURE = "it is the only silo that was in all invalid sums"
_FREE = "other silos may be the ones that make sums invalid"


class Suspects(DriverExtension):
    """Search for silos that spoil encrypted sums, and their temporary exclusion without an operator.

    Silos report spoiled versions (`PooledFigures.spoiled`), but cannot see whose update is invalid. The suspects are
    the silos that were in all spoiled sums. See `docs/internals/cryptography/spoiled-sums.md`.

    | event | reaction |
    |---|---|
    | a sum is spoiled | suspects outside it are cleared and return; half of the rest is excluded, then the other half |
    | a sum is spoiled, and a single suspect was in all spoiled sums | it stays out; an operator can readmit it |
    | no sum is spoiled for `PATIENCE` versions, doubled each time no silo is cleared | excluded silos return |
    | an operator readmits an excluded silo | the search continues with it |
    | too few silos would be left for a sum | no silo is excluded; the run's notes name the suspects |

    ``answered`` are requests that a resumed run has answered, oldest first, ``dropped`` the silos that are excluded in
    it. Exclusions are sent like an operator's requests, so journals, checkpoints and ledgers stay the same.
    """

    def __init__(self, operator: DriverExtension, answered: Iterable[str] = (), dropped: Iterable[str] = ()) -> None:
        self._operator = operator
        last = {silo: kind for kind, _, silo in (request.partition(":") for request in answered) if silo}
        # The newest request counts: a silo that was a suspect may have been found guilty since.
        self._out = {silo for silo in dropped if last.get(silo, "").startswith(f"{_OUT}-")}
        self._among: set[str] = set()
        self._of: dict[int, set[str]] = {}
        self._version = self._turns = self._quiet = self._under_way = 0
        self._wanted: list[tuple[str, OperatorQuestion]] = []

    def close(self) -> None:
        self._operator.close()

    def events(self, now_s: float) -> list[Event]:
        wanted, self._wanted = self._wanted, []
        mine = [OperatorAsked(now_s, request, question) for request, question in wanted]
        return [*self._operator.events(now_s), *mine]

    def on_saved(self, entry: JournalEntry) -> None:
        theirs = []
        for question, refused in answered_in(entry) if entry.steered else ():
            if isinstance(question, ReadmitSilo) and not refused:  # an operator may do so before the search does
                self._out.discard(question.silo)
        for action in entry.actions:
            match action:
                case OperatorAnswered(request) if request.partition("-")[0] in (_OUT, _GUILTY, _BACK):
                    self._settled(request, action.refused)
                    continue
                case Commit(version, weights):
                    self._committed(version, {update_id.rpartition("/")[0] for update_id in weights})
                case Attested(figures) if figures.spoiled:
                    self._spoiled(figures.version, set(figures.spoiled))
                case _:
                    pass
            theirs.append(action)
        self._operator.on_saved(replace(entry, actions=tuple(theirs)))

    def _committed(self, version: int, silos: set[str]) -> None:
        self._version, self._of[version] = version, silos
        self._of.pop(version - _KEPT_COMMITS, None)
        self._quiet += not silos & self._out
        if self._out and self._quiet >= min(PATIENCE * 2 ** max(self._turns - 1, 0), _LONGEST):
            self._readmit(self._out)

    def _spoiled(self, version: int, said: set[str]) -> None:
        silos = said & self._of.get(version, set())
        if not silos or silos & self._out or version <= self._under_way:
            return  # the version began before the exclusion
        among = self._among & silos or silos
        if among != self._among:
            self._among, self._turns = among, 0
        self._quiet, suspects = 0, sorted(among)
        half = suspects[: len(suspects) // 2] if self._turns % 2 == 0 else suspects[len(suspects) // 2 :]
        self._turns += 1
        self._readmit(self._out - set(half))
        if len(suspects) == 1:
            self._ask(_GUILTY, suspects[0], DropSilo(suspects[0], _SURE))
            self._among, self._under_way = set(), self._version + 1  # the next version may still contain the silo
            return
        for silo in half:
            self._out.add(silo)
            self._ask(_OUT, silo, DropSilo(silo, _WHY))

    def _readmit(self, silos: Iterable[str]) -> None:
        for silo in sorted(silos):
            self._ask(_BACK, silo, ReadmitSilo(silo, _FREE))
            self._out.discard(silo)

    def _ask(self, kind: str, silo: str, question: OperatorQuestion) -> None:
        self._wanted.append((f"{kind}-{self._version}-{self._turns}:{silo}", question))

    def _settled(self, request: str, refused: str) -> None:
        if refused:
            kind, _, silo = request.partition(":")
            logger.warning("%s cannot be left out or taken in again: %s", silo, refused)
            if kind.startswith(_OUT):
                self._out.discard(silo)
