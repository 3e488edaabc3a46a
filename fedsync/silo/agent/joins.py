"""How a silo's agent learns of a run: a file for each join, and a touch on the agent's socket.

The agent may be there, or be started by who hands the join over. The file is there before, so none is lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self

from fedsync.common.errors import ProtocolError, RunError
from fedsync.common.files import OWNER_FILE, private_folder, write_atomically
from fedsync.common.locks import taken
from fedsync.common.processes import INTERPRETER
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.silo.session.connection import call
from fedsync.transport.join import Join

FOLDER, SOCKET, LOG, LOCK = "agent", "agent.sock", "agent.log", "agent.lock"
"""The agent's folder, in that of the silo's trainers, and what is in it."""

JOIN, SESSION = ".join", ".session"
"""Suffixes of files: of a join that was handed over, and of a session that the agent has begun."""

QUIT = b"q"
"""Has the agent end."""

INBOX_FOLDER, INBOX = "inbox", "FEDSYNC_INBOX"
"""Folder of joins in the agent's, and the environment variable that names it to a ClientApp in its room."""

MOST_FILES, MOST_JOINS, MOST_BYTES = 1024, 64, 2**18
"""Files that are looked at a time, joins that are taken, and bytes of one."""

OWN_NODE = "FEDSYNC_NODE"
"""Environment variable of the agent: the node's configuration as its owner has it, in the place of what joins say."""

JOINED = "joined"
"""What a silo answers to a join that its agent has."""

LOOPBACK = ("localhost", "127.0.0.1", "::1")

MODULE = "fedsync.silo.agent.agent"
_LISTEN_S, _PAUSE_S, _UNFINISHED_S, _STOP_S = 60.0, 0.05, 10.0, 10.0


@dataclass(frozen=True, slots=True)
class JoinedRun:
    """A silo's part in a run, as its ClientApp hands it over.

    Args:
        join: the way to the hub, as text.
        node: configuration of the silo's node.
        run: configuration of the run.
        ids: of run and node, see `fedsync.common.environment.FLOWER_IDS`.
        app: folder of the Flower app that the run brought along; empty for none.
        secret: of the session; empty until the agent begins it.
    """

    join: str
    node: dict[str, Any]
    run: dict[str, Any]
    ids: str
    app: str = ""
    secret: str = ""

    def is_sound(self) -> bool:
        """Whether all of it is of the kind that it should be."""
        texts = (self.join, self.ids, self.app, self.secret)
        return (
            all(isinstance(each, str) for each in texts) and isinstance(self.node, dict) and isinstance(self.run, dict)
        )

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)).encode(), OWNER_FILE)

    @classmethod
    def load(cls, path: Path) -> Self:
        """The inverse of `save`; an `OSError` or `ValueError` where there is none."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except TypeError as error:
            raise ValueError(str(error)) from error


def name_of(join: Join) -> str:
    """Files of a silo's session in a run are called so."""
    return hashlib.sha256(f"{join.run} {join.silo}".encode()).hexdigest()[:16]


def trusted(join: Join, node: Mapping[str, Any]) -> Join:
    """The join as far as the silo's owner admits it, see `Join.trusted`.

    The owner is asked by ``silo.yaml``. A SuperNode that was started by hand says ``hub-hosts="fed.example.org"`` in
    its node configuration; without it the hub may be on this machine.

    Raises:
        ConfigError: the hub is at none of the owner's hosts.
    """
    owner = json.loads(os.environ.get(ALLOWED) or "{}")
    hosts = owner.get("hub_hosts") or str(node.get("hub-hosts", "")).split(",")
    authority = owner.get("authority") or node.get("hub-authority")
    pem = None if authority is None else Path(str(authority)).read_text(encoding="ascii")
    here = not owner or set(hosts) & set(LOOPBACK)  # names of one machine
    return join.trusted({*LOOPBACK, *hosts} if here else hosts, pem)


def hand_over(state: Path, joined: JoinedRun) -> None:
    """Have the silo's agent join a run; one is started where none answers.

    Args:
        state: folder of the silo's trainers.
        joined: what is handed over.

    Raises:
        ProtocolError: the join is none.
        RunError: no agent can be started.
    """
    folder = private_folder(state / FOLDER)
    drop(private_folder(folder / INBOX_FOLDER), joined)
    end_s = time.monotonic() + _LISTEN_S
    started: subprocess.Popen[bytes] | None = None
    while not touch(folder):
        if started is None or started.poll() is not None:
            started = _start(folder)
        if time.monotonic() > end_s:
            raise RunError(f"no agent answers in {folder}; see {folder / LOG}")
        time.sleep(_PAUSE_S)


def drop(inbox: Path, joined: JoinedRun) -> None:
    """Put a join into an agent's inbox, which looks there every second; raises as `hand_over`."""
    part = inbox / f"{secrets.token_hex(8)}.part"
    try:
        # Nothing is read there, nor listed: who is in the room may do neither.
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_FILE), "wb") as file:
            file.write(json.dumps(asdict(joined)).encode())
        part.rename(inbox / f"{name_of(Join.parse(joined.join))}{JOIN}")
    except OSError as error:
        raise RunError(f"a join cannot be put into {inbox}: {error.strerror}") from error


def dropped(inbox: Path) -> dict[str, JoinedRun]:
    """Joins in an inbox by the names of their sessions; they are taken out. What is none goes, and what is too much.

    Whoever puts files there may be the server's code, so nothing of them is believed.
    """
    found, unfinished = dict[str, JoinedRun](), time.time() - _UNFINISHED_S
    with os.scandir(inbox) as entries:
        for entry in islice(entries, MOST_FILES):
            if not entry.name.endswith(JOIN) and _is_young(entry, unfinished):
                continue  # it is being written
            joined = _read(Path(entry.path)) if entry.name.endswith(JOIN) and len(found) < MOST_JOINS else None
            if joined is not None:
                found[entry.name.removesuffix(JOIN)] = joined
            _remove(Path(entry.path))
    return found


def _is_young(entry: os.DirEntry[str], since_s: float) -> bool:
    with suppress(OSError):
        return since_s < entry.stat(follow_symlinks=False).st_mtime <= time.time()
    return False


def _read(file: Path) -> JoinedRun | None:
    """A join in a file that is named as it should be; None where it is anything else."""
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            text = opened.read(MOST_BYTES + 1) if stat.S_ISREG(os.fstat(opened.fileno()).st_mode) else b""
        joined = JoinedRun(**json.loads(text)) if 0 < len(text) <= MOST_BYTES else None
        if joined is None or not joined.is_sound():
            return None
        return joined if file.name == f"{name_of(Join.parse(joined.join))}{JOIN}" else None
    except (OSError, ValueError, TypeError, RecursionError, ProtocolError):
        return None


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)


def touch(folder: Path, word: bytes = b"") -> bool:
    """Have the agent look for joins, or do what the word says; False where none is there."""
    try:
        connection = call(folder / SOCKET)
    except BlockingIOError:
        return True
    if connection is None:
        return False
    with connection, suppress(OSError):
        if word:
            os.write(connection.fileno(), word)
    return True


def stop_agent(state: Path) -> None:
    """End the agent of a folder of trainers, if there is one, and wait until it is gone."""
    folder = state / FOLDER
    if touch(folder, QUIT):
        with taken(folder / LOCK, _STOP_S):
            pass


def _start(folder: Path) -> subprocess.Popen[bytes]:
    with (folder / LOG).open("ab") as output:
        try:
            return subprocess.Popen(
                [*INTERPRETER, MODULE, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"no agent can be started in {folder}: {error.strerror}") from error
