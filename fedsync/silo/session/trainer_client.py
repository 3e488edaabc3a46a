"""Client of a silo's trainer process: finds or starts it, and ends idle trainers of other runs. Imports no torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from fedsync.common.environment import FLOWER_IDS
from fedsync.common.errors import ConfigError, LimitReached, RunError, SiloBusy
from fedsync.common.fork_server import FORK_SERVER, fork
from fedsync.common.locks import taken, wait_until
from fedsync.common.processes import INTERPRETER, Child, start_apart, tail
from fedsync.common.sandbox.path_sandbox import allowed_here
from fedsync.model.transfer import Payload
from fedsync.silo import protocol
from fedsync.silo.owner.app_files import APP
from fedsync.silo.protocol import IDENTITY, LOG, SOCKET, STATE, Identity
from fedsync.silo.session.liveness import LivenessWatch, end
from fedsync.silo.session.trainer_folder import tenant, tidy
from fedsync.silo.session.trainer_socket import call, receive, send

SHARED_MODULES = ("fedsync.silo.session.service", "fedsync.silo.session.silo_setup")
_LOAD_S = 180.0  # limit of a message's wait for a loading trainer; the trainer goes on loading

_LISTEN_S = 180.0  # limit of a message's wait for a trainer's socket

MOST_TRAINERS = 3  # over all runs: one at work, and those of the runs before and after it

# `FLOWER_IDS` for a trainer that the current message starts.
asked_for: ContextVar[str] = ContextVar("asked_for", default="")

# Folder of the Flower app that the run brought; empty for none, or if the process has the app already.
app_folder: ContextVar[str] = ContextVar("app_folder", default="")

_SPARE_BYTES = 2**30  # disk space that no question or answer takes; a twentieth of the disk if that is less

_counting, _promised = threading.Lock(), list[int]()  # lock, and sizes of payloads about to be written

_TELL_S = 5.0
_PAUSE_S = 0.05


def state_folder() -> Path:
    """Return the parent folder of this user's trainers; its path is short, as socket paths end at 100 characters.
    `RunError` if another user has access to the folder.
    """
    root = os.environ.get(STATE)
    folder = Path(root) if root else Path(tempfile.gettempdir()) / f"fedsync-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RunError(f"{folder} is open to others: remove it, or name another in {STATE}")
    return folder


def trainer_folder(identity: Identity) -> Path:
    own = replace(identity, spec="", run_config="").dump()
    return state_folder() / hashlib.sha256(f"{identity.text.digest} {own}".encode()).hexdigest()[:16]


class TrainerClient:
    """Client of one silo's trainer in one run; each request uses a new connection. Raises as `state_folder`."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._folder = trainer_folder(identity)
        self._socket = self._folder / SOCKET

    def ask(self, text: str, payload: Payload | None = None) -> tuple[str, Payload | None]:
        """Send a request, and wait for the reply, perhaps `Refused`, as long as the trainer lives; payloads are uint8.
        Raise `ConfigError` if the trainer cannot be started, and `RunError` if it did not start, hung or died.
        """
        with LivenessWatch(self._folder) as watch:
            connection = watch.on(self._connection())
            with contextlib.suppress(OSError):
                os.utime(self._folder / IDENTITY)  # The file's age tells when the trainer was last used.
            try:
                send(connection, protocol.Forward(text, _LOAD_S), payload)
                reply, answer = receive(connection)
            except (EOFError, OSError) as error:
                what = watch.found() or "died. The next message starts another"
                raise RunError(f"the resident trainer in {self._folder} {what}; see {self._folder / LOG}") from error
        match reply:
            case protocol.Forwarded(said):
                return said, answer
            case _:
                raise RunError(f"the resident trainer in {self._folder} answers {type(reply).__name__}")

    def _connection(self) -> Connection:
        process: Child | None = None
        end_s = time.monotonic() + _LISTEN_S
        while True:
            with contextlib.suppress(BlockingIOError):
                connection = call(self._socket)
                if connection is not None:
                    return connection
            code = None if process is None else process.poll()
            if code:
                log, last = self._folder / LOG, ""
                with contextlib.suppress(OSError):
                    last = tail(log)
                raise RunError(f"the resident trainer did not start; the end of {log}: {last}")
            if tenant(self._folder) is None and (process is None or code == 0):
                # Exit code 0 means that the process found another trainer here, which has ended since.
                process = self._start()
            if time.monotonic() > end_s:
                raise RunError(
                    f"no trainer answers in {self._folder} after {_LISTEN_S:.0f} s. A started trainer goes on, and may "
                    f"answer a later message; if not, see {self._folder / LOG}"
                )
            time.sleep(_PAUSE_S)

    def _start(self) -> Child:
        """Start a trainer; of two concurrent starts, the later process ends at once."""
        command = [*INTERPRETER, "fedsync.silo.session.resident_trainer", str(self._folder)]
        try:
            # One start at a time, because starting trainers count towards the limit.
            starts = self._folder.with_name(f"{self._identity.index}.starting")
            with taken(starts, _LISTEN_S):
                make_room(self._folder, self._identity)
                self._folder.mkdir(mode=0o700, exist_ok=True)
                self._identity.save(self._folder)
                os.utime(self._folder / IDENTITY)
                server = os.environ.get(FORK_SERVER)
                variables = {**os.environ, FLOWER_IDS: asked_for.get()}
                if app_folder.get():
                    variables[APP] = app_folder.get()
                with (self._folder / LOG).open("ab") as output:
                    forked = fork(Path(server), command, variables, output.fileno()) if server else None
                    process = forked or start_apart(command, output, variables)
                wait_until(lambda: tenant(self._folder) is not None or process.poll() is not None, _LISTEN_S, _PAUSE_S)
                return process
        except OSError as error:
            problem = f"no trainer can be started here: {error.strerror}"
            raise ConfigError(str(self._folder), problem, "Check the folder and the disk") from error


