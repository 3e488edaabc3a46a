"""The resident trainer: one process a silo that keeps model, data and device hot between messages.

It listens on a Unix socket in a folder that only its owner can enter, and that no other trainer has as long as it
lives. Requests and answers are a JSON header, which names the type of the payload that follows, if one does, and the
payload as raw bytes. It listens before it loads anything, so that whoever asks learns that it does, and how long it has
been at it. The trainer ends when told to, when its owner process is gone, or after a time without requests, which is
short once the silo has a trainer for another run; never while somebody waits for an answer. What has to survive is in
its folder.

Usage: ``python -m fedsync.trainer.server FOLDER``
"""

from __future__ import annotations

import os
import select
import sys
import threading
import time
import traceback
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsync.common.files import remove_unfinished
from fedsync.common.processes import alive, exit_with_owner
from fedsync.core.codec import decode, encode
from fedsync.core.errors import ConfigError
from fedsync.core.orders import WorkOrder
from fedsync.core.transfer import Payload
from fedsync.trainer.connection import listen, receive, send
from fedsync.trainer.folder import FolderLock
from fedsync.trainer.protocol import (
    ANSWER,
    COPY,
    IDENTITY,
    LOG,
    SOCKET,
    Answer,
    Completed,
    Identity,
    InProgress,
    StillLoading,
    VersionMismatch,
)
from fedsync.trainer.quota import bound_log

if TYPE_CHECKING:
    from fedsync.trainer.service import TrainerService

_IDLE_S, _IDLE_OWING_S = 900.0, 86_400.0
"""A trainer that was not asked for so long [s] ends; the second, if it is the only one to know what its masks are."""

_ROOM_S, _ROOM_OWING_S = 30.0, 900.0
"""A trainer that was not asked for so long [s] makes room for that of another run; the second as above."""

_TOLD_S = 10.0
"""How long a trainer that cannot be built waits for somebody to tell why [s]."""

_LOOK_S = 1.0
_LOG_BYTES = 10_000_000

_ASIDE = ("probe", "make room")
"""Requests that are no reason to stay."""


