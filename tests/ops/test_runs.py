"""Runs of a server that die, and what becomes of them; the SuperLink is a stand-in here."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fedsync.common import locks
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.locks import taken
from fedsync.common.run_claim import CHANGE_LOCK
from fedsync.config.server_start import RelayedRegion, ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.server_app import target_of
from fedsync.observe.run_state import SUMMARY
from fedsync.ops import runs
from fedsync.ops.run_watchdog import RunWatchdog
from fedsync.ops.runs import BusyError, resume_run, stop_run, submit_run
from fedsync.server import run_folder
from fedsync.server.run_folder import DONE_FILE, ERROR_FILE, PID_FILE, RUN_LOCK, START_S, Phase, phase

STRATEGY = StrategyConfig.load("fedavg")


class SuperLink:
    """Notes the settings of what is submitted; ``meanwhile`` happens while it ends a run."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.ended: list[str] = []
        self.down = False
        self.meanwhile: Callable[[], None] = lambda: None

    def submit(self, bundle: Path, connection: str, environment: object) -> str:
        if self.down:
            raise RunError("nobody there")
        self.runs.append(tomllib.loads((bundle / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"])
        return str(len(self.runs))

    def withdraw(self, number: str, connection: str, environment: object) -> None:
        self.ended.append(number)
        self.meanwhile()


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
def folder(config: ServerStartConfig, superlink: SuperLink) -> Path:
    """Of a run that was submitted, and has not begun."""
    return submit_run(config, STRATEGY)


@pytest.fixture
def keeper(config: ServerStartConfig) -> RunWatchdog:
    return RunWatchdog(Path(config.state), lambda folder: resume_run(config, folder, died=True))


def checkpoint(folder: Path, version: int) -> None:
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints" / f"{version}.ckpt").write_bytes(b"x")


def begin_and_die(folder: Path) -> None:
    """What a server process leaves that is killed: its number, and a lock that nobody holds."""
    (folder / PID_FILE).write_text("1")
    (folder / RUN_LOCK).touch()


@contextmanager
def at_work(folder: Path, first: str = "pass") -> Iterator[subprocess.Popen[str]]:
    code = f"{first}\nimport fcntl, os, pathlib, sys, time; f = open('run.lock', 'a'); fcntl.flock(f, fcntl.LOCK_EX)\n"
    code += "pathlib.Path('server.pid').write_text(str(os.getpid())); print('here', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        try:
            yield process
        finally:
            process.kill()


def test_who_looks_at_a_lock_does_not_keep_it_from_its_taker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody looks just when it is to be taken: whoever wants it tries once more."""
    looker = (tmp_path / RUN_LOCK).open("a")
    fcntl.flock(looker, fcntl.LOCK_EX)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: looker.close())
    with taken(tmp_path / RUN_LOCK) as got:
        assert got


def test_what_a_folder_says_of_its_run(config: ServerStartConfig, folder: Path) -> None:
    assert folder.parent == Path(config.state).resolve() / "runs"
    assert phase(folder) is Phase.WAITING
    with at_work(folder):
        assert phase(folder) is Phase.AT_WORK
    assert phase(folder) is Phase.DIED
    (folder / DONE_FILE).touch()
    assert phase(folder) is Phase.OVER


@pytest.mark.parametrize("shift_s", [-START_S, 2 * START_S], ids=["never came", "the clock was set back"])
def test_a_server_process_that_did_not_come_in_time_has_died(shift_s: float, folder: Path) -> None:
    submitted_s = (folder / "app").stat().st_mtime + shift_s
    os.utime(folder / "app", (submitted_s, submitted_s))
    assert phase(folder) is Phase.DIED


def test_a_run_that_died_goes_on_from_its_checkpoint(
    config: ServerStartConfig, superlink: SuperLink, keeper: RunWatchdog
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


def test_a_run_in_a_moved_folder_goes_on_there(config: ServerStartConfig, superlink: SuperLink, tmp_path: Path) -> None:
    """The operator moves the server's folder, with the key file, while the server does not run."""
    config = config.model_copy(update={"keys": str(tmp_path / "state" / "server.json")})
    folder = submit_run(config, STRATEGY)
    begin_and_die(folder)
    (tmp_path / "state").rename(tmp_path / "moved")
    here = tmp_path / "moved" / folder.relative_to(tmp_path / "state")
    keys = str(tmp_path / "moved" / "server.json")
    relays = {"north": RelayedRegion(key="", silos=["a", "b"])}
    moved = config.model_copy(update={"state": str(tmp_path / "moved"), "keys": keys, "relays": relays})
    resume_run(moved, here, died=True)
    found = superlink.runs[1]
    assert (found["out"], found["control"], found["keys"]) == (str(here), str(here), keys)
    assert Path(found["strategy"]).is_relative_to(here) and found["silos"] == ""
    assert json.loads(found["regions"]) == {"north": ["a", "b"]}, "a relay was added to server.yaml"


@pytest.mark.parametrize("target", [None, 0.0, -2.5, 0.9])
def test_a_target_arrives_at_its_server(target: float | None, config: ServerStartConfig, superlink: SuperLink) -> None:
    submit_run(config, STRATEGY, target_accuracy=target)
    # As Flower hands them over, every value as text.
    assert target_of({key: str(value) for key, value in superlink.runs[0].items()}) == target


@pytest.mark.parametrize("file", [DONE_FILE, ERROR_FILE])
def test_a_run_that_has_ended_is_let_be(file: str, folder: Path, superlink: SuperLink, keeper: RunWatchdog) -> None:
    begin_and_die(folder)
    (folder / file).write_text("{}")
    keeper.look(0.0)
    assert len(superlink.runs) == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_that_died_before_its_first_checkpoint_begins_anew_where_it_was(
    elsewhere: bool, config: ServerStartConfig, superlink: SuperLink, keeper: RunWatchdog, tmp_path: Path
) -> None:
    folder = submit_run(config, STRATEGY, out=tmp_path / "elsewhere" if elsewhere else None)
    begin_and_die(folder)
    keeper.look(0.0)
    assert [(run["out"], run["resume"]) for run in superlink.runs] == [(str(folder), "")] * 2
    assert not elsewhere or folder == tmp_path / "elsewhere"


def test_an_operator_stops_and_resumes(
    config: ServerStartConfig, superlink: SuperLink, keeper: RunWatchdog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with at_work(folder) as process:
        with pytest.raises(BusyError, match="the run is at work"):
            resume_run(config, folder)
        stop_run(folder)
        assert process.wait(timeout=30) == -15
    assert superlink.ended == ["1"]
    keeper.look(0.0)
    assert len(superlink.runs) == 1, "it was stopped on purpose"
    with pytest.raises(ConfigError, match="the run is over"):
        stop_run(folder)
    checkpoint(folder, 2)
    (folder / SUMMARY).write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "submit", Mock(side_effect=RunError("away")))
        with pytest.raises(RunError, match="away"):
            resume_run(config, folder)
    assert phase(folder) is Phase.OVER and (folder / SUMMARY).exists(), "it is still stopped"
    resume_run(config, folder)
    assert superlink.runs[-1]["resume"] == "yes"
    assert phase(folder) is Phase.WAITING and not (folder / PID_FILE).exists()
    assert not (folder / SUMMARY).exists(), "whoever watches the run takes its summary for its end"
    with pytest.raises(BusyError, match="Flower has not begun it"):
        resume_run(config, folder)


@pytest.mark.parametrize("begun", [False, True], ids=["waits", "died"])
@pytest.mark.parametrize("down", [False, True], ids=["server there", "server away"])
def test_a_run_that_does_not_work_is_stopped_too(
    begun: bool, down: bool, config: ServerStartConfig, superlink: SuperLink, keeper: RunWatchdog, folder: Path
) -> None:
    checkpoint(folder, 2)
    if begun:
        begin_and_die(folder)
    if down:
        superlink.meanwhile = Mock(side_effect=RunError("flwr stop did not end within 120 s"))
    stop_run(folder)
    assert phase(folder) is Phase.OVER and superlink.ended == ["1"]
    keeper.look(0.0)
    assert len(superlink.runs) == 1
    assert json.loads((folder / ERROR_FILE).read_text())["message"] == "stopped by the operator"
    superlink.meanwhile = lambda: None
    resume_run(config, folder)
    assert superlink.runs[-1]["resume"] == "yes" and phase(folder) is Phase.WAITING


def test_a_run_that_begins_while_it_is_stopped_ends(superlink: SuperLink, folder: Path) -> None:
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        superlink.meanwhile = lambda: processes.append(stack.enter_context(at_work(folder)))
        stop_run(folder)
        assert processes[0].wait(timeout=30) == -15
    assert phase(folder) is Phase.OVER


def test_who_does_not_end_when_asked_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_END_S", 0.2)
    with at_work(folder, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)") as process:
        stop_run(folder)
        assert process.wait(timeout=30) == -9


def test_while_the_process_of_a_stopped_run_lives_it_is_not_resumed(
    config: ServerStartConfig, superlink: SuperLink, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_LEAVE_S", 0.1)
    with at_work(folder) as process:
        (folder / ERROR_FILE).write_text("{}")
        with pytest.raises(BusyError, match="its server process has not ended"):
            resume_run(config, folder)
        assert (folder / ERROR_FILE).exists() and (folder / PID_FILE).exists()
        stop_run(folder)
        assert process.wait(timeout=30) == -15
    assert (folder / ERROR_FILE).read_text() == "{}", "the reason stays"
    resume_run(config, folder)
    assert len(superlink.runs) == 2


def test_a_process_that_is_about_to_end_is_waited_for(
    config: ServerStartConfig, superlink: SuperLink, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ERROR_FILE).write_text("{}")
    ending = (folder / RUN_LOCK).open("a")
    fcntl.flock(ending, fcntl.LOCK_EX)
    monkeypatch.setattr(run_folder.time, "sleep", lambda seconds: ending.close())
    resume_run(config, folder)
    assert len(superlink.runs) == 2


@pytest.mark.parametrize("failed", [False, True], ids=["died", "failed"])
def test_operator_and_keeper_do_not_resume_a_run_at_once(
    failed: bool, config: ServerStartConfig, superlink: SuperLink, keeper: RunWatchdog, folder: Path
) -> None:
    """The operator resumes a run that ended long ago; the keeper looks while Flower ends what was before."""
    begin_and_die(folder)
    if failed:
        (folder / ERROR_FILE).write_text("{}")
    os.utime(folder / "app", (1.0, 1.0))
    seen: list[Phase] = []

    def meanwhile() -> None:
        seen.append(phase(folder))
        keeper.look(0.0)
        with pytest.raises(BusyError, match="by somebody else"):
            resume_run(config, folder)

    superlink.meanwhile = meanwhile
    resume_run(config, folder)
    assert seen == [Phase.OVER if failed else Phase.DIED]
    keeper.look(0.0)
    assert len(superlink.runs) == 2 and superlink.ended == ["1"]


def test_the_keeper_leaves_alone_what_is_stopped(config: ServerStartConfig, superlink: SuperLink, folder: Path) -> None:
    begin_and_die(folder)
    assert phase(folder) is Phase.DIED
    stop_run(folder)
    with pytest.raises(BusyError, match="has not died"):
        resume_run(config, folder, died=True)
    assert len(superlink.runs) == 1


FULL = ConfigError("run.json", "cannot be written: No space left on device", "Check the disk")


@pytest.mark.parametrize(
    ("full", "ended"),
    [
        (("write_bundle", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))), ["1"]),
        (("write_atomically", Mock(side_effect=FULL)), ["1", "2"]),
    ],
    ids=["submit", "record"],
)
def test_what_could_not_be_handed_over_has_died_and_nothing_of_it_goes_on(
    full: tuple[str, Mock],
    ended: list[str],
    config: ServerStartConfig,
    superlink: SuperLink,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk fills before the run is submitted, or after it, when Flower's number of it cannot be kept."""
    begin_and_die(folder)

    with monkeypatch.context() as patch:
        patch.setattr(runs, *full)
        with pytest.raises(ConfigError, match="cannot be written: No space left"):
            resume_run(config, folder)
    assert phase(folder) is Phase.DIED
    assert superlink.ended == ended
    resume_run(config, folder)
    assert phase(folder) is Phase.WAITING


def test_whoever_stops_waits_for_whoever_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resuming = (folder / CHANGE_LOCK).open("a")
    fcntl.flock(resuming, fcntl.LOCK_EX)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: resuming.close())
    stop_run(folder)
    assert phase(folder) is Phase.OVER


def test_two_runs_that_are_submitted_in_one_second_get_folders_of_their_own(
    config: ServerStartConfig, superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is submitted while Flower reads the first: its folder is free of a server process, and not free."""
    monkeypatch.setattr(runs, "datetime", Mock(now=lambda zone: datetime(2026, 1, 1, tzinfo=zone)))
    others: list[Path] = []

    def submit(bundle: Path, connection: str, environment: object) -> str:
        monkeypatch.setattr(runs, "submit", superlink.submit)
        others.append(submit_run(config, STRATEGY))
        with pytest.raises(ConfigError, match="a run is at work here"):
            submit_run(config, STRATEGY, out=bundle.parent, overwrite=True)
        return superlink.submit(bundle, connection, environment)

    monkeypatch.setattr(runs, "submit", submit)
    folders = [submit_run(config, STRATEGY), *others]
    assert [Path(run["strategy"]).parent for run in superlink.runs] == folders[::-1]
    assert len({*folders}) == 2 and all((folder / "strategy.yaml").exists() for folder in folders)


def test_what_cannot_be_resumed_says_why(config: ServerStartConfig, superlink: SuperLink, tmp_path: Path) -> None:
    for use in (lambda: resume_run(config, tmp_path), lambda: stop_run(tmp_path)):
        with pytest.raises(ConfigError, match="the folder has no run of a server"):
            use()
    folder = submit_run(config, STRATEGY)
    with pytest.raises(ConfigError, match="has the files of a run"):
        submit_run(config, STRATEGY, out=folder)
    (folder / DONE_FILE).touch()
    with pytest.raises(ConfigError, match="the run has ended"):
        resume_run(config, folder)
    (folder / "run.json").write_text('{"number": "1"}')
    with pytest.raises(ConfigError, match="cannot be read"):
        resume_run(config, folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        submit_run(config, STRATEGY, out=tmp_path / "file" / "run")
