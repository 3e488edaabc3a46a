"""Who asks something of a run at which nobody is at work hears what became of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.locks import taken
from fedsync.common.run_claim import CHECKPOINTS, ERROR_FILE, RUN_FILE, RUN_LOCK
from fedsync.core.coordinator import Coordinator
from fedsync.core.journal import JOURNAL, JournalWriter
from fedsync.core.operator.operator_commands import PauseRun
from fedsync.observe.run_state import LISTENING, OPERATOR, SUMMARY, is_cut_off
from fedsync.server.operator_requests import ask
from tests.core.make import joined, policies


def run_in(out: Path, runtime: str, summary: dict[str, Any] | None = None, *, worked: bool = True) -> None:
    writer = JournalWriter(out / JOURNAL, {"runtime": runtime, "config": {}})
    writer.append(Coordinator(policies()).handle(joined("a", "b"), 0.0))
    writer.close()
    if runtime == "deployment":
        (out / RUN_FILE).write_text("{}")
    if worked:
        (out / OPERATOR).mkdir(mode=0o700)
        (out / OPERATOR / LISTENING).touch()
    if summary is not None:
        (out / SUMMARY).write_text(json.dumps({"strategy": "x", "silos": [], "runtime": runtime, **summary}))


def told(out: Path) -> ConfigError:
    with pytest.raises(ConfigError) as found:
        ask(out, PauseRun())
    return found.value


def test_a_run_that_has_ended_says_why(tmp_path: Path) -> None:
    run_in(tmp_path, "local", {"stopped_by": "200 rounds done"})
    assert told(tmp_path).problem == "this run is over: 200 rounds done"


@pytest.mark.parametrize("summary", [None, {"stopped_by": None}])
@pytest.mark.parametrize(
    ("runtime", "command"),
    [
        ("local", "`fedsync run --resume {}`"),
        ("deployment", "`fedsync server run --resume {} --server server.yaml`"),
        ("flower", "again"),
    ],
)
def test_a_run_that_was_cut_off_says_how_it_goes_on(
    tmp_path: Path, summary: dict[str, Any] | None, runtime: str, command: str
) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    run_in(folder, runtime, summary)
    assert told(folder).problem == "the server process of this run has ended"
    assert command.format(f"'{folder}'") in told(folder).remedy


@pytest.mark.parametrize("runtime", ["flower", "deployment"])
def test_a_run_that_python_or_flwr_run_began_is_resumed_there(tmp_path: Path, runtime: str) -> None:
    """No server of FedSync knows this run, so none resumes it."""
    run_in(tmp_path, runtime)
    (tmp_path / RUN_FILE).unlink(missing_ok=True)
    (tmp_path / CHECKPOINTS).mkdir()
    (tmp_path / CHECKPOINTS / "7.ckpt").touch()
    assert "resume=True in Python" in told(tmp_path).remedy and "server" not in told(tmp_path).remedy


def test_a_run_that_was_stopped_or_failed_gives_the_recorded_reason(tmp_path: Path) -> None:
    run_in(tmp_path, "deployment", {"stopped_by": None})
    (tmp_path / ERROR_FILE).write_text(json.dumps({"kind": "run", "message": "stopped by the operator"}))
    command = f"`fedsync server run --resume {tmp_path} --server server.yaml`"
    assert told(tmp_path).remedy == f"stopped by the operator. {command} resumes it"


def test_a_run_that_has_not_begun_is_not_cut_off_and_a_virtual_one_is_without_its_process(tmp_path: Path) -> None:
    for runtime in ("virtual", "local"):
        run_in(tmp_path, runtime, worked=False)
        assert is_cut_off(tmp_path) == (runtime == "virtual")
        for folder in (tmp_path, tmp_path.parent):  # a survey's run is inside another
            with taken(folder / RUN_LOCK):
                assert not is_cut_off(tmp_path)
        assert told(tmp_path).problem == "no run is at work here"
        (tmp_path / JOURNAL).unlink()
    (tmp_path / JOURNAL).write_text("no journal")
    assert told(tmp_path).problem == "no run is at work here"
