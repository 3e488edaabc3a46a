"""Agent of a silo: one process that receives the server's requests (*questions*) in all runs, and sends the answers.

In each run the agent keeps one HTTPS request open at the *hub*, the part of the server that hands out questions, such
as orders. It has network access, but neither the silo's data nor any training code. It passes questions over a Unix
socket to the trainer of the run (`fedsync.silo`). A run's ClientApp hands the agent a *join* (invitation), with address
and secret of the hub. The agent outlives the ClientApp and the SuperNode.

| state of a session | event | next state |
|---|---|---|
| joining | the hub accepts the join | joined; the session's data is on disk |
| joining | the hub refuses the join | waiting for another join, at most ten minutes after the hub's last answer |
| joined | a question comes | joined: a thread answers it, and the next question is requested at once |
| joined | the connection breaks | joined again after a pause; or joining, if a join names another hub or authority |
| joined | the hub has forgotten the session | joining, with another join if there is one; else it waits for a join |
| any | the hub reports the end, or is silent for a day (ten minutes, if it has never answered) | ended |

A restarted agent continues the sessions that are on disk; the hub repeats unanswered questions.

Usage: ``python -m fedsync.silo.agent.agent FOLDER [--stay]``; with ``--stay``, for a supervisor, the agent does not end
when it has no runs.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import httpx

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.files import private_folder
from fedsync.common.locks import taken
from fedsync.common.log_times import TimedFormatter
from fedsync.common.processes import exit_with_owner
from fedsync.model.chunked_arrays import digest, map_file
from fedsync.model.transfer import Payload
from fedsync.silo.agent.answers import Place
from fedsync.silo.agent.joins import INBOX_FOLDER, LOCK, OWN_NODE, QUIT, SESSION, SOCKET, JoinedRun, dropped, trusted
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.session.trainer_client import app_folder
from fedsync.silo.session.trainer_socket import listen
from fedsync.transport.hub_line import HELD_S, HubLine, JoinRefused, Over, ReceivedQuestion
from fedsync.transport.join import Join, new_secret
from fedsync.transport.port import Blob

logger = foreign.logger(__name__)

IDLE_S = 60.0  # time without any session after which an agent ends

# Silence of the hub that ends a session; the second limit applies before the first answer, or after a refusal.
GIVE_UP_S, NEVER_HEARD_S = 86_400.0, 600.0

WHOLE = ".parcel"  # suffix of a large payload's file, in the folder of its trainer

MOST_SESSIONS = 128  # over all silos and runs

_PAUSES, _MANY_BREAKS = Backoff(0.2, 10.0), 6  # so many breaks take at least 12 s
_LOOK_S = 1.0
_ANSWER_S = 2.0  # a hub's time for its first answer where places are rare

MOST_AT_WORK = 20  # concurrent questions of a run; an honest server has fewer pending

_BROKEN = (httpx.TransportError, httpx.StreamError, OSError)


class AgentSession:
    """Session of one silo in one run, kept in ``file``; `serve` ends when the session is over."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._newer: JoinedRun | None = None
        self._changed = threading.Event()
        self._room = threading.Semaphore(MOST_AT_WORK)
        self._taking_in = threading.Lock()
        self._used: WeakValueDictionary[Path, Payload] = WeakValueDictionary()
        self._heard_s, self._breaks = time.monotonic(), 0
        self._patience_s = NEVER_HEARD_S
        self._line: tuple[Join, str, HubLine] | None = None
        self._working: set[int] = set()

    @property
    def unheard_s(self) -> float:
        return time.monotonic() - self._heard_s

    @property
    def heard(self) -> bool:
        return self._patience_s == GIVE_UP_S

    def give_up(self) -> None:
        self._patience_s = 0.0
        self._file.unlink(missing_ok=True)  # so that the agent does not begin it again
        self._changed.set()

    def invite(self, newer: JoinedRun) -> None:
        self._newer = newer
        self._changed.set()

    def serve(self) -> None:
        try:
            while self.unheard_s < self._patience_s:
                try:
                    session = self._begun()
                    if session is None:
                        self._pause(_LOOK_S)
                    else:
                        self._hold(session)
                except JoinRefused as error:
                    logger.info("%s", error)
                    self._file.unlink(missing_ok=True)
                    self._patience_s = NEVER_HEARD_S
                except _BROKEN as error:
                    where, why = self._line[0].addresses[0] if self._line else "", str(error) or type(error).__name__
                    if self._breaks == 0:
                        logger.info("the hub %s does not answer: %s", where, why)
                    elif self._breaks == _MANY_BREAKS and not self.heard:
                        refuse(ConfigError(where, f"the hub does not answer: {why}", "Allow this port, at proxies too"))
                    self._pause(_PAUSES.pause_s(self._breaks))
                    self._breaks += 1
        except Over:
            logger.info("the run is over")
        except FedSyncError as error:
            refuse(error)  # for `fedsync doctor`
        finally:
            self._file.unlink(missing_ok=True)
            if self._line is not None:
                self._line[2].close()

    def _pause(self, seconds: float) -> None:
        self._changed.wait(seconds)
        self._changed.clear()

    def _begun(self) -> JoinedRun | None:
        session, newer = None, self._newer
        with suppress(OSError, ValueError):
            session = JoinedRun.load(self._file)
        if newer is not None and (session is None or _elsewhere(newer, session)):
            self._newer, session = None, replace(newer, secret=new_secret())
            session.save(self._file)  # before the hub knows the session, because its answer may be lost
        return session

    def _hold(self, session: JoinedRun) -> None:
        if own := os.environ.get(OWN_NODE):
            session = replace(session, node=json.loads(own))  # the owner's configuration overrides the app's
        join, after = trusted(Join.parse(session.join), session.node), 0
        line = self._line_of(join, session.secret)
        line.join()
        if not self.heard:
            logger.info("joined %s as %s", join.run, join.silo)
        while True:
            self._heard_s, self._breaks, self._patience_s = time.monotonic(), 0, GIVE_UP_S
            newer, self._newer = self._newer, None  # the session works, so a join of the same hub is not needed
            if newer is not None and _elsewhere(newer, session):
                self._newer = newer
                return
            with self._room:  # at the limit, the server's next question waits here
                question = line.asked(after)
            if question is not None:
                after = question.number
                self._begin(line, session, question)

    def _line_of(self, join: Join, secret: str) -> HubLine:
        """Return the session's connection, the same after a break, because answering threads use it."""
        if self._line is None or self._line[:2] != (join, secret):
            if self._line is not None:
                self._line[2].close()
            self._line, self._working = (join, secret, HubLine(join, secret)), set()
        return self._line[2]

    def _begin(self, line: HubLine, session: JoinedRun, question: ReceivedQuestion) -> None:
        if question.number in self._working:
            return
        self._working.add(question.number)
        self._room.acquire()
        try:
            threading.Thread(target=self._work, args=(line, session, question), daemon=True).start()
        except RuntimeError as error:
            self._room.release()
            self._working.discard(question.number)
            raise OSError("no more threads") from error  # the question is requested again

    def _work(self, line: HubLine, session: JoinedRun, question: ReceivedQuestion) -> None:
        app_folder.set(session.app)
        place = Place(session.node, session.run, session.ids)
        payload, breaks = question.payload, 0
        try:
            nbytes = 0 if payload is None else payload.nbytes
            text, answer = place.answer(
                question.spec, question.text, nbytes, lambda folder: self._payload(line, payload, folder)
            )
            while True:
                try:
                    return line.answer(question, text, answer, relay=place.relay is not None)
                except _BROKEN:
                    time.sleep(_PAUSES.pause_s(breaks))
                    breaks += 1
                    if self.unheard_s > self._patience_s:
                        return None
        except (JoinRefused, Over, RuntimeError):
            return None  # the answer is not wanted any more, or the connection was closed
        except FedSyncError as error:
            logger.error("an answer cannot be sent: %s", error)
        finally:
            self._working.discard(question.number)
            self._room.release()

    def _payload(self, line: HubLine, payload: Payload | Blob | None, folder: Path) -> Payload | None:
        """Return a question's payload, uint8: a large payload is downloaded to ``folder`` and mapped, one at a time."""
        if not isinstance(payload, Blob):
            return payload
        with self._taking_in:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = folder / f"{payload.digest}{WHOLE}"
            for other in folder.glob(f"*{WHOLE}*"):
                if not other.name.startswith(payload.digest) and other not in self._used:
                    other.unlink(missing_ok=True)
            there = map_file(path) if path.exists() and path.stat().st_size == payload.nbytes else None
            if there is None or digest(there).hex() != payload.digest:
                line.fetch(payload, path)
                there = map_file(path)
            self._used[path] = there
            return there


