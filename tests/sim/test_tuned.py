"""`auto` to its end, with real training: in the clear, and where nobody but the silos sees updates and losses."""

import math
from pathlib import Path

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Attested, Note, Stop
from fedsync.core.events import Folded
from fedsync.observe.replay import replay
from fedsync.sim.run import run_virtual

SILOS = ClusterConfig.model_validate(
    {"silos": [{"name": name, "speed": speed, "overhead_s": 0.3} for name, speed in (("a", 90), ("b", 70), ("c", 20))]}
)


@pytest.mark.parametrize("cipher", ["plain", "pad", "bfv"])
def test_it_goes_to_its_target_changes_what_it_does_and_replays(cipher: str, tmp_path: Path) -> None:
    """Where updates are sealed it goes by what silos tell together; it may have orders queued there, too."""
    sets = ["local.batch_size=8", "stop={rounds: 30, target_accuracy: 0.4}", f"cipher={{kind: {cipher}}}"]
    sets += ["auto.overlap=0.25", "auto.every=2", "server_optimizer=null"]
    summary = run_virtual(StrategyConfig.load("auto", sets), SILOS, tmp_path)
    assert summary["seconds_to_target"] is not None
    entries = replay(tmp_path / "journal.jsonl")
    actions = [action for entry in entries for action in entry.actions]
    reasons = [action.text for action in actions if isinstance(action, Note) and action.text.startswith("auto: ")]
    assert any("overlap around" in reason for reason in reasons), reasons
    assert isinstance(actions[-1], Stop) and not actions[-1].failed
    seen = sum(isinstance(event, Folded) for entry in entries for event in entry.events)
    told = sum(isinstance(action, Attested) and action.figures.norms is not None for action in actions)
    assert (bool(seen), bool(told)) == (cipher == "plain", cipher != "plain")


def outlasting(cipher: str, folder: Path) -> dict[int, float]:
    """Share of the silos' ways that outlasts averaging, by version, in a run in which nothing is changed."""
    sets = ["local.batch_size=8", "stop={rounds: 4}", f"cipher={cipher}", "auto.gain=1000", "server_optimizer=null"]
    run_virtual(StrategyConfig.load("auto", sets), SILOS, folder)
    entries = replay(folder / "journal.jsonl")
    seen = [event for entry in entries for event in entry.events if isinstance(event, Folded)]
    told = [action.figures for entry in entries for action in entry.actions if isinstance(action, Attested)]
    norms = {event.version: (event.mean, event.each) for event in seen}
    norms |= {figures.version: figures.norms for figures in told if figures.norms is not None}
    return {version: math.sqrt(mean / each) for version, (mean, each) in norms.items()}


def test_silos_tell_together_what_the_server_sees_in_the_clear(tmp_path: Path) -> None:
    """In four digits, and of updates that were rounded; of the last version nobody hears any more."""
    plain = outlasting("{kind: plain}", tmp_path / "plain")
    for cipher in ("{kind: pad}", "{kind: masked}"):
        sealed = outlasting(cipher, tmp_path / cipher)
        assert sealed.keys() >= {1, 2, 3}
        assert sealed == {version: pytest.approx(plain[version], rel=3e-3) for version in sealed}


def test_lengths_are_told_by_nobody_where_silos_tell_their_own_figures_or_nothing_is_tuned(tmp_path: Path) -> None:
    assert not outlasting("{kind: pad, metrics: plain}", tmp_path / "plain")
    run_virtual(StrategyConfig.load("bsp", ["cipher={kind: pad}", "stop={rounds: 3}"]), SILOS, tmp_path / "bsp")
    actions = [action for entry in replay(tmp_path / "bsp" / "journal.jsonl") for action in entry.actions]
    told = [action.figures for action in actions if isinstance(action, Attested)]
    assert told and not any(figures.norms for figures in told)
