"""Invitations to runs (*joins*): a file for each, which a confined ClientApp hands to the silo's agent process.

Flower starts the ClientApp that the server's bundle names, in a process of the silo's user. Confined without keys or
data, this process may do one thing: put a join into the agent's inbox. The sender of a join starts the agent if the
agent does not run. The file is written first, so no join is lost.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
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
from fedsync.common.processes import INTERPRETER, OWNER, start_apart
from fedsync.common.sandbox.confinement import Room, confine, emptied, own_sources, settle_in
from fedsync.common.sandbox.path_sandbox import ALLOWED, allowed_here
from fedsync.silo.session.trainer_folder import AGENT
from fedsync.silo.session.trainer_socket import call
from fedsync.transport.join import Join, read_authority

# The agent's folder, below the folder of the silo's trainers, and files in it.
FOLDER, SOCKET, LOG, LOCK = AGENT, "agent.sock", "agent.log", "agent.lock"

JOIN, SESSION = ".join", ".session"  # suffixes of a received join, and of a session that has begun

QUIT = b"q"  # ends the agent

INBOX_FOLDER, INBOX = "inbox", "FEDSYNC_INBOX"  # in the agent's folder; variable that names it to a confined ClientApp

MOST_FILES, MOST_JOINS, MOST_BYTES = 1024, 64, 2**18  # limits of one look into the inbox; size of a join

OWN_NODE = "FEDSYNC_NODE"  # the owner's node configuration, which overrides that of joins

JOINED = "joined"  # answer of a silo to a join that its agent has received

LOOPBACK = ("localhost", "127.0.0.1", "::1")

MODULE = "fedsync.silo.agent.agent"
_LISTEN_S, _PAUSE_S, _UNFINISHED_S, _STOP_S = 60.0, 0.05, 10.0, 10.0


@dataclass(frozen=True, slots=True)
class JoinedRun:
    """A silo's part in a run, as its ClientApp passes it on. ``join`` is the hub's connection data, ``ids`` the value
    of `FLOWER_IDS`, ``app`` the folder of the run's Flower app, or empty, and ``secret`` the session's secret, empty
    until the agent begins it.
    """

    join: str
    node: dict[str, Any]
    run: dict[str, Any]
    ids: str
    app: str = ""
    secret: str = ""

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)).encode(), OWNER_FILE)

    @classmethod
    def load(cls, path: Path) -> Self:
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except TypeError as error:
            raise ValueError(str(error)) from error


def name_of(join: Join) -> str:
    return hashlib.sha256(f"{join.run} {join.silo}".encode()).hexdigest()[:16]


def trusted(join: Join, node: Mapping[str, Any]) -> Join:
    """Return the join restricted to the hosts that the silo's owner allows; raises as `Join.trusted`. Rules are in
    ``silo.yaml``, or in the configuration of a SuperNode started by hand: ``hub-hosts="fed.example.org"``. Without any
    rule, the hub may also be on this machine.
    """
    owner = allowed_here()
    hosts = owner.get("hub_hosts") or str(node.get("hub-hosts", "")).split(",")
    authority = owner.get("authority") or node.get("hub-authority")
    pem = None if authority is None else read_authority(Path(str(authority)))
    here = not owner or set(hosts) & set(LOOPBACK)  # all loopback names mean the same machine
    return join.trusted({*LOOPBACK, *hosts} if here else hosts, pem)


def hand_over(state: Path, joined: JoinedRun) -> None:
    """Pass a join to the silo's agent below the trainers' folder ``state``; start the agent if none answers.
    `ProtocolError` if the join is invalid; `RunError` if no agent can be started.
    """
    folder = private_folder(state / FOLDER)
    drop(private_folder(folder / INBOX_FOLDER), joined)
    end_s = time.monotonic() + _LISTEN_S
    started: subprocess.Popen[bytes] | None = None
    while not touch(folder):
        if started is None or started.poll() is not None:
            try:
                with (folder / LOG).open("ab") as output:
                    started = start_apart([*INTERPRETER, MODULE, str(folder)], output)
            except OSError as error:
                raise RunError(f"no agent can be started in {folder}: {error.strerror}") from error
        if time.monotonic() > end_s:
            raise RunError(f"no agent answers in {folder}; see {folder / LOG}")
        time.sleep(_PAUSE_S)


def drop(inbox: Path, joined: JoinedRun) -> None:
    """Put a join into an agent's inbox, which the agent reads every second; raises as `hand_over`."""
    part = inbox / f"{secrets.token_hex(8)}.part"
    try:
        # The inbox is neither read nor listed here, because a confined ClientApp may only write to it.
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_FILE), "wb") as file:
            file.write(json.dumps(asdict(joined)).encode())
        part.rename(inbox / f"{name_of(Join.parse(joined.join))}{JOIN}")
    except OSError as error:
        raise RunError(f"a join cannot be put into {inbox}: {error.strerror}") from error


def dropped(inbox: Path) -> dict[str, JoinedRun]:
    """Take the joins out of an inbox, by session, and remove all else: the server's code may have written anything."""
    found, unfinished = dict[str, JoinedRun](), time.time() - _UNFINISHED_S
    with os.scandir(inbox) as entries:
        for entry in islice(entries, MOST_FILES):
            if not entry.name.endswith(JOIN):
                with suppress(OSError):
                    if unfinished < entry.stat(follow_symlinks=False).st_mtime <= time.time():
                        continue  # still being written
            joined = _read(Path(entry.path)) if entry.name.endswith(JOIN) and len(found) < MOST_JOINS else None
            if joined is not None:
                found[entry.name.removesuffix(JOIN)] = joined
            _remove(Path(entry.path))
    return found


def _read(file: Path) -> JoinedRun | None:
    try:
        with os.fdopen(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
            text = opened.read(MOST_BYTES + 1) if stat.S_ISREG(os.fstat(opened.fileno()).st_mode) else b""
        joined = JoinedRun(**json.loads(text)) if 0 < len(text) <= MOST_BYTES else None
        if joined is None or not isinstance(joined.node, dict) or not isinstance(joined.run, dict):
            return None
        if not all(isinstance(each, str) for each in (joined.join, joined.ids, joined.app, joined.secret)):
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
    """Wake the agent up to look for joins or to obey ``word``; return False if no agent listens."""
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
    folder = state / FOLDER
    if touch(folder, QUIT):
        with taken(folder / LOCK, _STOP_S):
            pass


_PYTHON = ("PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONPATH")
_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", *_PYTHON, ALLOWED, INBOX, OWNER)
_KEPT_PREFIXES = ("FLWR_", "RAY_")


def enter(home: Path, inbox: Path, port: int, secret: Path) -> None:
    """Enter the room irreversibly; ``home`` is emptied first. `ConfigError` if this system cannot confine."""
    for name in list(os.environ):
        if name not in _KEPT and not name.startswith(_KEPT_PREFIXES):
            del os.environ[name]
    emptied(home)
    for limit, most in ((resource.RLIMIT_FSIZE, 2**30), (resource.RLIMIT_AS, 2**35)):
        resource.setrlimit(limit, (most, most))
    settle_in(home)
    programs, sources = own_sources()
    confine(Room((*programs, secret), (home,), inbox, (port,), sources))
