"""The program of a silo's training process: goes into its room, and does there what its session asks.

The room (`fedsync.common.sandbox.confinement`) has the programs, the owner's data folders and a folder of its own; no keys, no
state, no network, no memory of another process. It is entered before anything is imported that may start a thread.

Usage: ``python -m fedsync.silo.room.program DESCRIPTOR``, with a line ``[home, [what may be read]]`` on it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.confinement import Room, confine, own_namespaces, own_sources, settle_in
from fedsync.silo.room.guard import watch

_MOST_LINE, _DEATH_SIGNAL = 2**24, 1
_DEVICES = ("null", "nvidia*", "nvidia-caps/*", "kfd", "dri")


def enter(home: Path, data: list[str]) -> bool:
    """Go into the room, for good; returns whether there is a network in it, of this process alone.

    Raises:
        ConfigError: this system cannot confine a process.
    """
    programs, sources = own_sources()
    settle_in(home)
    alone = own_namespaces()
    devices = tuple(path for name in _DEVICES for path in Path("/dev").glob(name))
    room = Room(
        readable=(*programs, *map(Path, data), Path("/sys")),
        writable=(home, Path("/dev/shm")) if alone else (home,),  # its own, where it is alone
        listed=sources,
        devices=devices,
        network="own" if alone else "none",
    )
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise ConfigError("confinement", "there are threads already", "Report this as a bug of FedSync's")
    confine(room)
    return alone


def main(end: socket.socket) -> None:
    """Go into the room, and work; the process that was started stays outside and guards the one that works."""
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


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
