"""Child processes of a local federation: started, watched, and all ended again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedsync.core.errors import RunError

_GRACE_S = 5.0

OWNER = "FEDSYNC_OWNER_PID"
"""Environment variable: process with which all resident trainers end, if it is set."""


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


@dataclass(frozen=True, slots=True)
class Child:
    """One process: what it is to the run, and where its output goes."""

    role: str
    process: subprocess.Popen[bytes]
    log: Path


class Children:
    """Starts processes and ends them, with everything that they started.

    Args:
        logs: folder for their output.
        environment: of all of them.
    """

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._environment = dict(environment)
        self._children: list[Child] = []

    def start(self, role: str, command: Sequence[str], more: Mapping[str, str] | None = None) -> Child:
        """Start a process whose output goes to ``<role>.log``, with ``more`` in its environment."""
        log = self._logs / f"{role}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**self._environment, **(more or {})},
                # A group of its own: Ctrl-C goes to the one who started us, who then ends the children in order.
                start_new_session=True,
            )
        child = Child(role, process, log)
        self._children.append(child)
        return child

    def check(self) -> None:
        """Raise `RunError`, with the end of its output, if a process has ended by itself."""
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                raise RunError(f"{child.role} ended with code {code}; the end of {child.log}:\n{tail(child.log)}")

    def stop(self) -> None:
        """End all, youngest first: ask, wait, then kill. Safe to call twice."""
        end_processes([child.process for child in reversed(self._children)])
        self._children.clear()


def end_processes(leaders: Sequence[subprocess.Popen[bytes]]) -> None:
    """End processes that lead groups, and what they started: ask in order, wait, then kill."""
    doomed: list[psutil.Process] = []
    for leader in leaders:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(leader.pid)
            doomed += [process, *process.children(recursive=True)]
        _signal_group(leader.pid, signal.SIGTERM)
    _, alive = psutil.wait_procs(doomed, timeout=_GRACE_S)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for leader in leaders:
        _signal_group(leader.pid, signal.SIGKILL)
        leader.wait()
    psutil.wait_procs(alive, timeout=_GRACE_S)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and that its parent has not asked after does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tail(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def wait_for_port(port: int, timeout_s: float, children: Children) -> None:
    """Wait until somebody listens on a loopback port.

    Raises:
        RunError: nobody does in time, or a child has ended.
    """
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        children.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise RunError(f"nothing listens on port {port} after {timeout_s:g} s")


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
