"""Supervised processes for real: logs, health, restarts and a clean end."""

import json
import os
import re
import stat
import sys
import threading
from pathlib import Path

import psutil
import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.silo_start import LogsConfig
from fedsync.ops.supervisor import HEALTH_FILE, LoggedProcess, Program, alone_in, supervise

LIMITS = LogsConfig(bytes=10_000, keep=2)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def ended(folder: Path, code: str) -> LoggedProcess:
    """A process that has ended, and whose output is copied."""
    process = LoggedProcess(Program("noisy", python(code)), os.environ, folder, LIMITS)
    process._process.wait(timeout=60)
    process._pump.join(timeout=60)  # a busy machine copies late
    return process


def test_a_log_rotates_and_is_kept_to_its_size(tmp_path: Path) -> None:
    process = ended(tmp_path, "for i in range(3000): print('line', i, '\\x1b[92mgreen\\x1b[0m')")
    assert process.last_words().endswith("line 2999 green")
    assert process.poll() == 0
    logs = sorted(tmp_path.iterdir())
    assert [log.name for log in logs] == ["noisy.log", "noisy.log.1", "noisy.log.2"]
    line = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ line \d+ green"
    assert all(re.fullmatch(line, each) for each in logs[0].read_text().splitlines()), (
        "each begins with the time, in UTC"
    )
    assert all(0 < log.stat().st_size <= LIMITS.bytes for log in logs)


def test_the_reason_of_an_end_is_the_error_before_the_messages_of_the_shutdown(tmp_path: Path) -> None:
    printed = ["INFO:     Started", "ERROR :     the server is away", *["INFO:     Shutting down"] * 5]
    process = ended(tmp_path, f"print('\\n'.join({printed!r}))")
    assert process.last_words() == "ERROR :     the server is away"


def test_one_supervisor_a_folder(tmp_path: Path) -> None:
    with alone_in(tmp_path / "state"):
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o700
        with pytest.raises(ConfigError, match="another FedSync is at work"), alone_in(tmp_path / "state"):
            pass
    with alone_in(tmp_path / "state"):
        pass


def test_what_ends_is_restarted_told_of_and_all_is_ended_in_the_end(tmp_path: Path) -> None:
    """One program runs on, with a child of its own; one ends at once. The end comes with the first restart."""
    stop = threading.Event()
    marker = tmp_path / "starts"
    lasting = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    programs = [
        Program("lasting", python(f"{lasting}; time.sleep(600)")),
        Program("failing", python(f"open({str(marker)!r}, 'a').write('x'); raise SystemExit('no data')")),
    ]
    seen: list[dict[str, object]] = []
    # Other tests leave helpers of their own behind, for example multiprocessing's resource tracker.
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def watch() -> None:
        while not stop.is_set():
            if marker.exists() and len(marker.read_text()) >= 2:
                seen.append(json.loads((tmp_path / HEALTH_FILE).read_text()))
                children = {child.pid for child in psutil.Process().children(recursive=True)}
                seen[-1]["children"] = sorted(children - before)
                stop.set()
            stop.wait(0.05)

    watcher = threading.Thread(target=watch)
    watcher.start()
    supervise(programs, dict(os.environ), tmp_path, LIMITS, {"silo": "a"}, stop)
    watcher.join()

    (during,) = seen
    assert during["silo"] == "a" and during["restarts"] == 1
    assert "failing ended with code 1: no data" in str(during["last_error"])
    assert set(during["versions"]) >= {"fedsync", "flwr"}  # type: ignore[call-overload]
    after = json.loads((tmp_path / HEALTH_FILE).read_text())
    assert after["state"] == "stopped"
    assert {each["pid"] for each in after["processes"].values()} == {None}
    assert stat.S_IMODE((tmp_path / HEALTH_FILE).stat().st_mode) == 0o600
    children = during["children"]
    assert isinstance(children, list) and len(children) >= 2
    assert not psutil.wait_procs([psutil.Process(pid) for pid in children if psutil.pid_exists(pid)], timeout=10)[1]
    assert (tmp_path / "logs" / "failing.log").read_text().count("no data") >= 1
