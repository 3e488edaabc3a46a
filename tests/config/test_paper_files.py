"""The papers' exact algorithms in ``strategies/paper/``: each runs, and does in a run what its paper says."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.locate import shipped_folder
from fedsync.config.strategy import StrategyConfig
from fedsync.policies.barrier.kinds.sampled import Sampled
from fedsync.simulation.timing_only import run_timing

NAMES = sorted(path.stem for path in (shipped_folder() / "paper").glob("*.yaml"))
SPEEDS = {"a": 300.0, "b": 250.0, "c": 200.0, "d": 150.0, "e": 100.0}


def orders(tmp_path: Path, name: str, rounds: int) -> tuple[list[list[dict[str, Any]]], list[float]]:
    """Orders of each round by silo, and the instants of the rounds' ends."""
    config = StrategyConfig.load(f"paper/{name}", [f"stop={{rounds: {rounds}}}"])
    silos = [{"name": silo, "speed": speed} for silo, speed in SPEEDS.items()]
    run_timing(config, ClusterConfig.model_validate({"silos": silos}), tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    return [[row["silos"][silo] for silo in SPEEDS if silo in row["silos"]] for row in rows], [r["at_s"] for r in rows]


@pytest.mark.parametrize("name", NAMES)
def test_a_paper_file_runs_and_cites_its_source(tmp_path: Path, name: str) -> None:
    config = StrategyConfig.load(f"paper/{name}")
    assert config.name == f"paper-{name}" and config.server_optimizer is None and config.cipher.kind == "plain"
    text = (shipped_folder() / "paper" / f"{name}.yaml").read_text(encoding="utf-8")
    assert "# Source: " in text and "section" in text.split("# Source: ")[1].split("\n")[0]
    rounds, _ = orders(tmp_path, name, 4)
    assert len(rounds) == 4


def test_the_error_for_a_wrong_name_offers_the_right_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'paper/lb-bsp'"):
        StrategyConfig.load("paper/lb-bps")


def test_lb_bsp_divides_the_total_batch_in_proportion_to_speeds(tmp_path: Path) -> None:
    """By hand: 160 samples over 300:250:200:150:100. Steps stay 20, and a round waits for all."""
    rounds, ends = orders(tmp_path, "lb-bsp", 3)
    assert [order["batch_size"] for order in rounds[0]] == [32] * 5
    assert [order["batch_size"] for order in rounds[1]] == [48, 40, 32, 24, 16]
    assert {order["steps"] for row in rounds for order in row} == {20}
    assert ends[0] == pytest.approx(20 * 32 / 100) and ends[1] - ends[0] == pytest.approx(20 * 16 / 100)


def test_a_bsp_stops_all_when_the_first_has_finished_and_half_is_done(tmp_path: Path) -> None:
    """By hand: a ends after 20 x 32 / 300 s, when 2/3 of all steps are done; each ends the step at which it is."""
    rounds, ends = orders(tmp_path, "a-bsp", 1)
    assert rounds[0][0]["steps"] == 20
    first_s = 20 * 32 / 300
    for order, speed in zip(rounds[0][1:], list(SPEEDS.values())[1:], strict=True):
        assert first_s <= order["steps"] * 32 / speed <= first_s + 1.0 + 32 / speed  # a report takes up to a second
    assert ends[0] < 20 * 32 / 100


def test_elastic_chooses_the_steps_with_which_all_end_closest_together(tmp_path: Path) -> None:
    """By brute force: the closest ends have some silo's end as their latest, and the others end at or before it."""
    rounds, _ = orders(tmp_path, "elastic", 2)
    assert {order["steps"] for order in rounds[0]} == {2}
    chosen = [order["steps"] * 32 / speed for order, speed in zip(rounds[1], SPEEDS.values(), strict=True)]
    waits = []
    for last in {count * 32 / speed for speed in SPEEDS.values() for count in range(1, 16)}:
        ends = [_before(last, speed) for speed in SPEEDS.values()]
        waits += [max(ends) - min(ends)] if min(ends) > 0 else []
    assert max(chosen) - min(chosen) == pytest.approx(min(waits))


def _before(last: float, speed: float) -> float:
    """End of the last of at most 15 steps that is not after ``last``; 0 without one."""
    return max((count * 32 / speed for count in range(1, 16) if count * 32 / speed <= last + 1e-12), default=0.0)


def test_fsp_lets_all_silos_train_for_the_same_time(tmp_path: Path) -> None:
    """At half of its last step, a silo ends at most half a step from the others."""
    rounds, ends = orders(tmp_path, "fsp", 2)
    times = [order["steps"] * 32 / speed for order, speed in zip(rounds[0], SPEEDS.values(), strict=True)]
    assert max(times) - min(times) <= 32 / 100 and ends[0] == pytest.approx(max(times))


@pytest.mark.parametrize(("name", "staleness"), [("pbsp", 0), ("pssp", 4)])
def test_psp_adds_each_update_as_it_comes(tmp_path: Path, name: str, staleness: int) -> None:
    rounds, _ = orders(tmp_path, name, 40)
    assert {len(row) for row in rounds} == {1} and {order["steps"] for row in rounds for order in row} == {1}
    barrier = StrategyConfig.load(f"paper/{name}").barrier
    assert isinstance(barrier, Sampled) and barrier.staleness == staleness
