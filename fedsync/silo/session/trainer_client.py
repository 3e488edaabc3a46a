"""The way from a ClientApp to the silo's resident trainer: finds it, or starts it. Imports no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

from fedsync.common.environment import FLOWER_IDS
from fedsync.common.errors import ConfigError, LimitReached, RunError
from fedsync.common.forking import NURSERY, Nursery
from fedsync.common.locks import taken
from fedsync.common.processes import INTERPRETER, Child, tail
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.model.transfer import Payload
from fedsync.silo.owner.bundle import APP
from fedsync.silo.protocol import (
    IDENTITY,
    LOG,
    SOCKET,
    STATE,
    Forward,
    Forwarded,
    Identity,
    MakeRoom,
    Quit,
    SocketRequest,
)
from fedsync.silo.session.connection import call, receive, send
from fedsync.silo.session.liveness import LivenessWatch, end
from fedsync.silo.session.trainer_folder import fits, tenant

_LOAD_S = 180.0
"""How long a message waits for a trainer that loads [s]; the trainer goes on."""

_LISTEN_S = 180.0
"""How long it waits for one to be there at all [s]."""

MOST_TRAINERS = 3
"""Trainers that a silo has at a time, whatever runs the server names: one at work, and those of runs
before and after it."""

asked_for: ContextVar[str] = ContextVar("asked_for", default="")
"""Value of `fedsync.common.environment.FLOWER_IDS` for the message that is answered here."""

app_folder: ContextVar[str] = ContextVar("app_folder", default="")
"""Folder of the Flower app that the run of the message brought along; empty for none, or if the process has it."""

_TELL_S = 5.0
_PAUSE_S = 0.05


def state_folder() -> Path:
    """Where resident trainers of this user live; short, for socket paths have at most 100 characters.

    Raises:
        RunError: somebody else can reach into the folder.
    """
    root = os.environ.get(STATE)
    folder = Path(root) if root else Path(tempfile.gettempdir()) / f"fedsync-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RunError(f"{folder} is open to others: remove it, or name another in {STATE}")
    return folder


def trainer_folder(identity: Identity) -> Path:
    """Folder of a silo's trainer in one run; raises as `state_folder`."""
    own = replace(identity, spec="", run_config="").dump()
    return state_folder() / hashlib.sha256(f"{identity.text.digest} {own}".encode()).hexdigest()[:16]


