"""The folder of a run in real processes, before any is started, and what it says of the run's end."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsync.common.errors import ConfigError, RunError
from fedsync.common.locks import taken
from fedsync.common.run_claim import RUN_LOCK
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_simulation import run_simulation
from fedsync.observe.run_state import RUN_LOG
from fedsync.ops import local
from fedsync.ops.local import run_local
from fedsync.server.checkpoints import FOLDER
from fedsync.server.run_folder import Phase, write_error

CONFIG = StrategyConfig.load("fedavg", ["task={kind: digits}"])
CLUSTER = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 1000.0}]})


WORK = "a week of work"


@pytest.mark.parametrize(
    ("files", "resume", "problem"),
    [
        (["model.pt"], True, "there is no checkpoint to resume from"),
        ([f"{FOLDER}/7.ckpt", "journal.jsonl"], False, "Resume it with --resume {}"),
    ],
    ids=["ended well", "cut off"],
)
def test_a_run_that_ended_well_is_not_resumed_and_one_that_was_cut_off_not_begun_anew(
    tmp_path: Path, files: list[str], resume: bool, problem: str
) -> None:
    (tmp_path / FOLDER).mkdir()
    for name in files:
        (tmp_path / name).write_text(WORK)
    with pytest.raises(ConfigError, match=problem.format(tmp_path)):
        run_local(CONFIG, CLUSTER, tmp_path, resume=resume)
    assert [(tmp_path / name).read_text() for name in files] == [WORK] * len(files)


def test_a_run_that_is_at_work_is_neither_resumed_nor_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text(WORK)
    with taken(tmp_path / RUN_LOCK):
        for resume in (False, True):
            with pytest.raises(ConfigError, match="a run is at work here"):
                run_local(CONFIG, CLUSTER, tmp_path, resume=resume)
    assert (tmp_path / "journal.jsonl").read_text() == WORK


def test_why_a_run_failed_is_told_by_the_server_s_process(tmp_path: Path) -> None:
    write_error(tmp_path, RunError("every silo failed 3 orders in a row; the last: sensor unplugged"))
    quiet = SimpleNamespace(check=lambda: None)
    with pytest.raises(RunError, match="sensor unplugged"):
        local._follow(quiet, tmp_path, tmp_path, [], resumed=False)  # type: ignore[arg-type]


def test_an_error_of_own_code_is_told_with_its_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Flower's own log, which was shown, does not have it."""
    monkeypatch.setattr(local, "phase", lambda folder: Phase.DIED)
    (tmp_path / RUN_LOG).write_text("mine.py, line 14, in decide\n  ZeroDivisionError\n")
    quiet = SimpleNamespace(check=lambda: None)
    with pytest.raises(RunError, match=r"(?s)did not start; .*mine\.py, line 14") as told:
        local._follow(quiet, tmp_path, tmp_path, [], resumed=False)  # type: ignore[arg-type]
    assert str(told.value).endswith("line 14, in decide |   ZeroDivisionError"), "a terminal shows no line breaks"


@pytest.mark.parametrize("runner", [run_local, run_simulation])
def test_a_temporary_folder_that_is_too_long_for_sockets_is_named(
    runner: Callable[..., object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The job of a cluster often has a TMPDIR of its own, below several folders."""
    (tmp_path / ("x" * 50)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("x" * 50)))
    with pytest.raises(ConfigError, match=r"TMPDIR: .* bytes, at most .* Choose a shorter path: sockets are created"):
        runner(CONFIG, CLUSTER, tmp_path / "out")
    assert not list((tmp_path / ("x" * 50)).iterdir()) and not (tmp_path / "out").exists()
