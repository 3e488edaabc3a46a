"""An encrypted run that is cut off goes on from what is on disk, with silos that kept all of it or nothing."""

import contextlib
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common import codec
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.files import write_private
from fedsync.core.actions import OperatorAnswered
from fedsync.core.coordinator import Coordinator
from fedsync.core.journal import JOURNAL, JournalEntry
from fedsync.core.operator.operator_commands import OperatorQuestion, PauseRun
from fedsync.observe.replay import replay
from fedsync.observe.run_state import OPERATOR
from fedsync.server import checkpoints
from fedsync.server.array_files import LASTING_BYTES, ArrayFiles, ArrayName
from fedsync.server.checkpoints import FOLDER, Checkpoints
from fedsync.server.operator_requests import OperatorRequests
from fedsync.silo.protocol import Question, Request, Train
from tests.flower import cut_off_runs
from tests.flower.cut_off_runs import Killed, all_is_large, cut_off, keys_for, killed_at, killed_when, strategy_in
from tests.flower.grid import DirectGrid, trainers, unless

pytestmark = pytest.mark.usefixtures("silos_here")


def _all_came_to_one_model(silos: Collection[str]) -> None:
    copies = [trainer._session.replica for name, trainer in trainers.items() if name in silos]
    assert [copy.holds for copy in copies] == [5, 5, 5], "four rounds, and what scores them"
    for copy in copies:
        np.testing.assert_array_equal(copy.model, copies[0].model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "silos_kept"), [("bfv", True), ("bfv", False), ("masked", True)], ids=["bfv", "all died", "masked"]
)
def test_an_encrypted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, silos_kept: bool) -> None:
    """One silo has the newest version already, two have not: all come to one model. Sums have files of their own."""
    all_is_large(monkeypatch)
    out, cipher = tmp_path / "run", f"cipher={{kind: {kind}}}"
    keys = keys_for(tmp_path, monkeypatch, cipher)
    overrides = [cipher, "server_optimizer={kind: fedavgm, momentum: 0.5}"]
    cut_off(strategy_in(out, *overrides, keys=keys), version=2, node=2)
    if not silos_kept:
        trainers.clear()
    strategy_in(out, *overrides, keys=keys, resume=True).start(DirectGrid(3))
    _all_came_to_one_model(trainers)
    replay(out / JOURNAL)


@pytest.mark.slow
def test_a_sealed_sum_of_many_checkpoints_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server keeps dozens of them, and its checkpoints grew by each, which is in all of them."""
    out, cipher = tmp_path / "run", "cipher={kind: bfv}"
    cut_off(strategy_in(out, cipher, "stop.rounds=6", keys=keys_for(tmp_path, monkeypatch, cipher)), version=4)
    sizes = {path.stem: path.stat().st_size for path in (out / FOLDER).glob("*.ckpt")}
    sums = [path.stat().st_size for path in (out / FOLDER).glob("*.raw")]
    assert sizes.keys() == {"2", "3", "4"} and sizes["4"] - sizes["2"] < LASTING_BYTES
    assert len(sums) >= 4 and min(sums) >= LASTING_BYTES and max(sums) < 2**20, "none of them is large"


@pytest.mark.slow
def test_a_run_that_died_unsaved_goes_on_with_what_silos_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes out before a checkpoint is there: of the last commit in the journal nobody has heard."""
    out, cipher = tmp_path / "run", "cipher={kind: pad}"
    keys = keys_for(tmp_path, monkeypatch, cipher)
    save = Checkpoints.save

    def dies(self: Checkpoints, coordinator: Coordinator, *given: Any) -> None:
        if coordinator.version == 2:
            raise Killed
        save(self, coordinator, *given)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Checkpoints, "save", dies)
        strategy_in(out, cipher, keys=keys).start(DirectGrid(3))
    before = set(trainers)
    strategy_in(out, cipher, keys=keys, resume=True).start(DirectGrid(3))
    assert set(trainers) == before
    _all_came_to_one_model(trainers)
    replay(out / JOURNAL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pad", "masked"])
@pytest.mark.parametrize("node", [1, 3], ids=["before any scored", "after two scored"])
def test_the_last_version_of_an_encrypted_run_is_scored_although_the_server_died_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: int, kind: str
) -> None:
    """A silo sends its evaluation of a model in one update only, so a repeated order asks for the same update."""
    out, given = tmp_path / "run", [f"cipher={{kind: {kind}}}", "stop.rounds=2"]
    keys = keys_for(tmp_path, monkeypatch, *given)

    dies = killed_when(lambda request: isinstance(request, Train) and request.order.scores_only)
    with pytest.raises(Killed):
        strategy_in(out, *given, keys=keys).start(DirectGrid(3, {node: dies}))
    again = strategy_in(out, *given, keys=keys, resume=True).start(DirectGrid(3))
    assert again.summary["scored_round"] == 2
    replay(out / JOURNAL)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pad", "masked"])
