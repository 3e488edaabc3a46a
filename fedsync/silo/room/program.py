"""Program of a silo's training process: confines itself (enters the *room*), then serves the silo's session.

The room (`fedsync.common.sandbox.confinement`) holds the programs, the owner's data folders and a private folder. It
has no keys, no state, no network and no memory of another process. The process enters the room before any import that
may start a thread.

Usage: ``python -m fedsync.silo.room.program FD``. FD is a socket, whose first line is ``[home, [readable paths]]``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.confinement import Room, confine, own_namespaces, own_sources, settle_in

_MOST_LINE, _DEATH_SIGNAL = 2**24, 1
_DEVICES = ("null", "nvidia*", "nvidia-caps/*", "kfd", "dri")


def enter(home: Path, data: list[str]) -> bool:
    """Enter the room irreversibly; return whether the process has namespaces, and so a network, of its own.
    `ConfigError` if this system cannot confine a process.
    """
    programs, sources = own_sources()
    settle_in(home)
    alone = own_namespaces()
    devices = tuple(path for name in _DEVICES for path in Path("/dev").glob(name))
    room = Room(
        readable=(*programs, *map(Path, data), Path("/sys")),
        writable=(home, Path("/dev/shm")) if alone else (home,),  # with own namespaces, /dev/shm is private
        listed=sources,
        devices=devices,
        network="own" if alone else "none",
    )
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise ConfigError("confinement", "there are threads already", "Report this as a bug of FedSync's")
    confine(room)
    return alone


def main(end: socket.socket) -> None:
    """Fork the training process into the room; the parent stays outside as its guard."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _MOST_LINE:
        part = end.recv(1)
        if not part:
            return
        text += part
    parent, mask = os.getppid(), {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, mask)
    inner = os.fork()
    if inner != 0:
        end.close()
        watch(inner, parent)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    home, data = json.loads(text)
    failure: ConfigError | None = None
    alone = False
    try:
        alone = enter(Path(home), data)
    except ConfigError as error:
        failure = error
    from fedsync.silo.room.room_work import serve

    serve(end, alone=alone, failure=failure)


_END_S = 5.0


def watch(inner: int, parent: int) -> None:
    """Guard the process ``inner``: kill its group at its end, on SIGTERM, or without ``parent``, and exit as it did. No
    process can leave the group, and no user's code runs in the guard.
    """
    signals = {signal.SIGCHLD, signal.SIGTERM}
    while os.waitid(os.P_PID, inner, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and os.getppid() == parent:
        came = signal.sigtimedwait(signals, 0.5)
        if came is not None and came.si_signo == signal.SIGTERM:
            break
    with suppress(ProcessLookupError):
        os.killpg(inner, signal.SIGKILL)
    _, status = os.waitpid(inner, 0)
    end_s = time.monotonic() + _END_S
    with suppress(ProcessLookupError):
        while time.monotonic() < end_s:
            os.killpg(inner, 0)
            time.sleep(0.01)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