class TrainerClient:
    """Asks one silo's resident trainer; each request is a connection of its own.

    Args:
        identity: which silo of which run; another run begins anew.

    Raises:
        RunError: somebody else can reach into the folder of trainers.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._folder = trainer_folder(identity)
        self._socket = self._folder / SOCKET

    @property
    def alive(self) -> bool:
        return tenant(self._folder) is not None

    def ask(self, text: str, payload: Payload | None = None) -> tuple[str, Payload | None]:
        """Hand over a request, and wait for the reply for as long as the trainer lives; neither is looked into.

        Where the trainer fails, `fedsync.silo.protocol.Refused` is the reply.

        Args:
            text: of the request.
            payload: what comes with it, uint8.

        Raises:
            ConfigError: the trainer cannot be started.
            RunError: it did not start, hung or died.
        """
        with LivenessWatch(self._folder) as watch:
            connection = watch.on(self._connection())
            with contextlib.suppress(OSError):
                os.utime(self._folder / IDENTITY)  # How long ago it was used is told by this.
            try:
                send(connection, Forward(text, _LOAD_S, asked_for.get()), payload)
                reply, answer = receive(connection)
            except (EOFError, OSError) as error:
                what = watch.found() or "died. The next message starts another"
                raise RunError(f"the resident trainer in {self._folder} {what}; see {self._folder / LOG}") from error
        match reply:
            case Forwarded(said):
                return said, answer
            case _:
                raise RunError(f"the resident trainer in {self._folder} answers {type(reply).__name__}")

    def _connection(self) -> Connection:
        """A connection to the trainer, which is started if there is none."""
        process: Child | None = None
        end_s = time.monotonic() + _LISTEN_S
        while True:
            with contextlib.suppress(BlockingIOError):
                connection = call(self._socket)
                if connection is not None:
                    return connection
            code = None if process is None else process.poll()
            if code:
                raise RunError(f"the resident trainer did not start; the end of {self._folder / LOG}:\n{self._tail()}")
            if tenant(self._folder) is None and (process is None or code == 0):
                # Ended without an error, it found another trainer there, which has ended since.
                process = self._start()
            if time.monotonic() > end_s:
                raise RunError(
                    f"nobody answers in {self._folder} after {_LISTEN_S:.0f} s. Whoever is there goes on, and a later "
                    f"message may find it; if none does, see {self._folder / LOG}"
                )
            time.sleep(_PAUSE_S)

    def _start(self) -> Child:
        """Start a trainer; if somebody else does so too, the one that comes second ends at once."""
        command = [*INTERPRETER, "fedsync.silo.session.resident_trainer", str(self._folder)]
        try:
            with self._one_at_a_time(), self._furnished() as output:
                nursery = os.environ.get(NURSERY)
                variables = {**os.environ, FLOWER_IDS: asked_for.get()}
                if app_folder.get():
                    variables[APP] = app_folder.get()
                forked = Nursery(Path(nursery)).fork(command, variables, output.fileno()) if nursery else None
                process = forked or subprocess.Popen(
                    command,
                    env=variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._await_tenant(process)
                return process
        except OSError as error:
            problem = f"no trainer can be started here: {error.strerror}"
            raise ConfigError(str(self._folder), problem, "Check the folder and the disk") from error

    @contextlib.contextmanager
    def _furnished(self) -> Iterator[BinaryIO]:
        """The trainer's log, in a folder that is made where there is room for one more; it may have been removed."""
        make_room(self._folder, self._identity)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._identity.save(self._folder)
        os.utime(self._folder / IDENTITY)
        with (self._folder / LOG).open("ab") as output:
            yield output

    def _one_at_a_time(self) -> AbstractContextManager[bool]:
        """No other trainer of this silo is started meanwhile: those that start count, too."""
        return taken(self._folder.with_name(f"{self._identity.index}.starting"), _LISTEN_S)

    def _await_tenant(self, process: Child) -> None:
        """Wait until the folder has a tenant, so that who looks for trainers finds this one."""
        end_s = time.monotonic() + _LISTEN_S
        while tenant(self._folder) is None and process.poll() is None and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)

    def _tail(self) -> str:
        try:
            return tail(self._folder / LOG)
        except OSError:
            return ""


def make_room(folder: Path, identity: Identity) -> None:
    """Have other trainers of the same silo end that serve other runs and have nothing to do: they hold memory.

    Args:
        folder: of a trainer that is about to be started, and may not be there.
        identity: of the trainer.

    Raises:
        LimitReached: too many go on, or trainers' folders take all the room that the silo's owner gives them.
    """
    if not (folder / IDENTITY).exists():
        check_room(folder.parent, 0)
    mine = identity.index, identity.name
    others = [other for other in folder.parent.iterdir() if other != folder and _silo(other) == mine]
    for other in others:
        _tell(other, MakeRoom())
    if sum(tenant(other) is not None for other in others) >= MOST_TRAINERS:
        problem = f"{MOST_TRAINERS} runs are at work at this silo"
        raise LimitReached("trainers", problem, "Ask again once one of them has ended")


def check_room(trainers: Path, nbytes: int) -> None:
    """See that so many bytes more may be left in the folder of trainers.

    Raises:
        LimitReached: not as much as the silo's owner gives them.
    """
    quota = json.loads(os.environ.get(ALLOWED) or "{}").get("state_bytes")
    if quota is not None and not fits(trainers, quota - nbytes):
        problem = f"what runs have left here, and ask for, has more than {quota} bytes, the owner's state_bytes"
        remedy = "Raise state_bytes in silo.yaml, or ask again in an hour: then old runs may be removed"
        raise LimitReached("state_bytes", problem, remedy)


def stop_trainers(root: Path) -> None:
    """End every resident trainer whose folder is in ``root``; one that cannot be told to is killed."""
    for folder in root.glob("*"):
        pid = tenant(folder)
        if pid is not None:
            _tell(folder, Quit())
            if tenant(folder) == pid:
                end(folder, pid)


def _tell(folder: Path, request: SocketRequest) -> None:
    with contextlib.suppress(OSError, EOFError):
        connection = call(folder / SOCKET)
        if connection is not None:
            with connection:
                send(connection, request)
                connection.poll(_TELL_S)


def _silo(folder: Path) -> tuple[int, str] | None:
    """Whose trainer has this folder; None where that cannot be read."""
    try:
        identity = Identity.load(folder)
        return identity.index, identity.name
    except (OSError, ValueError):
        return None
