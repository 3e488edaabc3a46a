"""Tests of the project, for `python -m pytest`: a few rounds in virtual time improve the model."""

from __future__ import annotations

from pathlib import Path

from fedsync import ClusterConfig, StrategyConfig
from fedsync.simulation.run import run_virtual

HERE = Path(__file__).parent


def test_a_few_rounds_learn(tmp_path: Path) -> None:
    """The accuracy of the fifth round exceeds the accuracy of the first."""
    silos = ClusterConfig.load(HERE / "silos.yaml")
    scores = []
    for rounds in (1, 5):
        strategy = StrategyConfig.load(HERE / "strategy.yaml", [f"stop.rounds={rounds}"])
        scores.append(run_virtual(strategy, silos, tmp_path / str(rounds))["accuracy"])
    assert scores[1] > scores[0]
