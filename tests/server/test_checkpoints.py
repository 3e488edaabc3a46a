"""A run that is cut off goes on from what is on disk, and comes to what it would have come to."""

import json
import stat
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.proto.node_pb2 import NodeInfo
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.errors import ConfigError, RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.observe.replay import replay
from fedsync.observe.run_builder import measuring
from fedsync.server.checkpoints import FOLDER, FORMAT, _write, digest
from fedsync.silo.protocol import EvaluateModel, Request, Train
from tests.flower import cut_off_runs
from tests.flower.cut_off_runs import SILOS, Killed, all_is_large, cut_off, killed_at, killed_when, strategy_in
from tests.flower.grid import DirectGrid, silos_in_this_process, trainers, unless

pytestmark = pytest.mark.usefixtures("silos_here")


def _model(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


def _commits(out: Path) -> list[Commit]:
    """Those in the journal, which replays."""
    return [each for entry in replay(out / JOURNAL) for each in entry.actions if isinstance(each, Commit)]


def _files(out: Path) -> list[str]:
    return sorted(path.name for path in (out / FOLDER).iterdir() if path.suffix != ".raw" and path.name != "boot")


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
def test_a_resumed_run_comes_to_the_same_model_and_its_journal_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    straight = _model(strategy_in(tmp_path / "straight").start(DirectGrid(3)).arrays)
    if large:
        all_is_large(monkeypatch)
    out = tmp_path / "run"
    cut_off(strategy_in(out), version=2)
    assert _files(out) == ["0.ckpt", "1.ckpt", "2.ckpt"]
    # Each version's model once: also version 0, to which each of them could go back.
    assert len([*(out / FOLDER).glob("*.raw")]) == (3 if large else 0)
    assert not (out / "arrays").exists(), "what was in use goes with the process"
    assert stat.S_IMODE((out / FOLDER).stat().st_mode) == 0o700
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in (out / FOLDER).iterdir())
    before = set(map(id, trainers.values()))

    resumed = strategy_in(out, resume=True)
    result = resumed.start(DirectGrid(3))

    np.testing.assert_array_equal(_model(result.arrays), straight)
    assert before <= set(map(id, trainers.values())), "the silos' trainers went on"
    named = [RunSpec.parse(identity.spec).run for identity in trainers]
    assert {name.rpartition("-")[0] for name in named} == {resumed.config.name}, "by which owners know the run"
    assert len(trainers) == 3 + 3, "those of the straight run, and those of this one"
    commits = _commits(out)
    assert [commit.version for commit in commits] == [1, 2, 3, 4]
    used = [update_id for commit in commits for update_id in commit.weights]
    assert len(used) == len(set(used)) == 4 * 3
    rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert result.summary["rounds"] == 4
    times = [entry.at_s for entry in read_journal(out / JOURNAL)[1]]
    assert times == sorted(times)


@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ["fedavgm", "fedadam", "cautious-adam", "scaffold"])
def test_a_server_optimizer_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool, kind: str
) -> None:
    chosen = [f"server_optimizer={{kind: {kind}}}", "aggregation.kind=fednova"]
    straight = _model(strategy_in(tmp_path / "straight", *chosen).start(DirectGrid(3)).arrays)
    if large:
        all_is_large(monkeypatch)
    cut_off(strategy_in(tmp_path / "run", *chosen), version=2)
    result = strategy_in(tmp_path / "run", *chosen, resume=True).start(DirectGrid(3))
    np.testing.assert_array_equal(_model(result.arrays), straight)


def test_a_resumed_run_is_the_same_run_as_far_as_silos_are_told(tmp_path: Path) -> None:
    told = ConfigRecord({"lr": 0.01})
    with pytest.raises(Killed):
        strategy_in(tmp_path).start(DirectGrid(3, {1: killed_at(2)}), train_config=told)
    for other in (None, ConfigRecord({"lr": 0.1})):
        with pytest.raises(ConfigError, match="of another configuration"):
            strategy_in(tmp_path, resume=True).start(DirectGrid(3), train_config=other)
    before = set(trainers)
    strategy_in(tmp_path, resume=True).start(DirectGrid(3), train_config=told)
    assert set(trainers) == before, "silos know it for the run that they are in"


def test_silos_keep_their_state_if_the_server_dies_while_it_writes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr("fedsync.server.checkpoints._write", Mock(wraps=_write, side_effect=[*[DEFAULT] * 3, Killed]))
        strategy_in(tmp_path).start(DirectGrid(3))
    assert len(_commits(tmp_path)) == 2 and _files(tmp_path) == ["0.ckpt", "1.ckpt"]
    before = set(trainers)
    strategy_in(tmp_path, resume=True).start(DirectGrid(3))
    assert set(trainers) == before


