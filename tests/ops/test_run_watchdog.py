"""The keeper of runs: when it tries again, what it tells, and that nothing ends it."""

import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsync.common.backoff import Backoff
from fedsync.common.errors import ConfigError, RunError
from fedsync.ops import run_watchdog as module
from fedsync.ops.run_watchdog import LEAST_ROOM, LINGERS_S, RunWatchdog
from fedsync.ops.runs import STOPPED, STRATEGY_FILE, BusyError
from fedsync.server.run_folder import APP, DONE_FILE, ERROR_FILE, PID_FILE, RUN_LOCK, write_error

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Server:
    """Runs that die at once; ``trouble`` is what comes of resuming one instead."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.resumed: list[tuple[float, str]] = []
        self.ended: list[str] = []
        self.trouble: dict[str, Exception] = {}
        self.now_s = 0.0
        self.keeper = RunWatchdog(state, self.resume, self.end, lambda: NOON)

    def run(self, name: str, version: int = 0) -> Path:
        folder = self.state / "runs" / name
        (folder / "checkpoints").mkdir(parents=True)
        for file in ("run.json", PID_FILE, RUN_LOCK, f"checkpoints/{version}.ckpt"):
            (folder / file).touch()
        return folder

    def resume(self, folder: Path) -> None:
        if folder.name in self.trouble:
            raise self.trouble[folder.name]
        self.resumed.append((self.now_s, folder.name))

    def end(self, folder: Path) -> None:
        self.ended.append(folder.name)

    def look(self, now_s: float) -> None:
        self.now_s = now_s
        self.keeper.look(now_s)

    def looks(self, end_s: int, step_s: int = 1, begin_s: int = 0) -> None:
        for now_s in range(begin_s, end_s, step_s):
            self.look(float(now_s))

    def resumptions(self, name: str = "a") -> list[float]:
        """Times at which it tried to resume a run [s]."""
        return [now_s for now_s, run in self.resumed if run == name]

    def told(self, folder: Path) -> dict[str, object]:
        runs = self.keeper.status()["runs"]
        assert isinstance(runs, dict)
        found = runs[str(folder)]
        assert isinstance(found, dict)
        return found


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@contextmanager
def lock_held(folder: Path) -> Iterator[None]:
    with (folder / RUN_LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.slow
def test_pauses_double_up_to_the_longest_and_never_end(server: Server) -> None:
    """By hand: 2, 4, 8, ..., 512 s, then 600 s each."""
    server.run("a")
    server.looks(3500, 2)
    pauses = [after - before for before, after in pairwise(server.resumptions())]
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 512, *[600] * 4]


def test_a_new_version_begins_with_the_shortest_pause(server: Server) -> None:
    folder = server.run("a")
    server.looks(7)
    (folder / "checkpoints" / "1.ckpt").touch()
    server.looks(10, begin_s=7)
    assert server.resumptions() == [0, 2, 6, 7, 9]


@pytest.mark.parametrize("error", [ConfigError("x", "no space left", "free some"), OSError("no space"), ValueError()])
def test_an_error_costs_a_run_a_pause_and_the_others_nothing(error: Exception, server: Server) -> None:
    """By hand: b dies at once, and is due after 2, 4, 8, ... s."""
    folder = server.run("a")
    server.run("b")
    server.trouble["a"] = error
    server.looks(20)
    assert server.resumptions("b") == [0, 2, 6, 14]
    told = server.told(folder)
    assert (told["tries"], told["phase"]) == (0, "died") and str(told["reason"]).startswith("not resumed: ")
    assert not (folder / ERROR_FILE).exists()
    del server.trouble["a"]
    server.look(80.0)
    assert (80.0, "a") in server.resumed


def test_refusals_are_tried_again_within_a_minute(server: Server) -> None:
    """By hand: at 0, 5, 15, 35, 75, 135 and 195 s."""
    server.run("a")
    at: list[float] = []

    def refuse(folder: Path) -> None:
        at.append(server.now_s)
        raise RunError("nobody there")

    server.keeper.resume = refuse
    server.looks(200)
    assert at == [0, 5, 15, 35, 75, 135, 195]


def test_a_run_that_somebody_else_resumes_costs_no_try(server: Server) -> None:
    folder = server.run("a")
    server.trouble["a"] = BusyError("a", "being resumed", "wait")
    server.look(0.0)
    assert (server.told(folder)["tries"], server.told(folder)["next"]) == (0, None)
    del server.trouble["a"]
    server.look(2.0)
    assert server.resumed == [(2.0, "a")]


def test_a_run_without_a_version_is_not_said_to_have_one(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """As a relay's."""
    caplog.set_level("INFO")
    folder = server.run("a")
    shutil.rmtree(folder / "checkpoints")
    server.look(0.0)
    assert server.told(folder)["reason"] == "its server process died"
    assert caplog.messages == [f"resumed: {folder}, try 1: its server process died"]