def test_a_checkpoint_amid_last_scores_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """It has the updates of two silos, whose masks do not fit those of one that joins again: all send theirs again."""
    out, given = tmp_path / "run", [f"cipher={{kind: {kind}}}", "stop.rounds=2"]
    keys = keys_for(tmp_path, monkeypatch, *given)

    def asks(request: Request) -> bool:
        if last := isinstance(request, Train) and request.order.scores_only:
            write_private(out / OPERATOR / "1.ask", codec.dumps(PauseRun(), OperatorQuestion).encode())
        return last

    def dies(desk: OperatorRequests, told: JournalEntry) -> None:
        if any(isinstance(action, OperatorAnswered) for action in told.actions):
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(OperatorRequests, "on_saved", dies)
        patch.setattr(OperatorRequests, "close", lambda desk: desk._lock.close())
        strategy_in(out, *given, keys=keys).start(DirectGrid(3, {3: unless(asks)}))
    again = strategy_in(out, *given, keys=keys, resume=True).start(DirectGrid(3))
    assert again.summary["scored_round"] == 2
    entries = replay(out / JOURNAL)
    answers = [each for entry in entries for each in entry.actions if isinstance(each, OperatorAnswered)]
    assert [(bool(each.refused), each.again) for each in answers] == [(True, False), (True, True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bfv", "masked"])
def test_an_encrypted_run_goes_on_from_before_what_silos_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """Silos begin anew, and what was sealed under the run's first identity still opens."""
    out, cipher = tmp_path / "run", f"cipher={{kind: {kind}}}"
    keys = keys_for(tmp_path, monkeypatch, cipher)
    cut_off(strategy_in(out, cipher, keys=keys), version=2, node=2)
    for _ in range(2):
        newest = max((out / FOLDER).glob("*.ckpt"), key=lambda path: int(path.stem))
        newest.write_bytes(newest.read_bytes()[:100])
        before = set(trainers)
        with contextlib.suppress(Killed):
            strategy_in(out, cipher, keys=keys, resume=True).start(DirectGrid(3, {2: killed_at(3)}))
    assert len(set(trainers) - before) == 3
    strategy_in(out, cipher, keys=keys, resume=True).start(DirectGrid(3))
    _all_came_to_one_model(set(trainers) - before)
    assert "refused" not in caplog.text and "made it invalid" not in caplog.text
    replay(out / JOURNAL)


@pytest.mark.slow
def test_a_server_set_back_to_a_backup_says_so_and_the_way_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silos refuse to follow it back, which is right; the run ends with the reason, instead of waiting for ever."""
    monkeypatch.setattr(cut_off_runs, "TIMING", replace(cut_off_runs.TIMING, join_timeout_s=8.0))
    out, cipher = tmp_path / "run", "cipher={kind: bfv}"
    keys = keys_for(tmp_path, monkeypatch, cipher)
    cut_off(strategy_in(out, cipher, keys=keys), version=1)
    shutil.copytree(out, tmp_path / "backup")
    with pytest.raises(Killed):
        strategy_in(out, cipher, keys=keys, resume=True).start(DirectGrid(3, {2: killed_at(3)}))
    shutil.rmtree(out)
    shutil.copytree(tmp_path / "backup", out)
    with pytest.raises(
        RunError, match=r"was set back, perhaps to a backup.*it says that it holds .*fedsync silo export"
    ):
        strategy_in(out, cipher, keys=keys, resume=True).start(DirectGrid(3))


@pytest.mark.slow
def test_what_an_encrypted_run_sends_is_in_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What silos added and the server forgot could never be made up for: the disk is full at the second commit."""
    out, cipher = tmp_path / "run", "cipher={kind: pad}"
    keys = keys_for(tmp_path, monkeypatch, cipher)
    write = checkpoints._write

    def full(arrays: ArrayFiles, folder: Path, checkpoint: checkpoints.Checkpoint, **how: bool) -> Sequence[ArrayName]:
        if checkpoint.moment.version == 2:
            raise ConfigError(str(folder), "cannot be written: No space left on device", "Check the disk")
        return write(arrays, folder, checkpoint, **how)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_write", full)
        with pytest.raises(RunError, match="no checkpoint can be written"):
            strategy_in(out, cipher, keys=keys).start(DirectGrid(3))
    assert {trainer._session.replica.holds for trainer in trainers.values()} == {1}
    assert strategy_in(out, cipher, keys=keys, resume=True).start(DirectGrid(3)).summary["rounds"] == 4


# A rollback right behind a masked sum, which silos have yet to open.

ROLLBACK = [
    "cipher={kind: masked, inner: {kind: bfv, metrics: plain}}",
    "barrier={kind: fsp, late: drop, interval: {kind: linear, interval_s: 0.2}}",
    "aggregation={kind: fednova}",
    "stop.rounds=5",
]


def _all_hold(version: int) -> None:
    """All silos have one model of this version."""
    replicas = [trainer._session.replica for trainer in trainers.values()]
    assert [replica.holds for replica in replicas] == [version] * 3
    for replica in replicas:
        np.testing.assert_array_equal(replica.model, replicas[0].model)


@pytest.mark.slow
def test_the_rollback_waits_for_the_sum_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trial has three rounds from version 0; version 3 is a masked sum, and version 4 takes all three back.

    In one decision the server commits version 3 and goes back, while silos still open the sum.
    """
    run = strategy_in(tmp_path / "run", *ROLLBACK, keys=keys_for(tmp_path, monkeypatch, *ROLLBACK))
    summary = run.start(DirectGrid(3)).summary
    assert '"Rollback"' in (tmp_path / "run" / JOURNAL).read_text()
    assert (summary["rounds"], summary["lost"]) == (5, [])
    _all_hold(6)  # five rounds and a rollback


@pytest.mark.slow
def test_a_server_that_dies_before_the_sum_opens_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, keys = tmp_path / "run", keys_for(tmp_path, monkeypatch, *ROLLBACK)

    dies = killed_when(lambda request: isinstance(request, Question) and '"Rollback"' in (out / JOURNAL).read_text())
    with pytest.raises(Killed):
        strategy_in(out, *ROLLBACK, keys=keys).start(DirectGrid(3, {1: dies}))
    assert strategy_in(out, *ROLLBACK, keys=keys, resume=True).start(DirectGrid(3)).summary["lost"] == []
    _all_hold(7)  # the round after the rollback was cut off, and begins with another rollback
