"""A part of the silos takes part in each round, drawn by lot."""

import json
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.kinds.ssp import Asp
from fedsync.policies.barrier.wrappers.fraction import Fraction
from fedsync.policies.barrier.wrappers.late_orders import Quorum
from fedsync.simulation.run import run_virtual
from fedsync.train.weights import TaskModel
from tests.laws.rounds import Rounds

NAMES = [f"silo-{index}" for index in range(10)]


def drawn(barrier: Fraction, rounds: int, names: list[str] = NAMES, seed: int = 1) -> list[set[str]]:
    """Who was in each round of so many, all of whose orders take a second."""
    run = Rounds(barrier, seed=seed)
    run.join(*names)
    found = []
    for number in range(1, rounds + 1):
        found.append({name for name, silo in run.silos.items() if silo.busy})
        run.finish(float(number), *sorted(found[-1]))
    assert [set(silos) for _, silos in run.commits] == found, "a round commits whom it drew"
    return found


@pytest.mark.parametrize(
    ("share", "least", "silos", "expected"),
    [
        (0.5, 1, 10, 5),
        (0.7, 1, 10, 7),  # 0.7 x 10 is 6.999999999999999 in binary
        (0.59, 1, 10, 5),  # rounded down, as Flower does
        (0.05, 1, 10, 1),  # never nobody
        (0.1, 3, 10, 3),
        (0.5, 9, 4, 4),  # all there are
        (1.0, 1, 10, 10),
    ],
)
def test_so_many_take_part(share: float, least: int, silos: int, expected: int) -> None:
    barrier = Fraction(Bsp(), share, least)
    assert {len(each) for each in drawn(barrier, 5, NAMES[:silos])} == {expected}
    assert barrier.sampled(silos) == expected


def test_each_silo_is_drawn_as_often_as_its_share_and_by_itself() -> None:
    """In 2000 rounds 600 times, give or take five standard deviations; neither the last round nor others sway it."""
    rounds, share = 2000, 0.3
    found = drawn(Fraction(Bsp(), share), rounds)
    off = 5 * sqrt(rounds * share * (1 - share))
    counts = Counter(name for each in found for name in each)
    assert all(abs(counts[name] - rounds * share) < off for name in NAMES), counts
    again = Counter(name for each, then in pairwise(found) for name in each & then)
    assert all(abs(again[name] - rounds * share**2) < off for name in NAMES), again
    pairs = sum({"silo-0", "silo-1"} <= each for each in found)
    assert abs(pairs - rounds * 3 / 10 * 2 / 9) < off


def test_a_draw_depends_on_seed_version_and_names_alone() -> None:
    barrier = Fraction(Bsp(), 0.4)
    found = drawn(barrier, 20)
    assert found == drawn(barrier, 20, NAMES[::-1])
    assert found != drawn(barrier, 20, seed=2)
    # Of those who are left without one silo, the others are still in.
    fewer = drawn(Fraction(Bsp(), 0.4, least=4), 20, NAMES[1:])
    assert all(each - {"silo-0"} <= other for each, other in zip(found, fewer, strict=True))


def test_who_joins_or_leaves_in_a_round_does_not_disturb_it() -> None:
    run = Rounds(Fraction(Bsp(), 0.5))
    run.join(*NAMES[:6])
    first = {name for name, silo in run.silos.items() if silo.busy}
    run.join(*NAMES[6:])
    assert {name for name, silo in run.silos.items() if silo.busy} == first
    left = sorted(first)[0]
    run.leave(left)
    run.finish(1.0, *sorted(first - {left}))
    assert run.commits == [(1.0, tuple(sorted(first - {left})))]
    assert sum(silo.busy for silo in run.silos.values()) == 4, "half of nine, rounded down"


def test_a_round_of_one_silo_that_fails_does_not_ask_it_for_ever() -> None:
    run = Rounds(Fraction(Bsp(), 0.1))
    run.join(*NAMES)
    [broken] = [name for name, silo in run.silos.items() if silo.busy]
    for second in range(1, 200):
        [name] = [name for name, silo in run.silos.items() if silo.busy]
        run.finish(float(second), name, fails=name == broken)
    assert len(run.commits) > 150


