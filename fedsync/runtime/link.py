"""The way from a ClientApp to the silo's resident trainer: finds it, or starts it. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.core.errors import ConfigError, RunError
from fedsync.core.exchange import Payload
from fedsync.core.journal import decode, encode
from fedsync.core.layout import Layout, Vector
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder, WorkReport
from fedsync.runtime.answers import ERROR, IDENTITY, LOG, SOCKET, STATE, Answer, Finished, Identity, Lacking, Working

_START_TIMEOUT_S = 180.0


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


class ResidentLink:
    """Asks one silo's resident trainer; each request is a connection of its own.

    Args:
        identity: which silo of which run; another run begins anew.

    Raises:
        ConfigError: task, data or device are not usable here.
        RunError: the trainer cannot be started.
    """

    def __init__(self, identity: Identity) -> None:
        text = json.dumps(dataclasses.asdict(identity))
        key = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._folder = state_folder() / key
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._socket = self._folder / SOCKET
        (self._folder / IDENTITY).write_text(text, encoding="utf-8")
        described = self._ask({"do": "describe"})[0]
        self.name = str(described["name"])
        self.facts: SiloFacts = decode(SiloFacts, described["facts"])
        shapes = tuple(tuple(shape) for shape in described["layout"]["shapes"])
        self.layout = Layout(tuple(described["layout"]["names"]), shapes)
        self.sealed = bool(described["sealed"])

    @property
    def alive(self) -> bool:
        """Whether the trainer listens."""
        connection = _connect(self._socket)
        if connection is not None:
            connection.close()
        return connection is not None

    def initial_model(self) -> Vector:
        """See `fedsync.runtime.desk.Desk.initial_model`."""
        model = self._ask({"do": "model"})[1]
        if model is None:
            raise RunError(f"the resident trainer in {self._folder} sent no model")
        return model

    @property
    def holds(self) -> int:
        """See `fedsync.runtime.desk.Desk.holds`."""
        return int(self._ask({"do": "describe"})[0]["holds"])

    def greeting(self) -> Payload | None:
        """See `fedsync.runtime.desk.Desk.greeting`."""
        return self._ask({"do": "greeting"})[1]

    def train(self, order: WorkOrder, brought: Payload, wait_s: float | None) -> Answer:
        """See `fedsync.runtime.desk.Desk.train`."""
        return self._answer({"do": "train", "order": encode(order), "wait_s": wait_s}, brought)

    def collect(self, update_id: str, wait_s: float | None, *, halt: bool) -> Answer:
        """See `fedsync.runtime.desk.Desk.collect`."""
        return self._answer({"do": "collect", "update_id": update_id, "wait_s": wait_s, "halt": halt}, None)

    def evaluate(self, brought: Payload, version: int) -> Evaluation | Lacking:
        """See `fedsync.runtime.desk.Desk.evaluate`."""
        answer = self._ask({"do": "evaluate", "version": version}, brought)[0]
        if "holds" in answer:
            return Lacking(answer["holds"])
        evaluation: Evaluation = decode(Evaluation, answer["evaluation"])
        return evaluation

    def answer(self, question: Payload) -> Payload:
        """See `fedsync.runtime.desk.Desk.answer`."""
        answer = self._ask({"do": "question"}, question)[1]
        if answer is None:
            raise RunError(f"the resident trainer in {self._folder} sent no answer")
        return answer

    def snapshot(self) -> tuple[int, Payload]:
        """See `fedsync.runtime.desk.Desk.snapshot`."""
        answer, snapshot = self._ask({"do": "snapshot"})
        if snapshot is None:
            raise RunError(f"the resident trainer in {self._folder} sent no snapshot")
        return answer["holds"], snapshot

    def _answer(self, request: dict[str, Any], brought: Payload | None) -> Answer:
        answer, update = self._ask(request, brought)
        if update is not None:
            return Finished(decode(WorkReport, answer["report"]), update)
        return Lacking(answer["holds"]) if "holds" in answer else Working(answer["steps"], answer["samples"])

    def _ask(self, request: dict[str, Any], brought: Payload | None = None) -> tuple[dict[str, Any], Payload | None]:
        with self._connection() as connection:
            kind = None if brought is None else brought.dtype.name
            try:
                connection.send_bytes(json.dumps({**request, "payload": kind}).encode())
                if brought is not None:
                    connection.send_bytes(brought.tobytes())
                answer = json.loads(connection.recv_bytes())
                kind = answer.get("payload")
                update = np.frombuffer(connection.recv_bytes(), dtype=kind) if kind else None
            except (EOFError, ConnectionError) as error:
                raise RunError(f"the resident trainer in {self._folder} died; see its log") from error
        if "error" in answer:
            raise _error(answer["error"])
        return answer, update

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        connection = _connect(self._socket)
        if connection is None:
            connection = self._start()
        with connection:
            yield connection

    def _start(self) -> Connection:
        """Start the trainer, unless another process is just doing so."""
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = _connect(self._socket)
            if connection is not None:
                return connection
            make_room(self._folder)
            (self._folder / ERROR).unlink(missing_ok=True)
            log = self._folder / LOG
            with log.open("ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "fedsync.runtime.resident", str(self._folder)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            end = time.monotonic() + _START_TIMEOUT_S
            while time.monotonic() < end:
                connection = _connect(self._socket)
                if connection is not None:
                    return connection
                if process.poll() is not None:
                    break
                time.sleep(0.05)
            process.kill()
            process.wait()
            if (self._folder / ERROR).exists():
                raise _error(json.loads((self._folder / ERROR).read_text(encoding="utf-8")))
            raise RunError(f"the resident trainer did not start; see {log}")


def make_room(folder: Path) -> None:
    """Have other trainers of the same silo end that serve other runs and have nothing to do: they hold memory.

    Args:
        folder: of a trainer that is about to be started.
    """
    for other in folder.parent.iterdir():
        if other != folder and _silo(other) == _silo(folder):
            _tell(other / SOCKET, "make room")


def stop_trainers(root: Path) -> None:
    """Tell every resident trainer whose folder is in ``root`` to end."""
    for socket in root.glob(f"*/{SOCKET}"):
        _tell(socket, "stop")


def _tell(socket: Path, request: str) -> None:
    connection = _connect(socket)
    if connection is not None:
        with connection, contextlib.suppress(OSError, EOFError):
            connection.send_bytes(json.dumps({"do": request, "payload": None}).encode())
            connection.recv_bytes()


def _silo(folder: Path) -> tuple[int, str] | None:
    """Whose trainer has this folder; None where that cannot be read."""
    try:
        identity = Identity.load(folder)
        return identity.index, identity.name
    except (OSError, ValueError):
        return None


def _connect(socket: Path) -> Connection | None:
    try:
        return Client(str(socket), family="AF_UNIX")
    except (FileNotFoundError, ConnectionRefusedError):
        return None


def _error(described: dict[str, str]) -> ConfigError | RunError:
    if "place" in described:
        return ConfigError(described["place"], described["problem"], described["remedy"])
    return RunError(described["message"])
