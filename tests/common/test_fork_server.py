"""Programs that are forked by a process that has imported their libraries."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import fedsync.common.fork_server
from fedsync.common.fork_server import ForkedProcess, start_fork_server
from fedsync.common.locks import wait_until
from fedsync.common.processes import INTERPRETER, alive, end_processes

PROGRAM = [*INTERPRETER, "tests.common.forked_program"]
Start = Callable[..., tuple[Path, subprocess.Popen[bytes]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(code: str = "") -> tuple[Path, subprocess.Popen[bytes]]:
        """A server that imports NumPy, whose generator is seeded then, and a module of this code."""
        path = tmp_path / f"n{len(started)}"
        (tmp_path / "loaded.py").write_text(f"import numpy\nnumpy.random.random()\n{code}\n")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
        started.append(start_fork_server(path, ["no.such", "loaded"], environment, tmp_path / "log"))
        return path, started[-1]

    yield begin
    end_processes(started, grace_s=1.0)


def fork(server: Path, words: Sequence[str], output: Path, environment: dict[str, str] | None = None) -> ForkedProcess:
    with output.open("ab") as file:
        environment = dict(os.environ) if environment is None else environment
        forked = fedsync.common.fork_server.fork(server, [*PROGRAM, *words], environment, file.fileno())
    assert forked is not None
    return forked


def described(server: Path, output: Path, *words: str, **environment: str) -> dict[str, Any]:
    assert fork(server, ["describe", *words], output, environment).wait() == 0
    told: dict[str, Any] = json.loads(output.read_text())
    return told


def not_forked(server: Path, *words: str) -> bool:
    return fedsync.common.fork_server.fork(server, [*PROGRAM, *(words or ["stay"])], os.environ, 1) is None


def soon(holds: Callable[[], bool]) -> None:
    assert wait_until(holds, 60, 0.02)


def test_a_fork_has_what_a_new_process_would_have(start: Start, tmp_path: Path, monkeypatch: Any) -> None:
    server, process = start()
    monkeypatch.chdir(tmp_path)
    stays = [fork(server, ["stay"], tmp_path / f"stays-{index}") for index in range(2)]
    told = described(server, tmp_path / "one", "a word", WHO="me")
    assert told["arguments"] == ["describe", "a word"]
    assert told["environment"] == {"WHO": "me"}
    assert told["folder"] == str(tmp_path)
    assert told["session"] == told["process"] not in (process.pid, os.getsid(0))
    assert told["input"] == ""
    assert told["files"][:3] == [0, 1, 2] and len(told["files"]) <= 5, "two are the connection and the listing"
    for each in stays:
        each_process = psutil.Process(each.pid)
        soon(lambda: "-m tests.common.forked_program stay" in " ".join(each_process.cmdline()))  # noqa: B023
        assert each_process.cmdline() == [*PROGRAM, "stay"]
        assert each.poll() is None
        each_process.kill()
        assert each.wait() == 1, "nobody can say how it ended"
    assert psutil.Process(process.pid).cmdline()[-2:] == ["no.such", "loaded"]


def test_what_two_forks_draw_differs(start: Start, tmp_path: Path) -> None:
    server, _ = start()
    one, two = (described(server, tmp_path / name)["drawn"] for name in ("one", "two"))
    assert len(one) == 4
    assert all(drawn != other for drawn, other in zip(one, two, strict=True)), (one, two)


@pytest.mark.parametrize(
    ("words", "code"), [(["exit", "0"], 0), (["exit", "3"], 3), (["exit", "refused"], 1), (["fail"], 1)]
)
def test_a_forks_exit_code_is_told(start: Start, tmp_path: Path, words: list[str], code: int) -> None:
    server, _ = start()
    forked = fork(server, words, tmp_path / "output")
    assert forked.wait() == code
    assert forked.poll() == code
    told = (tmp_path / "output").read_text()
    assert ("this program fails" in told) == (words == ["fail"])
    assert ("refused" in told) == ("refused" in words)


def test_forks_outlive_their_server_which_nobody_asks_then(start: Start, tmp_path: Path) -> None:
    server, process = start()
    forked = fork(server, ["stay"], tmp_path / "output")
    process.kill()
    process.wait()
    assert forked.poll() is None and alive(forked.pid)
    begun_s = time.monotonic()
    assert not_forked(server)
    assert time.monotonic() - begun_s < 5
    psutil.Process(forked.pid).kill()
    assert forked.wait() == 1, "nobody can say how it ended"


def test_a_server_whose_forks_would_lack_a_thread_forks_nothing(start: Start, tmp_path: Path) -> None:
    server, process = start(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    )
    assert not_forked(server)
    assert process.wait(60) == 1
    assert "programs are started by themselves" in (tmp_path / "log").read_text()


def test_who_has_lost_patience_gets_no_fork(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, _ = start("import time\ntime.sleep(3)")
    with monkeypatch.context() as patch:
        patch.setattr(fedsync.common.fork_server, "_PATIENCE_S", 0.5)
        assert not_forked(server, "touch", str(tmp_path / "late"))
    assert fork(server, ["touch", str(tmp_path / "next")], tmp_path / "output").wait() == 0
    assert (tmp_path / "next").exists() and not (tmp_path / "late").exists()


def test_nonsense_does_not_end_a_server(start: Start, tmp_path: Path) -> None:
    server, _ = start()
    assert stat.S_IMODE(server.stat().st_mode) == 0o600, "only its owner reaches it"
    for nonsense in (b"", b"short", b"\x01" + b"\0" * 7 + b"{"):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(server))
            line.sendall(nonsense)
    assert fork(server, ["exit", "0"], tmp_path / "output").wait() == 0


def test_a_server_ends_with_who_started_it(tmp_path: Path) -> None:
    code = (
        "import os; from pathlib import Path; from fedsync.common.fork_server import *;"
        f"server = Path({str(tmp_path / 'n')!r});"
        "process = start_fork_server(server, [], os.environ, Path(os.devnull));"
        f"fork(server, {[*PROGRAM, 'exit', '0']!r}, os.environ, 1).wait(); print(process.pid)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    number = int(re.findall(r"\d+", said)[-1])
    soon(lambda: not alive(number))
