"""What `bench/faults/long_soak.py` makes of a run."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from bench.faults.long_soak import books, strikes
from bench.faults.soak_samples import Sample, memory_rows, slope
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual


def test_each_fault_strikes_as_often_as_the_others_about_every_so_many_rounds() -> None:
    made = strikes(9000, 40, 3, ["a", "b", "c"])
    assert made == strikes(9000, 40, 3, ["a", "b", "c"]) != strikes(9000, 40, 4, ["a", "b", "c"])
    gaps = [second.commit - first.commit for first, second in pairwise(made)]
    assert min(gaps) >= 20 and max(gaps) <= 60 and 35 < sum(gaps) / len(gaps) < 45
    assert made[0].commit >= 20 and made[-1].commit < 8980
    counts = Counter(strike.fault for strike in made)
    assert strikes(9000, 0, 3, ["a"]) == []
    assert set(counts) == {"a", "b", "c"} and max(counts.values()) - min(counts.values()) <= 1


def test_books_that_are_not_exact_are_told(tmp_path: Path) -> None:
    config = StrategyConfig.load("fedavg", ["stop.rounds=3", "local.steps=1"])
    run_virtual(
        config,
        ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 9}, {"name": "b", "speed": 8}]}),
        tmp_path,
    )
    assert books(tmp_path, 3) == ""
    assert "does not have each round once" in books(tmp_path, 4)
    path = tmp_path / "summary.json"
    whole = json.loads(path.read_text())
    for name in ("bytes_up", "samples", "rounds"):
        path.write_text(json.dumps({**whole, name: whole[name] + 1}))
        assert books(tmp_path, 3).startswith(f"{name}: the summary has {whole[name] + 1}")
    path.write_text(json.dumps({**whole, "silos": [{**whole["silos"][0], "orders": 2}, whole["silos"][1]]}))
    assert books(tmp_path, 3).startswith("silos: ")


def test_memory_is_that_of_lives_by_their_age() -> None:
    def life(name: str, start: int, sizes: list[int]) -> list[Sample]:
        return [Sample("a", name, start + 10 * i, 10 * i, 0.0, size * 2**20, 2**20) for i, size in enumerate(sizes)]

    (row,) = memory_rows([*life("1", 0, [50, 100, 101, 102]), *life("2", 40, [50, 200, 201]), *life("3", 70, [50])], 10)
    assert (row["lives"], row["oldest"], row["rss"], row["most"]) == (2, 30, 150.0, 2.0)
    assert row["rss_slope"] == pytest.approx(100.0) and row["uss_slope"] == 0.0  # a MiB in ten commits
    assert (row["first"], row["last"]) == (100.0, 200.0)
    assert slope([[(1.0, 5.0)]]) == 0.0
