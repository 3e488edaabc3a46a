"""Resident trainer: one process per silo that keeps model, data and device ready between messages.

The trainer listens on a Unix socket in its own folder, which only its owner can enter and which it locks. It listens
before it loads anything, so that clients learn that it is loading, and since when.

| state | activity | goes to |
|---|---|---|
| loading | builds task, data and model; requests wait; after ``load_s`` they get `StillLoading` | idle, failed |
| idle | waits for requests; ends after a timeout, or sooner if another run's trainer needs the memory | working |
| working | answers a request, or has an order in progress; never ends by itself | idle, hanging |
| failed | refuses pending requests with the error of loading | ends |
| hanging | an order makes no progress (`fedsync.silo.session.liveness`); reports its failure to clients | ends |

It ends in any state on `Quit`, when its owner process is gone, and when its folder is gone. The timeouts are longer
while only this process knows the masks of an encrypted update. Its folder holds all data that must survive it.

Usage: ``python -m fedsync.silo.session.resident_trainer FOLDER``
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import sys
import threading
import time
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.errors import LimitReached
from fedsync.common.files import remove_unfinished
from fedsync.common.locks import wait_until
from fedsync.common.log_times import TimedFormatter
from fedsync.common.output import guard_output, output_may_be_lost
from fedsync.common.processes import alive, exit_with_owner
from fedsync.model.chunked_arrays import file_part, map_file, pieces
from fedsync.model.transfer import Payload
from fedsync.silo import protocol
from fedsync.silo.owner.refusals import StillLoading, refuse
from fedsync.silo.protocol import LOG, SOCKET, Identity
from fedsync.silo.session.trainer_client import room_for
from fedsync.silo.session.trainer_folder import FolderLock, bound_log
from fedsync.silo.session.trainer_socket import listen, receive, send

if TYPE_CHECKING:
    from fedsync.silo.session.service import TrainerService

_IDLE_S, _IDLE_UNREVEALED_S = 900.0, 86_400.0  # idle timeouts; the second while only it knows its masks

_ROOM_S, _ROOM_UNREVEALED_S = 30.0, 900.0  # the same if another run's trainer needs the memory

_FAILED_S = 10.0  # wait of a trainer that failed to load or hangs for a client that takes the reason

_LOOK_S = 1.0
_LOG_BYTES = 10_000_000
_IN_MEMORY_BYTES = 262_144  # a larger answer travels as a file


class _Server:
    def __init__(self, folder: Path, lock: FolderLock) -> None:
        self._folder = folder
        self._lock = lock
        self._service: TrainerService | None = None
        self._failure: protocol.Refused | None = None
        self._failure_known = False
        self._settled = threading.Event()
        self._began_s = self._asked_at_s = time.monotonic()
        # Connections are counted under this lock, and the process ends only under this lock.
        self._entrance = threading.Lock()
        self._inside = self._asking = 0
        self._state, self._since = "", ""
        self._note()
        self._listener = listen(folder / SOCKET)

    def start(self) -> None:
        for work in (self._let_in, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def loaded(self, service: TrainerService) -> None:
        with self._entrance:
            self._service, self._asked_at_s = service, time.monotonic()
            service.on_hang = lambda: (self._folder / SOCKET).unlink(missing_ok=True)
            self._note()
        self._settled.set()

    def fails(self, error: Exception) -> None:
        self._failure = refuse(error)
        self._settled.set()
        end_s = time.monotonic() + _FAILED_S
        while True:
            if self._failure_known or time.monotonic() > end_s:
                self._leave(code=1)
            time.sleep(0.05)

    def _let_in(self) -> None:
        while True:
            select.select([self._listener], [], [])
            try:
                with self._entrance:
                    caller, _ = self._listener.accept()
                    self._inside += 1
            except OSError:  # The client hung up, or there are too many open files.
                time.sleep(0.05)
                continue
            caller.setblocking(True)
            connection = Connection(caller.detach())
            try:
                threading.Thread(target=self._serve_one, args=(connection,), daemon=True).start()
            except RuntimeError:  # No more threads: this client is rejected, and the next may succeed.
                connection.close()
                with self._entrance:
                    self._inside -= 1

    def _serve_one(self, connection: Connection) -> None:
        asks = False
        try:
            with connection:
                request, payload = receive(connection)
                asks = isinstance(request, protocol.Forward)
                if asks:
                    self._count(1)
                reply, answer = self._reply(request, payload)
                passing = answer is not None and answer.nbytes > _IN_MEMORY_BYTES and file_part(answer) is None
                if answer is not None and passing:
                    try:
                        answer = self._on_disk(answer)
                    except LimitReached as error:
                        reply, answer, passing = _refusing(refuse(error)), None, False
                send(connection, reply, answer, passing=passing)
        except (EOFError, OSError):
            return  # The client is gone.
        finally:
            if asks:
                self._count(-1)
            with self._entrance:
                self._inside -= 1

    def _on_disk(self, answer: Payload) -> Payload:
        path = self._folder / f"{protocol.PASSING}{secrets.token_hex(4)}"
        try:
            with room_for(self._folder.parent, answer.nbytes), path.open("xb") as file:
                file.writelines(pieces(answer))
            return map_file(path)
        except OSError:  # the disk is full, but memory may suffice
            path.unlink(missing_ok=True)
            return answer

    def _count(self, more: int) -> None:
        with self._entrance:
            self._note()
            self._asking += more
            self._asked_at_s = time.monotonic()
            self._note()

    def _reply(
        self, request: protocol.SocketRequest | protocol.SocketReply, payload: Payload | None
    ) -> tuple[protocol.SocketReply, Payload | None]:
        try:
            match request:
                case protocol.Forward(text, load_s):
                    if not self._settled.wait(load_s):
                        raise StillLoading(
                            f"the resident trainer in {self._folder} has been loading its task, data and model for "
                            f"{time.monotonic() - self._began_s:.0f} s. It continues, and answers a later message; if "
                            f"not, see {self._folder / LOG}, and end process {os.getpid()} for a fresh start"
                        )
                    if self._service is None:
                        self._failure_known = True
                        return _refusing(self._failure or protocol.Refused(protocol.Refusal.INTERNAL)), None
                    said, answer = self._service.ask(text, payload)
                    return protocol.Forwarded(said), answer
                case protocol.MakeRoom():
                    self._leave(_ROOM_UNREVEALED_S if self._unrevealed else _ROOM_S, own=1)
                case protocol.Quit():
                    # The lock goes before the listener: a caller in between would wait for an answer that never comes.
                    (self._folder / SOCKET).unlink(missing_ok=True)
                    os._exit(0)
            with self._entrance:
                self._note()
                return protocol.TrainerState(self._state, self._since), None
        except Exception as error:  # the client must get an answer
            return _refusing(refuse(error)), None

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            if not self._lock.lasts:  # The folder was removed: no client finds this process, and another may run there.
                os._exit(1)
            bound_log(self._folder / LOG, _LOG_BYTES)
            with self._entrance:
                self._note()
                if self._state == "working":
                    self._asked_at_s = time.monotonic()
            if self._service is not None and self._service.hangs:
                wait_until(lambda: not self._asking, _FAILED_S, 0.05)
                os._exit(1)
            if self._state == "idle":
                self._leave(_IDLE_UNREVEALED_S if self._unrevealed else _IDLE_S)

    @property
    def _unrevealed(self) -> bool:
        return self._service is not None and self._service.unrevealed

    def _note(self) -> None:
        if self._failure is not None:
            state = "failed"
        elif self._service is None:
            state = "loading"
        else:
            state = "working" if self._asking or self._service.busy else "idle"
        if state != self._state:
            self._state, self._since = state, datetime.now(UTC).isoformat(timespec="seconds")

    def _leave(self, idle_s: float = 0.0, own: int = 0, code: int = 0) -> None:
        """End this process if it is idle for ``idle_s``, with no clients but ``own`` connected or connecting."""
        socket, aside = self._folder / SOCKET, self._folder / f"{SOCKET}.old"
        with self._entrance:
            busy = self._service is not None and self._service.busy
            loading = not self._settled.is_set()
            if loading or busy or self._inside > own or time.monotonic() - self._asked_at_s < idle_s:
                return
            socket.rename(aside)
            # A client that found the socket before the rename has its connection pending by then.
            if not select.select([self._listener], [], [], 0.05)[0]:
                aside.unlink(missing_ok=True)
                os._exit(code)
            aside.rename(socket)


def _refusing(refused: protocol.Refused) -> protocol.Forwarded:
    return protocol.Forwarded(protocol.write_reply(refused))


def main(folder: Path) -> None:
    exit_with_owner()
    guard_output()
    output_may_be_lost()  # a print in a user's code must not cost an order
    lock = FolderLock.take(folder)
    if lock is None:
        return
    for name in (protocol.ANSWER, protocol.COPY):
        remove_unfinished(folder, name)
    for left in folder.glob(f"{protocol.PASSING}*"):
        left.unlink(missing_ok=True)
    remove_unfinished(folder, writes=alive)  # other files; a client may be writing `protocol.IDENTITY` now
    bound_log(folder / LOG, _LOG_BYTES)
    if logging.lastResort is not None:  # this process's log output goes to `LOG`
        logging.lastResort.setFormatter(TimedFormatter())
    server = _Server(folder, lock)
    server.start()
    try:
        # Only the lock's holder imports this, because it loads much, and torch where training is not confined.
        from fedsync.silo.session.service import TrainerService

        server.loaded(TrainerService(Identity.load(folder), folder, confined=True))
    except Exception as error:
        server.fails(error)
    threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
