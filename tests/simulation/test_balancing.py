"""Balancers on simulated machines: who is equal when, and after how many rounds."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fedsync.config.cluster import ClusterConfig, SiloConfig
from tests.simulation.fake import Result, machines, simulate, strategy

STEPS, MEAN = 4, 32


def run(out: Path, silos: Sequence[SiloConfig], rounds: int, **balancer: Any) -> Result:
    config = strategy(balancer=balancer, local={"steps": STEPS, "batch_size": MEAN}, stop={"rounds": rounds})
    return simulate(out, silos, config)


def sizes(result: Result) -> list[list[int]]:
    """Of every round, in the order of the names."""
    return [[row.silos[name].batch_size for name in sorted(row.silos)] for row in result.ledger.rounds]


def order_s(silo: SiloConfig, size: int) -> float:
    return silo.overhead_s + STEPS * silo.build_curve().step_s(size)


def best_round_s(silos: Sequence[SiloConfig]) -> float:
    """The shortest round there is, by trying all sizes of three silos."""
    total = MEAN * len(silos)
    return min(
        max(order_s(silo, size) for silo, size in zip(silos, (a, b, total - a - b), strict=True))
        for a, b in itertools.product(range(1, total), repeat=2)
        if a + b < total
    )


GPUS = machines(
    {"speed": 110.0, "curve": {"kind": "affine", "launch_s": 0.35, "saturation": 16}, "overhead_s": 0.1},
    {"speed": 27.0, "curve": {"kind": "affine", "launch_s": 0.4}, "overhead_s": 0.3},
    {"speed": 13.0, "overhead_s": 0.5},  # a CPU among them
)


def test_equalise_learns_curves_and_reaches_the_optimum_in_the_third_round(tmp_path: Path) -> None:
    """One round with equal sizes and one in proportion give two points of each curve."""
    result = run(tmp_path, GPUS, 6, kind="equalise")
    best_s = best_round_s(GPUS)
    assert result.round_seconds()[2:] == pytest.approx([best_s] * 4, rel=1e-9)
    assert result.round_seconds()[1] > 1.1 * best_s


def test_leader_straggler_gets_there_too_but_in_its_own_time(tmp_path: Path) -> None:
    """Five rounds to look, then five samples a round, and one a round from the first change of places on."""
    result = run(tmp_path, GPUS, 80, kind="leader-straggler")
    seconds, best_s = result.round_seconds(), best_round_s(GPUS)
    assert sizes(result)[:5] == [[MEAN] * 3] * 5
    assert sizes(result)[5] == [37, 32, 27]
    assert min(seconds[:10]) > 1.1 * best_s
    assert seconds[-1] < 1.05 * best_s
    assert any("changed places" in note for note in result.ledger.summary()["notes"])


def test_the_shipped_gpus_come_to_the_sizes_of_the_paper_s_figure(tmp_path: Path) -> None:
    """LB-BSP, figure 8: (89, 21, 12, 6), for which the silo file was made; one step an order, as there."""
    config = strategy(
        balancer={"kind": "equalise", "gradient_noise": 0}, local={"steps": 1, "batch_size": 32}, stop={"rounds": 4}
    )
    result = simulate(tmp_path, ClusterConfig.load("gpus").silos, config)
    assert {name: share.batch_size for name, share in result.ledger.rounds[-1].silos.items()} == {
        "v100": 89,
        "m60": 21,
        "k80": 12,
        "k520": 6,
    }
