"""Silos of a silo file with privacy budgets, through the Flower driver."""

from pathlib import Path

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_strategy import FedSync
from fedsync.server.timeouts import Timeouts
from tests.flower.grid import DirectGrid
from tests.simulation.test_columns import table

pytestmark = pytest.mark.usefixtures("silos_here")

TIMING = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=20, look_s=0.05)


@pytest.mark.slow
def test_a_silo_whose_budget_has_no_room_at_the_start_is_named_and_the_others_train(tmp_path: Path) -> None:
    """One evaluation alone costs more than it has."""
    entries = [{"name": name, "speed": 1e6} for name in "abc"]
    entries[1]["privacy"] = {"epsilon": 0.01, "delta": 1e-3}
    cluster = ClusterConfig.model_validate({"silos": entries})
    files = [table(tmp_path / f"{name}.csv", ["age", "dose", "sick"]) for name in "abc"]
    made = f"{{kind: csv, files: [{', '.join(files)}], target: sick, standardise: {{age: [32, 7], dose: [5, 3]}}}}"
    config = StrategyConfig.load(
        "fedavg",
        [
            f"task={made}",
            "local={steps: 1, batch_size: 8, threads: 1}",
            "stop.rounds=2",
            "min_silos=2",
            "privacy={kind: dp-sgd, clip: 1.0, target_epsilon: 5.0, delta: 1.0e-3, score_noise: 5}",
        ],
    )
    run = FedSync(config, cluster, out=tmp_path / "run", timing=TIMING)
    run.start(DirectGrid(3))
    assert run.run_summary is not None and run.run_summary["rounds"] == 2
    assert [each["silo"] for each in run.run_summary["lost"]] == ["b"]
    (refused,) = [note for note in run.run_summary["notes"] if note.startswith("took no part")]
    assert "answers BUDGET" in refused
