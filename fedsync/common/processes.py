"""Ends processes with all that they started, and this one with its owner."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

INTERPRETER = (sys.executable, "-P", "-m")
"""Begin of a command that runs a module, and imports nothing from the folder in which it is started."""


def safe_paths() -> None:
    """Have no process that this one starts import from the folder in which it is started."""
    os.environ["PYTHONSAFEPATH"] = "1"


MOST_FILES = 65536
"""Files that a server needs at most; some programs go through all that they may have."""

_KILLED_S = 5.0

OWNER = "FEDSYNC_OWNER_PID"
"""Environment variable: process with which all resident trainers end, if it is set."""


class Child(Protocol):
    """A process that this one has started, or has had forked: see `fedsync.common.forking`."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""

    def wait(self) -> int:
        """Its exit code, once it has ended."""


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody listens on at the moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def raise_file_limit() -> int:
    """Let this process, and those that it starts, have as many files as the system allows, up to `MOST_FILES`.

    Returns:
        How many files that is.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return MOST_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def end_processes(leaders: Sequence[Child], grace_s: float = 5.0) -> None:
    """End processes that lead groups, and what they started: ask in order, wait so long [s], then kill."""
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
    """Whether a process runs; one that ended and that its parent has not asked after does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def exit_with_parent(parent: int) -> None:
    """End this process soon after the one that started it is gone, however it went."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def exit_with_owner() -> None:
    """End this process soon after the one that `OWNER` names is gone; where nobody is named, never.

    For processes that Flower started, whose parents may go and leave them behind.
    """
    owner = int(os.environ.get(OWNER, 0))
    if owner == 0:
        return

    def watch() -> None:
        while alive(owner):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
