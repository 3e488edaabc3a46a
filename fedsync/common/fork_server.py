"""Fork server: a process that imports libraries once, and then forks programs from itself.

It serves machines on which one operator runs many silos. Forks share its unmodified memory and save its import time. A
fork must behave like a new process, so the server has a single thread. Each fork gets its own resources:

| resource | source |
|---|---|
| session, standard output and error | new; output goes to the descriptor in the request |
| arguments, environment, folder | from the request; the command line shows the arguments, so that `ps` finds it |
| random numbers | generators seeded at import are seeded again; keys and nonces come from the operating system |
| end | a fork outlives the server; it ends with its owner, a process that its environment names |

A request is a connection to the server's socket: a descriptor for output, then a line of JSON. The fork answers with
its process id, and at its end with its exit code. The server ends with the process that started it, or at once if its
libraries have threads or an open GPU. A client that gets no answer starts the program itself.

Usage: ``python -m fedsync.common.fork_server LISTENER MODULE... ROOM``, with the descriptor of the listening socket.
``ROOM`` reserves space for longer command lines.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import socket
import socketserver
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from fedsync.common.processes import INTERPRETER, alive, start_apart

FORK_SERVER = "FEDSYNC_FORK_SERVER"
"""Environment variable: socket of the fork server for resident trainers, if there is a fork server."""

_PATIENCE_S = 90.0
"""Timeout for the server to load and to fork [s]."""

_REQUEST_S = 10.0
"""Timeout of a request's arrival [s]; a request comes from another process of the same user."""

_MODULE_AT = 3
"""Position of the module's name in a command, after `INTERPRETER`; its arguments follow."""

_ARGUMENTS_BEGIN, _ARGUMENTS_END = 45, 46
"""Positions of the command line's addresses in ``/proc/PID/stat``, counted after the program's name."""

_WAITING, _PAUSE_S, _MOST_ANSWER, _ROOM = 128, 0.05, 64, "." * 1024
_UNKNOWN = 1
"""Exit code of a killed fork, which could not report it."""

_LIBRARIES = {
    # The background thread of Arrow's allocator would be missing in a fork.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    # The check for a device must not open it: a fork could not use it.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


class ForkedProcess:
    """Process that a fork server has forked; ``line`` is the connection to it, ``said`` the beginning of its answer."""

    def __init__(self, line: socket.socket, said: bytes) -> None:
        pid, _, self._said = said.partition(b"\n")
        self.pid = int(pid)
        self._line = line
        line.setblocking(False)  # a child of the fork may keep the connection open
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and not alive(self.pid):
            with self._line, suppress(OSError):
                self._said += self._line.recv(_MOST_ANSWER)
            self._code = int(self._said or _UNKNOWN)
        return self._code

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(_PAUSE_S)
        return code


def fork(path: Path, command: Sequence[str], environment: Mapping[str, str], output: int) -> ForkedProcess | None:
    """Fork a program in this working folder; None if the server at the socket ``path`` is gone or does not answer.
    ``command`` begins with interpreter, ``-m`` and module. The descriptor ``output`` stays open here.
    """
    asked = {"command": list(command), "environment": dict(environment), "folder": str(Path.cwd())}
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        line.settimeout(_PATIENCE_S)
        line.connect(str(path))
        socket.send_fds(line, [b"\n"], [output])
        line.sendall(json.dumps(asked).encode() + b"\n")
        return ForkedProcess(line, line.recv(_MOST_ANSWER))
    except (OSError, ValueError):
        line.close()
        return None


def start_fork_server(
    path: Path, modules: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """Start a fork server; it answers requests after it has imported ``modules``. ``path``: socket, at most 100
    characters, in a folder that only its owner can enter. Raises `OSError` on failure.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, log.open("ab") as output:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_WAITING)
        # This process closes its listener, so that requests fail at once after the server is gone.
        command = [*INTERPRETER, "fedsync.common.fork_server", str(listener.fileno()), *modules, _ROOM]
        return start_apart(command, output, {**environment, **_LIBRARIES}, [listener.fileno()])


class _Forks(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = sys.maxsize

    def __init__(self, listener: int, parent: int) -> None:
        super().__init__("", _Fork, bind_and_activate=False)
        self.socket.close()
        self.socket = socket.socket(fileno=listener)
        self._parent = parent

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self._parent:
            sys.exit()


class _Fork(socketserver.BaseRequestHandler):
    """Handler of one request, in a process forked for it."""

    server: _Forks

    def handle(self) -> None:
        self.server.socket.close()
        self.request.settimeout(_REQUEST_S)
        _, (output,), _, _ = socket.recv_fds(self.request, 1, 1)
        with self.request.makefile("rb") as file:
            asked = json.loads(file.readline())
        command = asked["command"]
        os.setsid()
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        # Fails if the client has lost patience, and started the program itself.
        self.request.sendall(b"%d\n" % os.getpid())
        self.request.settimeout(None)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        # Python reseeds its own generator in every fork; NumPy's old global generator would be the same in all forks.
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        _rename(command)
        self.request.sendall(b"%d\n" % _run(command[_MODULE_AT], command[_MODULE_AT + 1 :]))


def _run(module: str, arguments: Sequence[str]) -> int:
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
    return 0


def _rename(command: Sequence[str]) -> None:
    """Overwrite this process's command line. Linux shows the whole area as one line if its last byte is not NUL."""
    place = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    begin, nbytes = int(place[_ARGUMENTS_BEGIN]), int(place[_ARGUMENTS_END]) - int(place[_ARGUMENTS_BEGIN])
    text = " ".join(command).encode()[: max(0, nbytes - 2)]
    if begin and text:
        ctypes.memmove(begin, text.ljust(nbytes - 1, b"\0") + b".", nbytes)


def main(listener: int, modules: Sequence[str]) -> None:
    parent = os.getppid()
    _rename(sys.orig_argv[:-1])
    for module in modules:
        with suppress(ImportError):
            import_module(module)
    # Freeze existing objects: a garbage collection in a fork would write to all of their shared memory.
    gc.collect()
    gc.freeze()
    # A fork, because some libraries stop their threads before a fork, and a GPU that is open is of no use in one.
    if (number := os.fork()) == 0:
        torch = sys.modules.get("torch")
        os._exit(int(torch is not None and torch.cuda._is_in_bad_fork()))
    _, status = os.waitpid(number, 0)
    if status or len(list(Path("/proc/self/task").iterdir())) > 1:
        sys.exit("the imported libraries have threads or an open GPU; programs are started by themselves")
    _Forks(listener, parent).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:-1])
