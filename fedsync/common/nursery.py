"""A process that has imported what many others need, and forks them: they share its memory, and start at once.

It is for machines on which one operator runs many silos. Memory that nobody writes to is there once for all of them,
and imports are paid for once. A fork is to be as good as a new process, so there is one thread when it happens, and the
fork gets of its own:

| what | how |
|---|---|
| session, standard input, output | made anew; output goes to the descriptor that comes with the request |
| arguments, environment, folder | come with the request; the command line says them too, so that `ps` finds it |
| random numbers | those that are seeded at import are seeded again; keys and nonces are the operating system's anyway |
| end | a fork outlives the nursery; it ends with whom it would end with if it had been started by itself |

| state | what it does | goes to |
|---|---|---|
| loading | imports; requests wait | serving; ended, where the libraries have threads or a device by then |
| serving | forks one program a request, and says its number, and later its exit code | ended |

It ends with the process that started it. Nobody restarts it: without it programs are started by themselves, see
`fedsync.common.forking`.

Usage: ``python -m fedsync.common.nursery MODULE [ARGUMENT...] ROOM``, with the socket to listen on as standard input.
``MODULE.prepare(*arguments)`` imports, and returns what a fork asks whether it is sound. ``MODULE.forked(arguments)``
is what a fork does. ``ROOM`` is for longer command lines.
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
"""How long a request may take to arrive [s]; it is one process of the same user that sends it."""

_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Where ``/proc/PID/stat`` says where the command line is in memory; counted from behind the program's name."""


@dataclass(frozen=True, slots=True)
class _Fork:
    """What a fork is to become.

    Args:
        command: as it would be started by itself.
        environment: all of its variables.
        folder: its working folder.
        output: descriptor for all that it says.
    """

    command: Sequence[str]
    environment: dict[str, str]
    folder: str
    output: int


class _Nursery:
    """Forks one program for each request.

    Args:
        listener: where requests come in.
        parent: number of the process that this one ends with.
    """

    def __init__(self, listener: socket.socket, parent: int) -> None:
        self._listener = listener
        self._parent = parent
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._callers: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> _Fork | None:
        """Fork until this process is to end. Returns twice: in each fork with what it is to become, and here None."""
        while os.getppid() == self._parent:
            for key, _ in self._selector.select(_LOOK_S):
                if key.fd != self._listener.fileno():
                    self._ended(key.fd)
                elif (fork := self._take()) is not None:
                    return fork
        return None

    def _take(self) -> _Fork | None:
        """Take a request and fork; what was asked for is returned in the fork only."""
        caller, _ = self._listener.accept()
        try:
            fork = _received(caller)
        except (OSError, ValueError, TypeError, struct.error):
            caller.close()
            return None
        number = _fork_for(caller)
        if number == 0:
            # What a new process would not have. Closing them ends nothing: the nursery has its own.
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
        """Say which process it is, and take note when it ends."""
        descriptor = os.pidfd_open(number)
        self._callers[descriptor] = number, caller
        self._selector.register(descriptor, selectors.EVENT_READ)
        _say(caller, number)

    def _ended(self, descriptor: int) -> None:
        """Tell whoever asked for it how a fork ended."""
        number, caller = self._callers.pop(descriptor)
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _say(caller, os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]))
        caller.close()


def _received(caller: socket.socket) -> _Fork:
    """The request; see `fedsync.common.forking`."""
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
    """Fork: 0 in the fork, its number here; None where nobody waits for it any more, or there is no memory for it."""
    try:
        if caller.recv(1, socket.MSG_DONTWAIT) == b"":  # It has lost patience, and started the program by itself.
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
    with suppress(OSError):  # Who asked may be gone.
        caller.sendall(b"%d\n" % number)


def _settle(fork: _Fork) -> None:
    """Become, in a fork, the process that was asked for."""
    os.setsid()
    os.dup2(fork.output, 1)
    os.dup2(fork.output, 2)
    os.close(fork.output)
    os.chdir(fork.folder)
    os.environ.clear()
    os.environ.update(fork.environment)
    sys.argv = [fork.command[MODULE_AT], *fork.command[MODULE_AT + 1 :]]
    # Python seeds its own generator anew in every fork; NumPy's old global one would be the same in all of them.
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    _rename(fork.command)


def _rename(command: Sequence[str]) -> None:
    """Have the system show this command line for this process, by writing over the one that it was started with.

    Linux shows one line, with blanks, where the last byte is none that ends a string.
    """
    place = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    begin, nbytes = int(place[_ARGUMENTS_BEGIN]), int(place[_ARGUMENTS_END]) - int(place[_ARGUMENTS_BEGIN])
    text = " ".join(command).encode()[: max(0, nbytes - 2)]
    if begin and text:
        ctypes.memmove(begin, text.ljust(nbytes - 1, b"\0") + b".", nbytes)


def _sound(check: Callable[[], bool]) -> bool:
    """Whether a fork of this process lacks nothing: tried once, as libraries may stop their threads before a fork."""
    number = os.fork()
    if number == 0:
        good = False
        with suppress(Exception):
            good = check()
        os._exit(0 if good else 1)
    _, status = os.waitpid(number, 0)
    return status == 0 and len(list(Path("/proc/self/task").iterdir())) == 1


def main(module: str, arguments: Sequence[str]) -> None:
    """Listen on standard input, import, and serve; in a fork, be the program."""
    parent = os.getppid()
    listener = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    _rename([*sys.orig_argv[: MODULE_AT + 2], *arguments])
    begun_s = time.monotonic()
    program = import_module(module)
    check = program.prepare(*arguments)
    # What is there by now stays where it is: a collection in a fork would write to all of it.
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
