"""Silo files: entries that stand for many, what is there at the start, and what reads back."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig, silos_at_start

FULL = {
    "name": "a",
    "speed": 100.0,
    "jitter": 0.1,
    "curve": {"kind": "affine", "launch_s": 0.1},
    "memory_samples": 64,
    "overhead_s": 0.5,
    "bandwidth_mbps": 100.0,
    "latency_s": 0.02,
    "contention": {"kind": "markov", "factor": 0.3, "on_s": 30.0, "off_s": 60.0},
    "crashes": {"mtbf_s": 3600.0, "repair_s": 60.0},
    "faults": [{"at_s": 100.0, "down_s": 10.0}],
    "joins_at_s": 5.0,
    "leaves_at_s": 5000.0,
    "examples": 300,
}


def read(*silos: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig.model_validate({"silos": list(silos)})


def load(folder: Path, *silos: dict[str, Any]) -> ClusterConfig:
    path = folder / "silos.yaml"
    path.write_text(yaml.safe_dump({"silos": list(silos)}))
    return ClusterConfig.load(path)


def test_a_count_stands_for_silos_with_numbers() -> None:
    silos = read({"name": "x", "speed": 1.0, "count": 3, "jitter": 0.5}, {"name": "y", "speed": 2.0}).silos
    assert [(silo.name, silo.speed, silo.count) for silo in silos] == [
        ("x-0", 1.0, None),
        ("x-1", 1.0, None),
        ("x-2", 1.0, None),
        ("y", 2.0, None),
    ]
    assert silos[2].jitter == 0.5
    assert [silo.name for silo in read({"name": "x", "speed": 1.0, "count": 1}).silos] == ["x-0"]


@pytest.mark.parametrize(
    "silos",
    [
        [FULL],
        [{"name": "x", "speed": 1.0, "count": 5}],
        [{"name": "x-0", "speed": 1.0}],
        [{"name": "x-0", "speed": 1.0}, {"name": "x-1", "speed": 2.0}, {"name": "x-2", "speed": 2.0}],
        [{"name": "x-0", "speed": 1.0}, {"name": "y", "speed": 1.0}, {"name": "x-1", "speed": 1.0}],
        [{"name": "x-1", "speed": 1.0}, {"name": "x-2", "speed": 1.0}],
        [{"name": "-0", "speed": 1.0}, {"name": "-1", "speed": 1.0}],
        [{"name": "x-0-0", "speed": 1.0}, {"name": "x-0-1", "speed": 1.0}],
    ],
)
def test_entries_read_back_the_same(silos: list[dict[str, Any]]) -> None:
    cluster = read(*silos)
    assert read(*cluster.entries()) == cluster


def test_alike_silos_are_written_as_one_entry() -> None:
    entries = read({"name": "x", "speed": 1.0, "count": 1000}, {"name": "y", "speed": 2.0}).entries()
    assert entries == [{"name": "x", "speed": 1.0, "count": 1000}, {"name": "y", "speed": 2.0}]


def test_who_is_there_at_the_start() -> None:
    silos = [{"name": "x", "speed": 1.0, "count": 3}, {"name": "y", "speed": 1.0, "joins_at_s": 1.0, "count": 2}]
    assert read(*silos).at_start == 3
    assert read(silos[1]).at_start == 1, "one at least, or nothing would ever begin"
    entries = read(*silos).entries()
    assert (silos_at_start(entries, virtual=True), silos_at_start(entries, virtual=False)) == (3, 5)


@pytest.mark.parametrize(
    ("changes", "place", "problem"),
    [
        ({"count": 0}, "silos.0.count", "0 is not allowed"),
        ({"contention": {"kind": "markov", "factor": 0.0}}, "silos.0.contention.factor", "0.0 is not allowed"),
        ({"contention": {"kind": "markoff"}}, "silos.0.contention.kind", "unknown kind 'markoff'"),
        ({"contention": {"kind": "markov", "onn_s": 1}}, "silos.0.contention.onn_s", "unknown key"),
        ({"bandwidth_mbps": 0}, "silos.0.bandwidth_mbps", "0 is not allowed"),
        ({"latency_s": -1}, "silos.0.latency_s", "-1 is not allowed"),
        ({"crashes": {"mtbf_s": 1.0}}, "silos.0.crashes.repair_s", "missing"),
        ({"faults": [{"at_s": 1.0, "down_s": 0}]}, "silos.0.faults.0.down_s", "0 is not allowed"),
        ({"leaves_at_s": 5.0, "joins_at_s": 5.0}, "silos.0", "leaves_at_s 5 is not after joins_at_s 5"),
        ({"faults": [{"at_s": 2.0, "down_s": 1}], "joins_at_s": 3}, "silos.0", "a fault at 2 s is not after"),
        ({"examples": 0}, "silos.0.examples", "0 is not allowed"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, changes: dict[str, Any], place: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {"name": "a", "speed": 1.0, **changes})
    assert caught.value.place.endswith(place)
    assert problem in caught.value.problem


def test_a_name_may_not_come_out_of_two_entries(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"silos\.1\.name: 'x-1' is taken by silos\.0"):
        load(tmp_path, {"name": "x", "speed": 1.0, "count": 3}, {"name": "x-1", "speed": 1.0})


def test_many_silos_with_one_trace_read_it_from_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "day.csv").write_text("seconds,factor\n0,1\n")
    silos = load(tmp_path, {"name": "x", "speed": 1.0, "count": 2, "trace": "day.csv"}).silos
    assert {silo.trace for silo in silos} == {str((tmp_path / "day.csv").resolve())}
