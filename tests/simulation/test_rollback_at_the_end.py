"""A run whose time is over just after a way back: what it leaves is the model that it went back to."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Rollback, Savepoint
from fedsync.simulation.run import run_virtual
from tests.simulation.fake import machines
from tests.simulation.sealed import actions

Model = dict[str, torch.Tensor]

SILOS = ClusterConfig(silos=machines({"speed": 400.0}, {"speed": 300.0}, {"speed": 200.0}))
INTERVAL = "interval: {kind: linear, interval_s: 1.0, stage_s: 2.0}"
PLAN = ["task={kind: digits}", f"barrier={{kind: fsp, passes: 9.0, {INTERVAL}}}"]


def run(out: Path, cipher: str, stop: str) -> tuple[dict[str, Any], Model]:
    """Summary and last model of a run."""
    by_examples = "aggregation={kind: fednova, weight: examples}"
    summary = run_virtual(StrategyConfig.load("fsp", [*PLAN, f"cipher={cipher}", stop, by_examples]), SILOS, out)
    return summary, torch.load(out / "model.pt", weights_only=True)


def apart(one: Model, other: Model) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cipher", "rounding"),
    # What silos add and take away again may differ by a bit of a float32 below 1 in size.
    [("{kind: plain}", 0.0), ("{kind: bfv, metrics: plain, examples: 100}", 2.0**-23)],
    ids=["clear", "encrypted"],
)
def test_the_last_model_is_the_one_that_the_run_went_back_to(cipher: str, rounding: float, tmp_path: Path) -> None:
    # Three rounds on trial from 8.56 s on, from the savepoint after nine commits; at 11.68 s a way back, and two rounds
    # of two seconds each.
    summary, last = run(tmp_path / "back", cipher, "stop={seconds: 12.0}")
    changes = actions(tmp_path / "back", Commit, Rollback, Savepoint)
    assert [(type(each), each.version) for each in changes[-5:]] == [
        (Savepoint, 10), (Commit, 11), (Commit, 12), (Commit, 13), (Rollback, 14),
    ]  # fmt: skip
    to_savepoint, remembered = run(tmp_path / "remembered", cipher, "stop={rounds: 9}")
    to_trial, trial = run(tmp_path / "trial", cipher, "stop={rounds: 12}")
    assert apart(last, remembered) <= rounding
    assert apart(last, trial) > 0.01, "that of the third round on trial, which was taken back"
    assert (summary["last"]["version"], summary["stopped_by"]) == (14, "12 s are over")
    assert summary["last"]["metrics"] == pytest.approx(to_savepoint["last"]["metrics"], rel=1e-6), "and is scored as it"
    assert to_trial["last"]["version"] == 13
