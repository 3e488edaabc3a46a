"""Client of the fork server `fedsync.common.nursery`: starts a program as a fork of that server.

A request is a connection to the nursery's socket. It carries a length and the descriptor for output, then JSON of that
length. The nursery answers with lines: the process id after the fork, and the exit code after the end of the process. A
client without an answer, because the nursery is gone or too slow, starts the program itself.
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
"""Environment variable: socket of the nursery for resident trainers, if there is a nursery."""

HEAD = struct.Struct("=Q")
HEAD_BYTES = HEAD.size
MODULE_AT = 3
"""Position of the module's name in a command, after `fedsync.common.processes.INTERPRETER`; its arguments follow."""

_PATIENCE_S = 90.0
"""Timeout for the nursery to load and to fork [s]."""

_WAITING = 128
_ROOM = "." * 1024
_PAUSE_S = 0.05
_UNKNOWN = 1
"""Exit code of a fork whose nursery is gone, because its real exit code is then unknown."""

_WORD_S = 5.0
"""Timeout for the nursery to report the end of a fork [s]."""

_LIBRARIES = {
    # The background thread of Arrow's allocator would be missing in a fork.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # The check for a device must not open it: a fork could not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class ForkedProcess:
    """Process that a nursery has forked; ``line`` is the connection to the nursery."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self._line: socket.socket | None = line
        self._code: int | None = None
        self._gone_s: float | None = None

    def poll(self) -> int | None:
        if self._line is not None:
            self._listen(self._line)
        if self._code is None and not alive(self.pid):
            now_s = time.monotonic()
            self._gone_s = now_s if self._gone_s is None else self._gone_s
            if self._line is None or now_s - self._gone_s > _WORD_S:
                self._code = _UNKNOWN
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_PAUSE_S)
        return code

    def _listen(self, line: socket.socket) -> None:
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
    """Client of a nursery; ``path`` is its socket."""

    path: Path

    def fork(self, command: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
        """Request a fork in this working folder; None if the nursery is gone or does not answer.

        Args:
            command: interpreter, ``-m``, module, arguments, as without a nursery.
            output: descriptor for all output; it stays open here.
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
    """Start a nursery; it accepts requests at once, and answers after it has loaded.

    ``path``: socket, at most 100 characters, in a folder that only its owner can enter. Raises `OSError` if the nursery
    cannot be started.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, log.open("ab") as output:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_WAITING)
        # This process closes its listener, so that requests fail at once after the nursery is gone.
        return subprocess.Popen(
            [*INTERPRETER, "fedsync.common.nursery", module, *arguments, _ROOM],
            stdin=listener.fileno(),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, **_LIBRARIES},
            start_new_session=True,
        )
