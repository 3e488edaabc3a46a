"""`auto` to its end, with real training: in the clear, and where nobody but the silos sees updates and losses."""

from pathlib import Path

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Note, Stop
from fedsync.core.events import Folded
from fedsync.observe.replay import replay
from fedsync.sim.run import run_virtual

SILOS = ClusterConfig.model_validate(
    {"silos": [{"name": name, "speed": speed, "overhead_s": 0.3} for name, speed in (("a", 90), ("b", 70), ("c", 20))]}
)


@pytest.mark.parametrize("cipher", ["plain", "pad", "bfv"])
def test_it_goes_to_its_target_changes_what_it_does_and_replays(cipher: str, tmp_path: Path) -> None:
    """Where updates are sealed it goes by the loss that silos tell together; it may have orders queued there, too."""
    sets = ["local.batch_size=8", "stop={rounds: 30, target_accuracy: 0.4}", f"cipher={{kind: {cipher}}}"]
    sets += ["auto.overlap=0.25", "auto.every=2", "server_optimizer=null"]
    summary = run_virtual(StrategyConfig.load("auto", sets), SILOS, tmp_path)
    assert summary["seconds_to_target"] is not None
    entries = replay(tmp_path / "journal.jsonl")
    actions = [action for entry in entries for action in entry.actions]
    reasons = [action.text for action in actions if isinstance(action, Note) and action.text.startswith("auto: ")]
    assert any("overlap around" in reason for reason in reasons), reasons
    assert not all(reason.endswith("elasticity 0.50") for reason in reasons), "nothing was learned of steps"
    assert isinstance(actions[-1], Stop) and not actions[-1].failed
    seen = sum(isinstance(event, Folded) for entry in entries for event in entry.events)
    assert bool(seen) == (cipher == "plain")
