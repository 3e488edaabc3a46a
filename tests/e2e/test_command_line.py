"""The command line as a person uses it: exit codes, messages, and nothing left behind."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.deployed import SMALL

SILOS = """
silos:
  - {name: a, speed: 50000.0}
  - {name: b, speed: 25000.0}
"""


def fedsync(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedsync", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def silos(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(SILOS)
    return path


def test_run_in_virtual_time_prints_who_waited(silos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = fedsync(
        "run", "lb-bsp", "--silos", silos, "--runtime", "virtual", "--set", SMALL, "--set", "stop.rounds=2",
        "--seed", "3", "--out", out, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round    2/2" in done.stdout and "who waited for whom" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["strategy"], summary["runtime"], summary["seed"], summary["rounds"]) == ("lb-bsp", "virtual", 3, 2)


@pytest.fixture
def endless_run(silos: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A local run in its second round or later, with no end in sight."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fedsync", "run", "fedavg", "--silos", str(silos), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--set", SMALL, "--set", "stop.rounds=100000"],
        cwd=tmp_path,
        start_new_session=True,
        # A shell has its background jobs ignore Ctrl-C, and the tests may run in one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        rounds, end = out / "rounds.jsonl", time.monotonic() + 180
        while time.monotonic() < end and not (rounds.exists() and rounds.stat().st_size):
            time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_killed_local_run_leaves_no_process(endless_run: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(endless_run.pid).children(recursive=True)
    assert len(family) >= 7, "a SuperLink and what starts ServerApps, a ServerApp, two SuperNodes and two trainers"
    endless_run.kill()
    endless_run.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