def _elsewhere(newer: JoinedRun, session: JoinedRun) -> bool:
    there, here = Join.parse(newer.join), Join.parse(session.join)
    return (there.addresses, there.authority) != (here.addresses, here.authority)


class Agent:
    """All sessions of a silo; at most `MOST_SESSIONS`. With ``stay``, the agent continues when it has no session."""

    def __init__(self, folder: Path, *, stay: bool = False) -> None:
        self._folder, self._stay = folder, stay
        self._sessions: dict[str, tuple[AgentSession, threading.Thread]] = {}

    def run(self) -> None:
        listener, idle_s = listen(self._folder / SOCKET), time.monotonic()
        while True:
            self._tend()
            if self._sessions or self._stay:
                idle_s = time.monotonic()
            elif time.monotonic() - idle_s > IDLE_S:
                (self._folder / SOCKET).unlink(missing_ok=True)  # a later join starts another agent
                self._tend()
                if not self._sessions:
                    return
                listener = listen(self._folder / SOCKET)
            if select.select([listener], [], [], _LOOK_S)[0]:
                with suppress(OSError):
                    caller, _ = listener.accept()
                    with caller:
                        caller.settimeout(_LOOK_S)
                        if caller.recv(1) == QUIT:
                            return

    def _tend(self) -> None:
        self._sessions = {name: each for name, each in self._sessions.items() if each[1].is_alive()}
        joins = dict[str, JoinedRun]()
        try:
            joins = dropped(self._folder / INBOX_FOLDER)
        except Exception:  # no file in the inbox may end the agent
            logger.exception("the inbox cannot be read")
        for name in {*joins, *(path.stem for path in self._folder.glob(f"*{SESSION}"))} - self._sessions.keys():
            if len(self._sessions) >= MOST_SESSIONS and not self._make_room():
                logger.warning("a join is refused: %d runs are at work here", len(self._sessions))
                break
            session = AgentSession(self._folder / f"{name}{SESSION}")
            if name in joins:
                session.invite(joins.pop(name))
            self._sessions[name] = session, threading.Thread(target=session.serve, name=name, daemon=True)
            self._sessions[name][1].start()
        for name, joined in joins.items():
            if name in self._sessions:
                self._sessions[name][0].invite(joined)

    def _make_room(self) -> bool:
        """End the longest silent session, but first a session whose hub never answered; False if all hubs answer."""
        sessions = {name: session for name, (session, _) in self._sessions.items()}
        name = max(sessions, key=lambda each: (not sessions[each].heard, sessions[each].unheard_s))
        session = sessions[name]
        if session.unheard_s < (2 * HELD_S if session.heard else _ANSWER_S):
            return False
        session.give_up()
        del self._sessions[name]
        return True


def main(arguments: list[str]) -> None:
    exit_with_owner()
    folder = private_folder(Path(arguments[0]))
    private_folder(folder / INBOX_FOLDER)
    handler, stay = logging.StreamHandler(), "--stay" in arguments
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s") if stay else TimedFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with taken(folder / LOCK) as alone:
        if alone:
            Agent(folder, stay=stay).run()
            os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
