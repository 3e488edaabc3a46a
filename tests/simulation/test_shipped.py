"""Every shipped strategy runs to its end on any silos."""

from pathlib import Path

import pytest

from fedsync.common.errors import RunError
from fedsync.config.cluster import SiloConfig
from fedsync.config.locate import shipped_folder
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Rollback
from fedsync.observe.replay import replay
from tests.simulation.fake import machines, simulate

SILOS = {
    "one": machines({"speed": 100.0}),
    "two uneasy ones": machines(
        {"speed": 200.0, "jitter": 0.3, "memory_samples": 20}, {"speed": 70.0, "jitter": 0.5, "overhead_s": 0.4}
    ),
    "a crawler among seven": machines(*({"speed": 3000.0, "jitter": 0.1} for _ in range(6)), {"speed": 30.0}),
}


NAMES = sorted(path.stem for path in shipped_folder().glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "silos"),
    [
        # Strategies take turns with silos; ``make full`` has each with all.
        pytest.param(name, silos, id=f"{name}-{which}", marks=[pytest.mark.full] * ((n + place) % len(SILOS) != 0))
        for n, name in enumerate(NAMES)
        for place, (which, silos) in enumerate(SILOS.items())
    ],
)
def test_it_runs_to_its_end_and_replays(tmp_path: Path, name: str, silos: list[SiloConfig]) -> None:
    config = StrategyConfig.load(name)
    if config.policies().least > len(silos):
        with pytest.raises(RunError, match="nothing is left to happen"):
            simulate(tmp_path, silos, config)
        return
    result = simulate(tmp_path, silos, config)
    assert config.name == name
    summary = result.ledger.summary()
    versions = len(result.actions(Commit, Rollback))
    assert summary["stopped_by"] is not None
    scoring = config.policies().tally > 0  # where figures are sealed, one more version scores the last
    by_rounds = "rounds done" in summary["stopped_by"]
    assert not by_rounds or (config.stop.rounds or 0) + scoring == versions
    assert 0 < summary["rounds"] <= versions - (scoring and by_rounds)
    assert len(replay(tmp_path / "journal.jsonl")) == len(result.entries)
