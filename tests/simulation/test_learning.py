"""Predictors that train, under the virtual clock: the journal says when, and a replay does the same."""

from pathlib import Path

from fedsync.core.events import Spare
from fedsync.observe.replay import replay
from fedsync.simulation.engine import SPARE_EPOCHS
from tests.simulation.fake import machines, simulate, strategy

SILOS = machines({"speed": 300.0, "jitter": 0.2}, {"speed": 100.0, "jitter": 0.2})
NARX = {"kind": "narx", "samples": 30, "hidden": 3}


def test_a_run_with_narx_trains_after_commits_and_replays(tmp_path: Path) -> None:
    """20 steps are 20 windows: each silo has 30 after two orders, so training begins after the second commit."""
    result = simulate(tmp_path, SILOS, strategy(predictor=NARX, stop={"rounds": 6}))
    spares = result.events(Spare)
    assert spares
    assert {spare.epochs for spare in spares} == {2 * SPARE_EPOCHS}
    assert len(replay(tmp_path / "journal.jsonl")) == len(result.entries)