class _Server:
    """Answers requests on the socket, a thread each.

    Args:
        folder: of the trainer.
        tenure: of the folder.
    """

    def __init__(self, folder: Path, tenure: FolderLock) -> None:
        self._folder = folder
        self._tenure = tenure
        self._desk: TrainerService | None = None
        self._failure: dict[str, str] | None = None
        self._told = False
        self._settled = threading.Event()
        self._began_s = self._asked_at_s = time.monotonic()
        # Who comes in is counted under this lock, and nobody leaves without it.
        self._door = threading.Lock()
        self._inside = self._asking = 0
        self._state, self._since = "", ""
        self._note()
        self._listener = listen(folder / SOCKET)

    def start(self) -> None:
        """Let callers in, and end this process once there is no more use for it."""
        for work in (self._let_in, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def opens(self, desk: TrainerService) -> None:
        """Answer from now on what had to wait."""
        with self._door:
            self._desk, self._asked_at_s = desk, time.monotonic()
            self._note()
        self._settled.set()

    def fails(self, error: Exception) -> None:
        """Tell everybody who waits why there is no trainer, and end."""
        self._failure = _described(error)
        self._settled.set()
        end_s = time.monotonic() + _TOLD_S
        while True:
            if self._told or time.monotonic() > end_s:
                self._leave(code=1)
            time.sleep(0.05)

    def _let_in(self) -> None:
        while True:
            select.select([self._listener], [], [])
            try:
                with self._door:
                    caller, _ = self._listener.accept()
                    self._inside += 1
            except OSError:  # It hung up, or there are too many open files.
                time.sleep(0.05)
                continue
            caller.setblocking(True)
            connection = Connection(caller.detach())
            try:
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()
            except RuntimeError:  # No more threads: this caller is turned away, the next one may be luckier.
                connection.close()
                with self._door:
                    self._inside -= 1

    def _serve_one(self, connection: Connection) -> None:
        asks = False
        try:
            with connection:
                request, received = receive(connection)
                asks = request["do"] not in _ASIDE
                if asks:
                    self._count(1)
                send(connection, *self._reply(request, received))
        except (EOFError, OSError):
            return  # Whoever asked is gone.
        finally:
            if asks:
                self._count(-1)
            with self._door:
                self._inside -= 1

    def _count(self, more: int) -> None:
        with self._door:
            self._note()
            self._asking += more
            self._asked_at_s = time.monotonic()
            self._note()

    def _reply(self, request: dict[str, Any], received: Payload | None) -> tuple[dict[str, Any], Payload | None]:
        try:
            match request["do"]:
                case "probe":
                    with self._door:
                        self._note()
                        return {"state": self._state, "since": self._since}, None
                case "make room":
                    self._leave(_ROOM_OWING_S if self._owes else _ROOM_S, own=1)
                    return {}, None
                case "stop":
                    os._exit(0)
                case _:
                    self._wait_for_desk(request["load_s"])
                    if self._desk is not None:
                        return _answer(self._desk, request, received)
                    self._told = True
                    return {"error": self._failure}, None
        except Exception as error:  # the one who asks is to know
            return {"error": _described(error)}, None

    def _wait_for_desk(self, most_s: float) -> None:
        if self._settled.wait(most_s):
            return
        raise StillLoading(
            f"the resident trainer in {self._folder} has been loading its task, data and model for "
            f"{time.monotonic() - self._began_s:.0f} s. It goes on, and a later message finds it ready; if none does, "
            f"see {self._folder / LOG}, and end process {os.getpid()} for a fresh start"
        )

    def _watch(self) -> None:
        """Keep the log short, and leave after a time without requests."""
        while True:
            time.sleep(_LOOK_S)
            if not self._tenure.lasts:  # Somebody removed the folder: nobody finds this one, and another may be there.
                os._exit(1)
            bound_log(self._folder / LOG, _LOG_BYTES)
            with self._door:
                self._note()
                if self._state == "working":
                    self._asked_at_s = time.monotonic()
            if self._state == "idle":
                self._leave(_IDLE_OWING_S if self._owes else _IDLE_S)

    @property
    def _owes(self) -> bool:
        return self._desk is not None and self._desk.unrevealed

    def _note(self) -> None:
        """Note what the trainer does, and since when."""
        if self._failure is not None:
            state = "failed"
        elif self._desk is None:
            state = "loading"
        else:
            state = "working" if self._asking or self._desk.busy else "idle"
        if state != self._state:
            self._state, self._since = state, datetime.now(UTC).isoformat(timespec="seconds")

    def _leave(self, idle_s: float = 0.0, own: int = 0, code: int = 0) -> None:
        """End this process if it was not asked for so long, and if nobody but ``own`` is being answered or comes in."""
        socket, aside = self._folder / SOCKET, self._folder / f"{SOCKET}.old"
        with self._door:
            busy = self._desk is not None and self._desk.busy
            loading = not self._settled.is_set()
            if loading or busy or self._inside > own or time.monotonic() - self._asked_at_s < idle_s:
                return
            socket.rename(aside)
            # Whoever found the socket before it went is at the door by then.
            if not select.select([self._listener], [], [], 0.05)[0]:
                aside.unlink(missing_ok=True)
                os._exit(code)
            aside.rename(socket)


def _answer(
    desk: TrainerService, request: dict[str, Any], received: Payload | None
) -> tuple[dict[str, Any], Payload | None]:
    match request["do"]:
        case "describe":
            layout = {"names": desk.layout.names, "shapes": desk.layout.shapes}
            described = {"name": desk.name, "facts": encode(desk.facts), "layout": layout}
            return {**described, "sealed": desk.sealed, "holds": desk.holds}, None
        case "model":
            return {}, desk.initial_model()
        case "train" if received is not None:
            return _outgoing(desk.train(decode(WorkOrder, request["order"], own=True), received, request["wait_s"]))
        case "collect":
            return _outgoing(desk.collect(request["update_id"], request["wait_s"], halt=request["halt"]))
        case "evaluate" if received is not None:
            found = desk.evaluate(received, request["version"])
            return (
                {"holds": found.holds} if isinstance(found, VersionMismatch) else {"evaluation": encode(found)}
            ), None
        case "greeting":
            return {}, desk.greeting()
        case "question" if received is not None:
            return {}, desk.answer(received)
        case "snapshot":
            version, snapshot = desk.snapshot()
            return {"holds": version}, snapshot
        case other:
            raise ConfigError("trainer", f"request {other!r} is unknown or incomplete", "Update FedSync")


def _outgoing(answer: Answer) -> tuple[dict[str, Any], Payload | None]:
    match answer:
        case Completed(report, update):
            return {"report": encode(report)}, update
        case VersionMismatch(holds):
            return {"holds": holds}, None
        case InProgress(steps, samples):
            return {"steps": steps, "samples": samples}, None


def _described(error: Exception) -> dict[str, str]:
    match error:
        case ConfigError(place=place, problem=problem, remedy=remedy):
            return {"place": place, "problem": problem, "remedy": remedy}
        case StillLoading():
            return {"loading": str(error)}
        case _:
            return {"message": f"{type(error).__name__}: {error}"}


def main(folder: Path) -> None:
    """Take the folder, listen, build the trainer, and serve; where another trainer has the folder, do nothing."""
    exit_with_owner()
    tenure = FolderLock.take(folder)
    if tenure is None:
        return
    for name in (ANSWER, COPY):
        remove_unfinished(folder, name)
    remove_unfinished(folder, IDENTITY, alive)
    bound_log(folder / LOG, _LOG_BYTES)
    server = _Server(folder, tenure)
    server.start()
    try:
        # Torch comes with it: only the trainer that has the folder is to load it.
        from fedsync.trainer.service import TrainerService

        server.opens(TrainerService(Identity.load(folder), folder))
    except Exception as error:
        traceback.print_exc()
        server.fails(error)
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
