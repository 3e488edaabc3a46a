"""Programs that are forked by a process that has imported what they need."""

import json
import os
import re
import signal
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

import fedsync.common.forking
import fedsync.common.nursery
from fedsync.common.forking import ForkedProcess, Nursery, start_nursery
from fedsync.common.processes import INTERPRETER, alive, end_processes

PROGRAMS = "tests.common.nursery_programs"
Start = Callable[..., tuple[Nursery, subprocess.Popen[bytes]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*arguments: str) -> tuple[Nursery, subprocess.Popen[bytes]]:
        path = tmp_path / f"n{len(started)}"
        started.append(start_nursery(path, PROGRAMS, arguments, os.environ, tmp_path / "log"))
        return Nursery(path), started[-1]

    yield begin
    end_processes(started, grace_s=1.0)


def fork(
    nursery: Nursery, words: Sequence[str], output: Path, environment: dict[str, str] | None = None
) -> ForkedProcess:
    with output.open("ab") as file:
        command = [*INTERPRETER, "the.program", *words]
        forked = nursery.fork(command, os.environ if environment is None else environment, file.fileno())
    assert forked is not None
    return forked


def described(nursery: Nursery, output: Path, *words: str, **environment: str) -> dict[str, Any]:
    assert fork(nursery, ["describe", *words], output, environment).wait() == 0
    told: dict[str, Any] = json.loads(output.read_text())
    return told


def soon(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_a_fork_has_what_a_new_process_would_have(start: Start, tmp_path: Path, monkeypatch: Any) -> None:
    nursery, process = start()
    monkeypatch.chdir(tmp_path)
    stays = [fork(nursery, ["stay"], tmp_path / f"stays-{index}") for index in range(2)]
    told = described(nursery, tmp_path / "one", "a word", WHO="me")
    assert told["arguments"] == ["describe", "a word"]
    assert told["environment"] == {"WHO": "me"}
    assert told["folder"] == str(tmp_path)
    assert told["session"] == told["process"] not in (process.pid, os.getsid(0))
    assert told["input"] == ""
    assert told["files"][:3] == [0, 1, 2] and len(told["files"]) <= 4, "the fourth is the listing's own"
    for each in stays:
        each_process = psutil.Process(each.pid)
        soon(lambda: "-m the.program stay" in " ".join(each_process.cmdline()))  # noqa: B023
        assert each_process.cmdline() == [*INTERPRETER, "the.program", "stay"]
        assert each.poll() is None
        each_process.kill()
        assert each.wait() == -signal.SIGKILL
    assert psutil.Process(process.pid).cmdline()[-2:] == [fedsync.common.nursery.__name__, PROGRAMS]


def test_what_two_forks_draw_differs(start: Start, tmp_path: Path) -> None:
    nursery, _ = start()
    one, two = (described(nursery, tmp_path / name)["drawn"] for name in ("one", "two"))
    assert len(one) == 4
    assert all(drawn != other for drawn, other in zip(one, two, strict=True)), (one, two)


@pytest.mark.parametrize(("words", "code"), [(["exit", "0"], 0), (["exit", "3"], 3), (["fail"], 1)])
def test_a_forks_exit_code_is_told(start: Start, tmp_path: Path, words: list[str], code: int) -> None:
    nursery, _ = start()
    forked = fork(nursery, words, tmp_path / "output")
    assert forked.wait() == code
    assert forked.poll() == code
    assert ("this program fails" in (tmp_path / "output").read_text()) == (words == ["fail"])


def test_forks_outlive_their_nursery_which_nobody_asks_then(start: Start, tmp_path: Path) -> None:
    nursery, process = start()
    forked = fork(nursery, ["stay"], tmp_path / "output")
    process.kill()
    process.wait()
    assert forked.poll() is None and alive(forked.pid)
    begun_s = time.monotonic()
    assert nursery.fork([*INTERPRETER, "x", "stay"], os.environ, 1) is None
    assert time.monotonic() - begun_s < 5
    psutil.Process(forked.pid).kill()
    assert forked.wait() == 1, "nobody can say how it ended"


def test_the_end_of_a_fork_is_seen_although_its_nursery_is_stopped(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedsync.common.forking, "_WORD_S", 0.2)
    nursery, process = start()
    forked = fork(nursery, ["stay"], tmp_path / "output")
    process.send_signal(signal.SIGSTOP)
    psutil.Process(forked.pid).kill()
    assert forked.wait() == 1
    process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("reason", ["thread", "device"])
def test_a_nursery_whose_forks_would_lack_something_forks_nothing(start: Start, tmp_path: Path, reason: str) -> None:
    nursery, process = start(reason)
    assert nursery.fork([*INTERPRETER, "x", "stay"], os.environ, 1) is None
    assert process.wait(60) == 1
    assert "programs are started by themselves" in (tmp_path / "log").read_text()


def test_who_has_lost_patience_gets_no_fork(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nursery, _ = start("slow")
    with monkeypatch.context() as patch:
        patch.setattr(fedsync.common.forking, "_PATIENCE_S", 0.5)
        assert nursery.fork([*INTERPRETER, "x", "touch", str(tmp_path / "late")], os.environ, 1) is None
    assert fork(nursery, ["touch", str(tmp_path / "next")], tmp_path / "output").wait() == 0
    assert (tmp_path / "next").exists() and not (tmp_path / "late").exists()


def test_nonsense_does_not_end_a_nursery(start: Start, tmp_path: Path) -> None:
    nursery, _ = start()
    for nonsense in (b"", b"short", b"\x01" + b"\0" * 7 + b"{"):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(str(nursery.path))
            line.sendall(nonsense)
    assert fork(nursery, ["exit", "0"], tmp_path / "output").wait() == 0


def test_only_its_owner_reaches_a_nursery(start: Start) -> None:
    nursery, _ = start()
    assert stat.S_IMODE(nursery.path.stat().st_mode) == 0o600


def test_a_nursery_ends_with_who_started_it(tmp_path: Path) -> None:
    code = (
        "import os, time; from pathlib import Path; from fedsync.common.forking import *;"
        f"process = start_nursery(Path({str(tmp_path / 'n')!r}), {PROGRAMS!r}, [], os.environ, Path(os.devnull));"
        f"Nursery(Path({str(tmp_path / 'n')!r})).fork(['python', '-m', 'x', 'exit', '0'],"
        " os.environ, 1).wait(); print(process.pid)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    number = int(re.findall(r"\d+", said)[-1])
    soon(lambda: not alive(number))