def make_room(folder: Path, identity: Identity) -> None:
    """End the silo's idle trainers of other runs, because they hold memory; the new ``folder`` may not exist yet.
    `SiloBusy` if too many trainers are at work, `LimitReached` if their folders exceed the owner's quota.
    """
    if not (folder / IDENTITY).exists():
        check_room(folder.parent, 0)
    mine = identity.index, identity.name
    others = [other for other in folder.parent.iterdir() if other != folder and _silo(other) == mine]
    for other in others:
        _tell(other, protocol.MakeRoom())
    if sum(tenant(other) is not None for other in others) >= MOST_TRAINERS:
        raise SiloBusy(f"{MOST_TRAINERS} trainers of other runs are at work here, or were within the last half minute")


def check_room(trainers: Path, nbytes: int) -> None:
    quota = allowed_here().get("state_bytes")
    if quota is not None and not tidy(trainers, quota - nbytes):
        problem = f"files of runs here would take more than {quota} bytes, the owner's state_bytes"
        remedy = "Raise state_bytes in silo.yaml, or try again in an hour: then old runs may be removed"
        raise LimitReached("state_bytes", problem, remedy)


@contextlib.contextmanager
def room_for(folder: Path, nbytes: int) -> Iterator[None]:
    """Reserve disk space for ``nbytes`` below ``folder`` until they are written; other reservations count too.
    `LimitReached` as `check_room`; `OSError` if too little of the disk would be left.
    """
    with _counting:
        promised = sum(_promised) + nbytes
        check_room(folder, promised)
        disk = shutil.disk_usage(folder)
        if disk.free - promised < min(_SPARE_BYTES, disk.total // 20):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _promised.append(nbytes)
    try:
        yield
    finally:
        with _counting:
            _promised.remove(nbytes)


def stop_trainers(root: Path) -> None:
    for folder in root.glob("*"):
        pid = tenant(folder)
        if pid is not None:
            _tell(folder, protocol.Quit())
            if tenant(folder) == pid:
                end(folder, pid)


def _tell(folder: Path, request: protocol.SocketRequest) -> None:
    with contextlib.suppress(OSError, EOFError):
        connection = call(folder / SOCKET)
        if connection is not None:
            with connection:
                send(connection, request)
                connection.poll(_TELL_S)


def _silo(folder: Path) -> tuple[int, str] | None:
    try:
        identity = Identity.load(folder)
        return identity.index, identity.name
    except (OSError, ValueError):
        return None
