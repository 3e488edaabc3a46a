"""Nursery: a fork server, which imports libraries once and then forks other programs from itself.

It serves machines on which one operator runs many silos. Forks share its unmodified memory and save its import time. A
fork must behave like a new process. So the nursery has a single thread at the fork. The fork gets its own:

| resource | source |
|---|---|
| session, standard input, output | new; output goes to the descriptor in the request |
| arguments, environment, folder | from the request; the command line shows the arguments, so that `ps` finds it |
| random numbers | generators seeded at import are seeded again; keys and nonces come from the operating system |
| end | a fork outlives the nursery; its environment names the process with which it ends |

| state | action | goes to |
|---|---|---|
| loading | imports; requests wait | serving; ended, if the libraries then have threads or a device |
| serving | forks one program per request; sends its process id and later its exit code | ended |

The nursery ends with the process that started it, and is never restarted. Without it, programs are started directly;
see `fedsync.common.forking`.

Usage: ``python -m fedsync.common.nursery MODULE [ARGUMENT...] ROOM``, with the listening socket as standard input.
``MODULE.prepare(*arguments)`` imports, and returns a function that checks in a fork whether the fork is sound.
``MODULE.forked(arguments)`` is the program of a fork. ``ROOM`` reserves space for longer command lines.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from fedsync.common.forking import HEAD, HEAD_BYTES, MODULE_AT

_LOOK_S = 0.5
_REQUEST_S = 10.0
"""Timeout of a request's arrival [s]; a request comes from another process of the same user."""

_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Positions of the command line's addresses in ``/proc/PID/stat``, counted after the program's name."""


@dataclass(frozen=True, slots=True)
class _Fork:
    """Program that a fork becomes; ``output`` is the descriptor for all of its output."""

    command: Sequence[str]
    environment: dict[str, str]
    folder: str
    output: int


class _Nursery:
    """Server that forks one program per request; it ends with the process ``parent``."""

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self._listener = listener
        self._parent = parent
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._callers: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> _Fork | None:
        """Fork until this process must end. Returns in each fork with its program, and here with None."""
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fd != self._listener.fileno():
                    self._ended(key.fd)
                elif (fork := self._take()) is not None:
                    return fork
        return None

    def _take(self) -> _Fork | None:
        caller, _ = self._listener.accept()
        try:
            fork = _received(caller)
        except (OSError, ValueError, TypeError, struct.error):
            caller.close()
            return None
        number = _fork_for(caller)
        if number == 0:
            # A new process would not have these. Closing them in the fork affects no other process.
            for line in (caller, self._listener, *(line for _, line in self._callers.values())):
                line.close()
            for descriptor in self._callers:
                os.close(descriptor)
            self._selector.close()
            return fork
        os.close(fork.output)
        if number is None:
            caller.close()
        else:
            self._watch(number, caller)
        return None

    def _watch(self, number: int, caller: socket.socket) -> None:
        descriptor = os.pidfd_open(number)
        self._callers[descriptor] = number, caller
        self._selector.register(descriptor, selectors.EVENT_READ)
        _say(caller, number)

    def _ended(self, descriptor: int) -> None:
        number, caller = self._callers.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _say(caller, os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
        caller.close()


def _received(caller: socket.socket) -> _Fork:
    caller.settimeout(_REQUEST_S)
    head, descriptors, _, _ = socket.recv_fds(caller, HEAD_BYTES, 1)
    output = descriptors[0] if descriptors else -1
    try:
        with caller.makefile("rb") as file:
            (nbytes,) = HEAD.unpack(head)
            return _Fork(**json.loads(file.read(nbytes)), output=os.dup(output))
    finally:
        caller.settimeout(None)
        if descriptors:
            os.close(output)


def _fork_for(caller: socket.socket) -> int | None:
    """Fork and return 0 in the fork, its process id here, or None if the caller is gone or memory is short."""
    try:
        if caller.recv(1, socket.MSG_DONTWAIT) == b"":  # the caller has timed out and started the program itself
            return None
    except BlockingIOError:
        pass
    except OSError:
        return None
    try:
        return os.fork()
    except OSError:
        return None


def _say(caller: socket.socket, number: int) -> None:
    with suppress(OSError):  # the caller may be gone
        caller.sendall(b"%d\n" % number)


def _settle(fork: _Fork) -> None:
    os.setsid()
    os.dup2(fork.output, 1)
    os.dup2(fork.output, 2)
    os.close(fork.output)
    os.chdir(fork.folder)
    os.environ.clear()
    os.environ.update(fork.environment)
    sys.argv = [fork.command[MODULE_AT], *fork.command[MODULE_AT + 1 :]]
    # Python reseeds its own generator in every fork; NumPy's old global generator would be the same in all forks.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    _rename(fork.command)


def _rename(command: Sequence[str]) -> None:
    """Overwrite this process's command line, so that the system shows another one.

    Linux shows the whole area as one line with blanks if its last byte is not NUL.
    """
    place = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    begin, nbytes = int(place[_ARGUMENTS_BEGIN]), int(place[_ARGUMENTS_END]) - int(place[_ARGUMENTS_BEGIN])
    text = " ".join(command).encode()[: max(0, nbytes - 2)]
    if begin and text:
        ctypes.memmove(begin, text.ljust(nbytes - 1, b"\0") + b".", nbytes)


def _sound(check: Callable[[], bool]) -> bool:
    """Whether a test fork is complete; libraries may have threads, or may stop their threads before a fork."""
    number = os.fork()
    if number == 0:
        good = False
        with suppress(Exception):
            good = check()
        os._exit(0 if good else 1)
    _, status = os.waitpid(number, 0)
    return status == 0 and len(list(Path("/proc/self/task").iterdir())) == 1


def main(module: str, arguments: Sequence[str]) -> None:
    parent = os.getppid()
    listener = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _rename([*sys.orig_argv[: MODULE_AT + 2], *arguments])
    begun_s = time.monotonic()
    program = import_module(module)
    check = program.prepare(*arguments)
    # Freeze existing objects: a garbage collection in a fork would write to all of their shared memory.
    gc.collect()
    gc.freeze()
    if not _sound(check):
        sys.exit(f"{module}: its libraries have threads or a device by now; programs are started by themselves")
    print(f"{module}: ready after {time.monotonic() - begun_s:.1f} s", flush=True)
    fork = _Nursery(listener, parent).serve()
    if fork is not None:
        _settle(fork)
        program.forked(list(fork.command[MODULE_AT + 1 :]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:-1])