def test_what_it_tells(server: Server) -> None:
    folder, silent = server.run("a", version=4), server.run("b")
    (silent / PID_FILE).unlink()
    (server.run("over") / DONE_FILE).touch()
    server.look(0.0)
    assert server.keeper.status()["looked"] == "2026-01-01T12:00:00+00:00"
    assert set(server.keeper.status()["runs"]) == {str(folder), str(silent)}  # type: ignore[call-overload]
    assert server.told(folder) == {
        "phase": "waiting", "tries": 1, "next": None, "reason": "its server process died, at version 4"
    }  # fmt: skip
    assert server.told(silent)["reason"] == "Flower did not start its server process, at version 0"
    server.look(1.0)
    # By hand: the next one is due at 2 s, one second from now.
    assert (server.told(folder)["phase"], server.told(folder)["next"]) == ("died", "2026-01-01T12:00:01+00:00")
    with lock_held(folder):
        server.look(2.0)
        assert (server.told(folder)["phase"], server.told(folder)["next"]) == ("at work", None)


@pytest.mark.parametrize(("owner", "name"), [(module, "phase"), (RunWatchdog, "look")], ids=["a run", "the folder"])
def test_nothing_ends_the_watch(owner: Any, name: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look goes wrong, the second one resumes."""
    server.run("a")
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    monkeypatch.setattr(module, "REFUSED", Backoff(0.0, 0.0))
    stop, looks, works = threading.Event(), list[int](), getattr(owner, name)

    def fails_once(*arguments: Any) -> Any:
        looks.append(1)
        if len(looks) == 1:
            raise OSError("input/output error")
        return works(*arguments)

    def resume(folder: Path) -> None:
        server.resumed.append((0.0, folder.name))
        stop.set()

    server.keeper.resume = resume
    monkeypatch.setattr(owner, name, fails_once)
    server.keeper.watch(stop)
    assert server.resumed == [(0.0, "a")] and len(looks) >= 2


def test_a_process_that_outlives_its_stopped_run_is_ended(server: Server) -> None:
    folder = server.run("a")
    (folder / ERROR_FILE).touch()
    server.look(0.0)
    with lock_held(folder):
        server.look(10.0)
        server.look(9.9 + LINGERS_S)
        assert server.ended == []
        server.look(10.0 + LINGERS_S)
    assert server.ended == ["a"] and server.resumed == []
    server.look(100.0)
    with lock_held(folder):
        server.look(101.0)
    assert server.ended == ["a"], "the time counts from when it was seen first"


def test_a_failed_run_is_told_of_and_a_stopped_one_is_not(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")  # whatever a test before this one has set: the folder's own name has "failed" in it
    old, folder = server.run("old"), server.run("new")
    write_error(old, RunError("before this server began"))
    for path, at_s in ((old / ERROR_FILE, 1e9), (old / "run.json", 1e9)):
        os.utime(path, (at_s, at_s))
    server.look(0.0)
    write_error(folder, ConfigError("task.file", "no data here", "Ask a silo"))
    for now_s in (2.0, 4.0):
        server.look(now_s)
    (line,) = [record.getMessage() for record in caplog.records if "failed" in record.getMessage()]
    assert str(folder) in line and "task.file: no data here. Ask a silo" in line and "run.log" in line
    assert server.keeper.status()["failed"] == {str(folder): "task.file: no data here. Ask a silo"}
    write_error(folder, RunError(STOPPED))
    server.keeper._cares.clear()
    server.look(6.0)
    assert "failed" not in server.keeper.status()


def test_the_resumption_of_an_older_run_does_not_hide_that_the_newest_failed(server: Server) -> None:
    """A restart of the server submits each unfinished run again, and so writes its record again."""
    old, newest = server.run("old"), server.run("newest")
    for folder, started_s, submitted_s in ((old, 1e9, 3e9), (newest, 2e9, 2e9)):
        (folder / STRATEGY_FILE).touch()
        os.utime(folder / STRATEGY_FILE, (started_s, started_s))
        os.utime(folder / "run.json", (submitted_s, submitted_s))
    write_error(newest, ConfigError(str(newest), "the disk is full", "Free it"))
    server.look(0.0)
    assert server.keeper.status()["failed"] == {str(newest): "the disk is full. Free it"}, "its folder is named once"


def test_a_checkpoint_that_vanishes_meanwhile_is_no_trouble(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """A run at work replaces its checkpoints all the time; a link without a target stands for a file just gone."""
    folder = server.run("a")
    (folder / "checkpoints" / "1.ckpt").symlink_to("gone")
    server.look(0.0)
    assert server.resumed == [(0.0, "a")] and "could not be cared for" not in caplog.text


def test_a_full_disk_takes_no_tries_and_runs_go_on_in_a_minute(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run died at work. Another was submitted while the disk was full, and Flower could not begin it."""
    free = 0
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    folder, submitted = server.run("a"), server.run("b")
    (submitted / PID_FILE).unlink()
    (submitted / APP).mkdir()
    server.looks(1000, 2)
    assert server.resumed == [] and "is full" in str(server.told(folder)["reason"])
    free = LEAST_ROOM
    server.looks(1060, 2, begin_s=1000)
    assert {name for _, name in server.resumed} == {"a", "b"}


def test_a_process_that_never_began_is_tried_each_minute(server: Server) -> None:
    (server.run("a") / PID_FILE).unlink()
    server.looks(1000, 2)
    assert max(after - before for before, after in pairwise(server.resumptions())) <= 60
