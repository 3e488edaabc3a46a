"""Programs that a `fedsync.common.nursery` forks, for those who start them.

A request is a connection to the nursery's socket: a length and the descriptor for output, then JSON of that length. The
nursery answers with lines: the number of the process once it is there, and its exit code once it has ended. Who gets no
number, because there is no nursery any more or it does not answer, starts the program by itself.
"""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsync.common.processes import INTERPRETER, alive

NURSERY = "FEDSYNC_NURSERY"
"""Environment variable: socket of the nursery that forks resident trainers, where there is one."""

HEAD = struct.Struct("=Q")
HEAD_BYTES = HEAD.size
MODULE_AT = 3
"""Position of the module's name in a command: behind `fedsync.common.processes.INTERPRETER`. Its arguments follow."""

_PATIENCE_S = 90.0
"""How long a nursery may take to load and to fork [s]."""

_WAITING = 128
_ROOM = "." * 1024
_PAUSE_S = 0.05
_UNKNOWN = 1
"""Exit code of a fork whose nursery is gone: nobody can ask how it ended."""

_WORD_S = 5.0
"""How long a nursery may take to say that a fork has ended [s]."""

_LIBRARIES = {
    # Its background thread would be missing in a fork.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # To ask whether there is a device must not open it: a fork could not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class ForkedProcess:
    """A process that a nursery has forked.

    Args:
        pid: its number.
        line: to the nursery.
    """

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self._line: socket.socket | None = line
        self._code: int | None = None
        self._gone_s: float | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._line is not None:
            self._listen(self._line)
        if self._code is None and not alive(self.pid):
            now_s = time.monotonic()
            self._gone_s = now_s if self._gone_s is None else self._gone_s
            if self._line is None or now_s - self._gone_s > _WORD_S:
                self._code = _UNKNOWN
        return self._code

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        while (code := self.poll()) is None:
            time.sleep(_PAUSE_S)
        return code

    def _listen(self, line: socket.socket) -> None:
        """Take the nursery's word for how it ended, if there is any."""
        try:
            said = line.recv(64, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        line.close()
        self._line = None
        if said:
            self._code = int(said)


@dataclass(frozen=True, slots=True)
class Nursery:
    """A nursery to whoever needs a program forked.

    Args:
        path: of its socket.
    """

    path: Path

    def fork(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
        """Have a program forked, in this working folder; None where the nursery is gone or does not answer.

        Args:
            command: as it would be started by itself: interpreter, ``-m``, module, arguments.
            environment: all of its variables.
            output: descriptor for all that it says; this one stays open.
        """
        asked = {"command": list(command), "environment": dict(environment), "folder": str(Path.cwd())}
        text = json.dumps(asked).encode()
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            line.settimeout(_PATIENCE_S)
            line.connect(str(self.path))
            socket.send_fds(line, [HEAD.pack(len(text))], [output])
            line.sendall(text)
            number = int(_first_line(line))
            line.settimeout(None)
            return ForkedProcess(number, line)
        except (OSError, ValueError):
            line.close()
            return None


def _first_line(line: socket.socket) -> bytes:
    """The first line that comes; nothing behind it is taken. Empty where the other side hangs up."""
    said = b""
    while not said.endswith(b"\n"):
        more = line.recv(1)
        if not more:
            return b""
        said += more
    return said


def start_nursery(
    path: Path, module: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a nursery; it can be asked from now on, and answers once it has loaded.

    Args:
        path: for its socket, at most 100 characters, in a folder that only its owner can enter.
        module: whose programs it forks.
        arguments: for the module's ``prepare``.
        environment: all of its variables.
        log: file for what it says.

    Raises:
        OSError: it cannot be started.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, log.open("ab") as output:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_WAITING)
        # This process closes its own end: once the nursery is gone, callers are turned away at once.
        return subprocess.Popen(
            [*INTERPRETER, "fedsync.common.nursery", module, *arguments, _ROOM],
            stdin=listener.fileno(),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **_LIBRARIES},
            start_new_session=True,
        )