def _dies_in_its_last_evaluation(out: Path) -> None:
    dies = killed_when(lambda request: isinstance(request, EvaluateModel))
    with pytest.raises(Killed):
        strategy_in(out).start(DirectGrid(3, dict.fromkeys((1, 2, 3), dies)))


def test_a_run_that_was_cut_off_in_its_last_evaluation_only_evaluates(tmp_path: Path) -> None:
    _dies_in_its_last_evaluation(tmp_path)
    grid = DirectGrid(3)
    summary = strategy_in(tmp_path, resume=True).start(grid).summary
    assert sorted(kind for _, kind in grid.pushed) == ["Describe"] * 3 + ["EvaluateModel"] * 3
    assert summary["accuracy"] is not None
    replay(tmp_path / JOURNAL)


def test_who_leaves_a_resumed_run_that_waits_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _dies_in_its_last_evaluation(tmp_path)
    monkeypatch.setattr(cut_off_runs, "TIMING", replace(cut_off_runs.TIMING, look_s=0.1, return_timeout_s=2.0))

    grid = DirectGrid(3, {3: unless(lambda request: grid.nodes.discard(3))})
    grid.nodes.discard(2)
    summary = strategy_in(tmp_path, resume=True).start(grid).summary
    assert sorted(grid.pushed) == [(1, "Describe"), (1, "EvaluateModel"), (3, "Describe")]
    assert summary["accuracy"] is not None
    replay(tmp_path / JOURNAL)


def test_a_run_that_was_cut_off_between_two_evaluations_goes_on(tmp_path: Path) -> None:
    """Silos train models of their own between them. That one of them is lost meanwhile brings a checkpoint."""

    class DiesAfterALoss(DirectGrid):
        looks = 0

        def get_nodes(self) -> Iterable[NodeInfo]:
            self.looks += 3 not in self.nodes
            if self.looks == 2:
                raise Killed
            return super().get_nodes()

    def trains_for_ever(request: Request) -> bool:
        return isinstance(request, Train) and request.order.apart

    def leaves(request: Request) -> bool:
        if trains_for_ever(request):
            grid.nodes.discard(3)
        return trains_for_ever(request)

    grid, own = DiesAfterALoss(3), "evaluation.cross_site={local: true}"
    grid.answers = {1: unless(trains_for_ever), 2: unless(trains_for_ever), 3: unless(leaves)}
    with pytest.raises(Killed):
        strategy_in(tmp_path, own).start(grid)
    strategy_in(tmp_path, own, resume=True).start(DirectGrid(3))
    models = json.loads((tmp_path / "cross_site.json").read_text())["models"]
    assert [each["silo"] for each in models if each["subject"] == "local" and each.get("silo")] == ["a", "b", "c"]
    replay(tmp_path / JOURNAL)


@pytest.mark.parametrize("damage", ["torn", "flipped", "empty"])
def test_a_damaged_checkpoint_gives_way_to_one(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    cut_off(strategy_in(tmp_path), version=2)
    newest = tmp_path / FOLDER / "2.ckpt"
    data = newest.read_bytes()
    middle = len(data) // 2
    changed = {"torn": data[:middle], "flipped": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]}
    newest.write_bytes(changed.get(damage, b""))
    before = set(trainers)

    strategy_in(tmp_path, resume=True).start(DirectGrid(3))

    assert "2.ckpt: torn or corrupt; resuming from the checkpoint before" in caplog.text
    assert len(set(trainers) - before) == 3, "silos that know a version that is made anew must forget it"
    assert [commit.version for commit in _commits(tmp_path)] == [1, 2, 3, 4]


def test_what_a_killed_server_was_writing_goes(tmp_path: Path) -> None:
    cut_off(strategy_in(tmp_path), version=1)
    (tmp_path / FOLDER / ".2.ckpt.4711").write_bytes(b"half")
    cut_off(strategy_in(tmp_path, resume=True), version=2)
    assert _files(tmp_path) == ["0.ckpt", "1.ckpt", "2.ckpt"]


