"""Termination of processes together with all their children, and end of this process when its owner process ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol

import psutil

INTERPRETER = (sys.executable, "-P", "-m")
"""First words of a command that runs a module without imports from its working folder."""


def safe_paths() -> None:
    """Keep the processes that this process starts from importing modules of their working folder."""
    os.environ["PYTHONSAFEPATH"] = "1"


MOST_FILES = 65536
"""Most open files that a server needs; a limit, because some programs loop over all allowed descriptors."""

_KILLED_S = 5.0

OWNER = "FEDSYNC_OWNER_PID"
"""Environment variable: id of the process with which all resident trainers end, if set."""


class Child(Protocol):
    """Process that this process has started, or has had forked; see `fedsync.common.fork_server`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, after a signal negative, or 1 for a fork of the fork server; None while the process runs."""

    def wait(self) -> int:
        """Return the exit code at the end of the process."""


def start_apart(
    command: Sequence[str],
    output: int | IO[bytes],
    environment: Mapping[str, str] | None = None,
    pass_fds: Collection[int] = (),
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        env=environment, pass_fds=pass_fds, start_new_session=True,
    )  # fmt: skip


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as bound:
        sockets = [bound.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def listen_error(host: str, port: int) -> OSError | None:
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
    except OSError as error:
        return error
    return None


def raise_file_limit() -> None:
    """Raise the open-file limit of this process and its children to at most `MOST_FILES`, if the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def end_processes(leaders: Sequence[Child], grace_s: float = 5.0) -> None:
    """End process groups with all children: SIGTERM in order, ``grace_s`` [s] of waiting, then SIGKILL."""
    doomed: list[psutil.Process] = []
    for leader in leaders:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(leader.pid)
            doomed += [process, *process.children(recursive=True)]
        _signal_group(leader.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(doomed, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for leader in leaders:
        _signal_group(leader.pid, signal.SIGKILL)
        leader.wait()
    psutil.wait_procs(alive, timeout=_KILLED_S)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tail(log: Path, lines: int = 15) -> str:
    return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def exit_with_owner() -> None:
    """End this process soon after the process in `OWNER`, if set: Flower's processes may outlive their parents."""
    owner = int(os.environ.get(OWNER, 0))

    def watch() -> None:
        while alive(owner):
            time.sleep(0.5)
        os._exit(1)

    if owner:
        threading.Thread(target=watch, daemon=True).start()
