"""The command line as a person uses it: exit codes, messages, and nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.deployed import SMALL, wait_for

SILOS = "silos: [{name: a, speed: 50000.0}, {name: b, speed: 25000.0}]"
RUN = [sys.executable, "-m", "fedsync", "run", "--silos", "two.yaml", "--out", "out", "--set", SMALL]


def test_run_in_virtual_time_prints_who_waited(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(SILOS)
    command = [*RUN, "lb-bsp", "--runtime", "virtual", "--set", "stop.rounds=2", "--seed", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "round    2/2" in done.stdout and "who waited for whom" in done.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["strategy"], summary["runtime"], summary["seed"], summary["rounds"]) == ("lb-bsp", "virtual", 3, 2)


@pytest.mark.slow
def test_a_killed_local_run_leaves_no_process(tmp_path: Path) -> None:
    """It is in its second round or later, with no end in sight."""
    (tmp_path / "two.yaml").write_text(SILOS)
    run = subprocess.Popen([*RUN, "fedavg", "--set", "stop.rounds=100000"], cwd=tmp_path, start_new_session=True)
    try:
        rounds = tmp_path / "out" / "rounds.jsonl"
        wait_for(lambda: rounds.exists() and rounds.stat().st_size > 0, "the run did not begin", 180.0)
        family = psutil.Process(run.pid).children(recursive=True)
        assert len(family) >= 7, "a SuperLink and what starts ServerApps, a ServerApp, two SuperNodes and two trainers"
    finally:
        run.kill()
        run.wait()
    assert not psutil.wait_procs(family, timeout=60)[1]
