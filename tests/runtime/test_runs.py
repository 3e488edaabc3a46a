"""Runs of a server that die, and what becomes of them; the SuperLink is a stand-in here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedsync.config.server import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import ConfigError, RunError
from fedsync.runtime import runs
from fedsync.runtime.control import DONE_FILE, ERROR_FILE, PID_FILE, RUN_LOCK
from fedsync.runtime.locks import held, taken
from fedsync.runtime.runs import LONGEST_S, MOST_TRIES, START_S, Keeper, Phase, phase, resume_run, stop_run, submit_run
from fedsync.runtime.server import target_of

STRATEGY = StrategyConfig.load("fedavg")


class SuperLink:
    """Notes the settings of what is submitted."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.down = False

    def submit(self, bundle: Path, connection: str, environment: object) -> str:
        if self.down:
            raise RunError("nobody there")
        self.runs.append(tomllib.loads((bundle / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
        return str(len(self.runs))

    def withdraw(self, number: str, connection: str, environment: object) -> None:
        self.ended.append(number)


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    found = SuperLink()
    monkeypatch.setattr(runs, "submit", found.submit)
    monkeypatch.setattr(runs, "withdraw", found.withdraw)
    return found


@pytest.fixture
def config(tmp_path: Path) -> ServerStartConfig:
    (tmp_path / "state").mkdir(mode=0o700)
    return ServerStartConfig(insecure=True, state=str(tmp_path / "state"))


@pytest.fixture
def keeper(config: ServerStartConfig) -> Keeper:
    return Keeper(Path(config.state), lambda folder: resume_run(config, folder))


def checkpoint(folder: Path, version: int) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / f"{version}.ckpt").write_bytes(b"x")


def begin_and_die(folder: Path) -> None:
    """What a server process leaves that is killed: its number, and a lock that nobody holds."""
    (folder / PID_FILE).write_text("1")
    (folder / RUN_LOCK).touch()


@contextmanager
def at_work(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A server process that lives."""
    code = "import fcntl, os, pathlib, sys, time; f = open('server.lock', 'a'); fcntl.flock(f, fcntl.LOCK_EX)\n"
    code += "pathlib.Path('server.pid').write_text(str(os.getpid())); print('here', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    assert not held(tmp_path / RUN_LOCK)
    with at_work(tmp_path):
        assert held(tmp_path / RUN_LOCK)
        with taken(tmp_path / RUN_LOCK) as got:
            assert not got
    assert not held(tmp_path / RUN_LOCK)
    with taken(tmp_path / RUN_LOCK) as got:
        assert got


def test_what_a_folder_says_of_its_run(config: ServerStartConfig, superlink: SuperLink) -> None:
    folder = submit_run(config, STRATEGY)
    assert folder.parent == Path(config.state).resolve() / "runs"
    assert phase(folder) is Phase.WAITING
    with at_work(folder):
        assert phase(folder) is Phase.AT_WORK
    assert phase(folder) is Phase.DIED
    (folder / DONE_FILE).touch()
    assert phase(folder) is Phase.OVER


def test_a_server_process_that_never_came_has_died(config: ServerStartConfig, superlink: SuperLink) -> None:
    folder = submit_run(config, STRATEGY)
    submitted_s = (folder / "app").stat().st_mtime - START_S
    os.utime(folder / "app", (submitted_s, submitted_s))
    assert phase(folder) is Phase.DIED


def test_a_run_that_died_goes_on_from_its_checkpoint(
    config: ServerStartConfig, superlink: SuperLink, keeper: Keeper
) -> None:
    folder = submit_run(config, STRATEGY, target_accuracy=0.9)
    keeper.look(0.0)
    assert len(superlink.runs) == 1, "it has not begun"
    begin_and_die(folder)
    checkpoint(folder, 3)
    keeper.look(1.0)
    keeper.look(2.0)
    first, second = superlink.runs
    assert (first["resume"], second["resume"]) == ("", "yes")
    assert {**second, "resume": ""} == first
    assert superlink.ended == ["1"], "Flower is told before it finds out"
    begin_and_die(folder)
    keeper.look(100.0)
    assert superlink.ended == ["1", "2"]
    assert (first["out"], first["target-accuracy"]) == (str(folder), 0.9)


@pytest.mark.parametrize("target", [None, 0.0, -2.5, 0.9])
def test_a_target_arrives_at_the_server_s_process(
    target: float | None, config: ServerStartConfig, superlink: SuperLink
) -> None:
    submit_run(config, STRATEGY, target_accuracy=target)
    # As Flower hands them over, every value as text.
    assert target_of({key: str(value) for key, value in superlink.runs[0].items()}) == target


def test_a_run_that_died_before_its_first_checkpoint_begins_anew(
    config: ServerStartConfig, superlink: SuperLink, keeper: Keeper
) -> None:
    begin_and_die(submit_run(config, STRATEGY))
    keeper.look(0.0)
    assert [run["resume"] for run in superlink.runs] == ["", ""]


@pytest.mark.parametrize("file", [DONE_FILE, ERROR_FILE])
def test_a_run_that_ended_by_itself_is_left_alone(
    file: str, config: ServerStartConfig, superlink: SuperLink, keeper: Keeper
) -> None:
    folder = submit_run(config, STRATEGY)
    begin_and_die(folder)
    (folder / file).write_text("{}")
    keeper.look(0.0)
    assert len(superlink.runs) == 1


def test_a_run_elsewhere_is_kept_too(
    config: ServerStartConfig, superlink: SuperLink, keeper: Keeper, tmp_path: Path
) -> None:
    folder = submit_run(config, STRATEGY, out=tmp_path / "elsewhere")
    begin_and_die(folder)
    keeper.look(0.0)
    assert [run["out"] for run in superlink.runs] == [str(tmp_path / "elsewhere")] * 2


def test_pauses_grow_until_it_gets_on(config: ServerStartConfig, superlink: SuperLink, keeper: Keeper) -> None:
    """Resumed at 0; again after 2 s, then after 4 s; a new version begins with no pause."""
    folder = submit_run(config, STRATEGY)
    at = []
    for now_s in range(8):
        begin_and_die(folder)
        if now_s == 7:
            checkpoint(folder, 1)
        before = len(superlink.runs)
        keeper.look(float(now_s))
        at += [now_s] * (len(superlink.runs) - before)
    assert at == [0, 2, 6, 7]


def test_a_run_that_dies_again_and_again_is_given_up(
    config: ServerStartConfig, superlink: SuperLink, keeper: Keeper
) -> None:
    folder = submit_run(config, STRATEGY)
    checkpoint(folder, 4)
    for turn in range(MOST_TRIES + 2):
        if phase(folder) is not Phase.OVER:
            begin_and_die(folder)
        keeper.look(turn * LONGEST_S)
    assert len(superlink.runs) == 1 + MOST_TRIES
    assert "died 6 times at version 4" in json.loads((folder / ERROR_FILE).read_text())["message"]


def test_a_superlink_that_is_away_costs_no_try(config: ServerStartConfig, superlink: SuperLink, keeper: Keeper) -> None:
    folder = submit_run(config, STRATEGY)
    begin_and_die(folder)
    superlink.down = True
    for turn in range(20):
        keeper.look(5.0 * turn)
        assert phase(folder) is Phase.DIED
    superlink.down = False
    keeper.look(100.0)
    assert len(superlink.runs) == 2 and not (folder / ERROR_FILE).exists()


def test_an_operator_stops_and_resumes(config: ServerStartConfig, superlink: SuperLink, keeper: Keeper) -> None:
    folder = submit_run(config, STRATEGY)
    with at_work(folder) as process:
        with pytest.raises(ConfigError, match="the run is at work"):
            resume_run(config, folder)
        stop_run(folder)
        assert process.wait(timeout=30) == -15
    keeper.look(0.0)
    assert len(superlink.runs) == 1, "it was stopped on purpose"
    with pytest.raises(ConfigError, match="no run is at work"):
        stop_run(folder)
    checkpoint(folder, 2)
    resume_run(config, folder)
    assert superlink.runs[-1]["resume"] == "yes"
    assert phase(folder) is Phase.WAITING and not (folder / PID_FILE).exists()


def test_what_cannot_be_resumed_says_why(config: ServerStartConfig, superlink: SuperLink, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run of a server is here"):
        resume_run(config, tmp_path)
    folder = submit_run(config, STRATEGY)
    with pytest.raises(ConfigError, match="has the files of a run"):
        submit_run(config, STRATEGY, out=folder)
    (folder / DONE_FILE).touch()
    with pytest.raises(ConfigError, match="has come to its end"):
        resume_run(config, folder)