def test_what_cannot_be_resumed_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no checkpoint to resume from"):
        strategy_in(tmp_path / "none", resume=True).start(DirectGrid(3))
    out = tmp_path / "run"
    cut_off(strategy_in(out), version=1)
    with pytest.raises(ConfigError, match=r"of another configuration: local.learning_rate: [0-9.]+, now 0.5"):
        strategy_in(out, "local.learning_rate=0.5", resume=True).start(DirectGrid(3))
    with pytest.raises(ConfigError, match=r"of another configuration: stop.rounds: [0-9]+, now 60. "):
        strategy_in(out, resume=True).start(DirectGrid(3), num_rounds=60)
    for path in (out / FOLDER).iterdir():
        path.write_bytes(b"no")
    with pytest.raises(ConfigError, match="no checkpoint is whole"):
        strategy_in(out, resume=True).start(DirectGrid(3))


def test_a_checkpoint_of_another_version_or_owner_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(strategy_in(tmp_path), version=1)
    with monkeypatch.context() as patch:
        patch.setattr("fedsync.server.checkpoints.__version__", "99.0")
        with pytest.raises(ConfigError, match=r"written by FedSync .*; this is 99\.0"):
            strategy_in(tmp_path, resume=True).start(DirectGrid(3))
        patch.undo()
        patch.setattr("fedsync.server.checkpoints.FORMAT", 0)
        with pytest.raises(ConfigError, match=rf"format {FORMAT}\..*Resume with that version; this is .*, format 0"):
            strategy_in(tmp_path, resume=True).start(DirectGrid(3))
    (tmp_path / FOLDER / "1.ckpt").chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        strategy_in(tmp_path, resume=True).start(DirectGrid(3))


def test_without_checkpoints_nothing_is_kept(tmp_path: Path) -> None:
    strategy_in(tmp_path, checkpoints=0).start(DirectGrid(3))
    assert not (tmp_path / FOLDER).exists()
    with pytest.raises(ConfigError, match="FedSync, checkpoints: 0 in a resumed run"):
        strategy_in(tmp_path, checkpoints=0, resume=True)  # the next resumption could not see what silos have


def test_older_ones_stay_while_no_newer_one_is_surely_on_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise ConfigError(str(path), "cannot be written: Input/output error", "Check the disk")

    monkeypatch.setattr("fedsync.server.checkpoints.settle_file", broken)
    strategy_in(tmp_path).start(DirectGrid(3))
    assert _files(tmp_path) == [f"{version}.ckpt" for version in range(5)]
    assert "may be lost if this machine fails" in caplog.text


def test_a_run_goes_on_where_checkpoints_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes, mode: int, **how: bool) -> None:
        raise ConfigError(str(path), "cannot be written: No space left on device", "Check the disk")

    monkeypatch.setattr("fedsync.server.checkpoints.write_atomically", full)
    assert strategy_in(tmp_path).start(DirectGrid(3)).summary["rounds"] == 4
    assert caplog.text.count("No space left on device") == 1, "said once, not every round"


def test_a_run_ends_where_its_journal_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy, seen = strategy_in(tmp_path), []

    def evaluate(version: int, arrays: ArrayRecord) -> MetricRecord | None:
        seen.append(version)
        if version == 2:
            monkeypatch.setattr(
                "fedsync.core.journal.JournalWriter.append",
                lambda self, entry: (_ for _ in ()).throw(OSError(28, "Full")),
            )
        return None

    with pytest.raises(RunError, match="the run's files cannot be written: Full"):
        strategy.start(DirectGrid(3), evaluate_fn=evaluate)
    assert seen == [0, 1, 2]
    monkeypatch.undo()
    with silos_in_this_process():
        strategy_in(tmp_path, resume=True).start(DirectGrid(3))
    replay(tmp_path / JOURNAL)


def test_the_files_in_the_folder_are_the_configuration_that_is_resumed(tmp_path: Path) -> None:
    strategy = strategy_in(tmp_path, name="lb-bsp")
    cut_off(strategy, version=1)
    loaded = digest(StrategyConfig.load(tmp_path / "config.yaml"), ClusterConfig.load(tmp_path / "silos.yaml"))
    assert loaded == digest(measuring(strategy.config), SILOS)
    assert loaded != digest(measuring(strategy.config), ClusterConfig(silos=SILOS.silos[:2]))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--resume", "x", "--runtime", "virtual"], "leaves nothing behind to go on from"),
        (["--resume", "x", "--runtime", "flower"], "leaves nothing behind to go on from"),
        (["fedavg", "--resume", "x"], "the folder says what is run"),
        (["--resume", "x", "--seed", "3"], "the folder says what is run"),
        (["--resume", "x", "--silos", "hetero"], "the folder says what is run"),
        (["--resume", "x"], "runs of a server continue with `fedsync server run --resume`"),
        ([], "no strategy is named"),
    ],
)
def test_the_command_line_refuses_what_makes_no_sense(arguments: list[str], problem: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert problem in str(result.exception)
