"""The folder of a run in real processes, before any is started, and what it says of the run's end."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from fedsync.common.errors import ConfigError, RunError
from fedsync.common.locks import taken
from fedsync.common.run_claim import RUN_LOCK
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.ops import local
from fedsync.ops.local import run_local
from fedsync.server.checkpoints import FOLDER
from fedsync.server.run_folder import write_error

CONFIG = StrategyConfig.load("fedavg", ["task={kind: digits}"])
CLUSTER = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 1000.0}]})


def test_a_run_that_ended_well_keeps_its_model_although_somebody_wants_it_resumed(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"a week of work")
    with pytest.raises(ConfigError, match="there is no checkpoint to resume from"):
        run_local(CONFIG, CLUSTER, tmp_path, resume=True)
    assert (tmp_path / "model.pt").read_bytes() == b"a week of work"


def test_a_run_that_was_cut_off_is_not_begun_anew_without_a_word(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "7.ckpt").write_bytes(b"")
    (tmp_path / "journal.jsonl").write_text("a week of work")
    with pytest.raises(ConfigError, match=f"Resume it with --resume {tmp_path}"):
        run_local(CONFIG, CLUSTER, tmp_path)
    assert (tmp_path / "journal.jsonl").read_text() == "a week of work"


def test_a_run_that_is_at_work_is_neither_resumed_nor_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text("a week of work")
    with taken(tmp_path / RUN_LOCK):
        for resume in (False, True):
            with pytest.raises(ConfigError, match="a run is at work here"):
                run_local(CONFIG, CLUSTER, tmp_path, resume=resume)
    assert (tmp_path / "journal.jsonl").read_text() == "a week of work"


def test_why_a_run_failed_is_told_by_the_server_s_process(tmp_path: Path) -> None:
    write_error(tmp_path, RunError("every silo failed 3 orders in a row; the last: sensor unplugged"))
    quiet = SimpleNamespace(check=lambda: None)
    with pytest.raises(RunError, match="sensor unplugged"):
        local._follow(quiet, tmp_path, tmp_path, [], resumed=False)  # type: ignore[arg-type]