def test_where_each_arrival_is_a_version_so_many_are_at_work_at_a_time() -> None:
    run = Rounds(Fraction(Asp(), 0.3))
    run.join(*NAMES)
    busy: Counter[str] = Counter()
    for second in range(1, 300):
        here = [name for name, silo in run.silos.items() if silo.busy]
        assert len(here) == 3
        busy.update(here)
        run.finish(float(second), here[second % 3])
    assert busy.keys() == set(NAMES)


def test_others_may_be_around_it_and_within() -> None:
    for barrier in (Quorum(Fraction(Bsp(), 0.5), share=0.6), Fraction(Quorum(Bsp(), share=0.6), 0.5)):
        run = Rounds(barrier)
        run.join(*NAMES)
        seen = set()
        for second in range(1, 60):
            here = sorted(name for name, silo in run.silos.items() if silo.busy)
            seen.update(here)
            run.finish(float(second), *here[:3])
        assert seen == set(NAMES) and len(run.commits) > 20
        assert barrier.sampled(10) == 5 and barrier.draws


def strategy(cipher: Mapping[str, Any], **more: Any) -> StrategyConfig:
    plain = {"name": "x", "stop": {"rounds": 2}, "balancer": {"kind": "fixed"}, "task": {"kind": "digits"}}
    barrier = {"kind": "fraction", "share": 0.5, "inner": {"kind": "bsp"}, **more.pop("barrier", {})}
    return StrategyConfig.model_validate({**plain, "barrier": barrier, "cipher": cipher, **more})


def test_encrypted_runs_that_could_open_nothing_are_refused() -> None:
    sealed = {"kind": "bfv", "members": 3}
    with pytest.raises(ValidationError, match="barrier has 2 of 4 silos in each round"):
        strategy(sealed, min_silos=4)
    strategy(sealed, min_silos=6)
    strategy(sealed, min_silos=4, barrier={"least": 3})
    with pytest.raises(ValidationError, match="decrypts only sums of nearly all silos"):
        strategy({"kind": "masked"}, min_silos=6)


def test_silos_agree_on_rounding_after_one_round_of_those_drawn() -> None:
    cluster = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 1.0} for name in NAMES]})
    config = strategy({"kind": "bfv"})
    assert RunSpec.of(config, cluster, len(NAMES)).quorum == 5


@pytest.mark.slow
def test_who_sits_out_catches_up_under_encryption_too(tmp_path: Path) -> None:
    """Four rounds of two silos of five: the sealed run goes the way of the one in the clear, but for rounding.

    To 16 bits, on a grid that the first updates have to find: with all silos in each round it is 1 % of the way.
    """
    silos = {"silos": [{"name": name, "speed": 1000.0} for name in NAMES[:5]]}
    barrier = "barrier={kind: fraction, share: 0.5, inner: {kind: bsp}}"
    models, rounds = [], []
    for cipher in ("{kind: plain}", "{kind: pad, members: 2}"):
        more = [barrier, f"cipher={cipher}", "task={kind: digits}", "stop.rounds=4", "local.steps=2"]
        out = tmp_path / str(len(models))
        config = StrategyConfig.load("bsp", more)
        run_virtual(config, ClusterConfig.model_validate(silos), out)
        models.append(torch.cat([each.flatten() for each in torch.load(out / "model.pt", weights_only=True).values()]))
        rows = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        rounds.append([sorted(row["silos"]) for row in rows[:4]])
    assert rounds[0] == rounds[1] and {len(each) for each in rounds[0]} == {2} and len(set(map(tuple, rounds[0]))) > 1
    way = models[0] - torch.from_numpy(TaskModel(config.task.build(), config.seed).initial())
    assert float((models[1] - models[0]).norm() / way.norm()) < 0.05
