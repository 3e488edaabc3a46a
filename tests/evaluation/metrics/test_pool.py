"""Sums of silos in one, and the scores that a run has of them."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Score
from fedsync.evaluation.metrics.metric_types import AnyMetric, Metric, Sums, SumsPool, number, statistics_of
from fedsync.evaluation.metrics.moments import BlockSums, Mean
from fedsync.evaluation.metrics.named import shipped
from fedsync.evaluation.version_scores import Scores
from tests.core.make import answer, begin, scored

AUROC, DICE = shipped("auroc", 2), Mean("dice", BlockSums("dice"))
KNOWN = statistics_of((AUROC, DICE))


def histogram(*scores: tuple[int, int]) -> tuple[float, ...]:
    """Sums of samples of which class and bin are given."""
    table = np.zeros((2, 256))
    for label, place in scores:
        table[label, place] += 1
    return tuple(table.ravel().tolist())


def blocks(*values: float) -> tuple[float, ...]:
    table = np.zeros((16, 2))
    for place, value in enumerate(values):
        table[place] += 1, value
    return tuple(table.ravel().tolist())


@pytest.mark.slow
@given(st.lists(st.lists(st.floats(-1e40, 1e40), min_size=16, max_size=16), min_size=1, max_size=6), st.randoms())
def test_pools_are_the_same_bits_in_any_order(rows: list[list[float]], chance: random.Random) -> None:
    found = []
    for _ in range(3):
        pool = SumsPool()
        for row in rows:
            pool.add({"dice/16": blocks(*row)}, KNOWN)
            # One that is far larger comes and goes.
            pool.add({"dice/16": blocks(1e45)}, KNOWN)
            pool.add({"dice/16": blocks(1e45)}, KNOWN, times=-1)
        found.append(pool.sums("dice/16"))
        chance.shuffle(rows)
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()


def test_counts_come_and_go() -> None:
    pool = SumsPool()
    pool.add({"scores/256": histogram((0, 3), (1, 7)), "other": (1.0,)}, KNOWN)
    pool.add({"scores/256": histogram((0, 9))}, KNOWN)
    assert pool.numbers((AUROC, DICE)) == {"auroc": 0.5}
    pool.add({"scores/256": histogram((0, 9))}, KNOWN, times=-1)
    assert pool.numbers((AUROC, DICE)) == {"auroc": 1.0}
    assert pool.sums("other") is None


def test_a_score_has_the_numbers_of_all_silos_in_it() -> None:
    scores = Scores((AUROC, DICE))
    scores.begin(1, 2)
    scores.end(1, "a", replace(scored(0.5), sums={"scores/256": histogram((1, 10)), "dice/16": blocks(0.5, 1.0)}))
    scores.end(1, "b", replace(scored(0.5), sums={"scores/256": histogram((0, 10), (0, 9))}))
    assert [each.score for each in scores.settle()] == [Score(1, 0.5, 2.0, {"auroc": 0.75, "dice": 0.75})]


def test_where_each_goes_on_by_itself_the_newest_sums_of_every_silo_are_pooled() -> None:
    scores = Scores((AUROC,))
    for version, silo, place in ((1, "a", 1), (2, "b", 5), (3, "a", 9)):
        scores.begin(version)
        sums = {"scores/256": histogram((int(silo == "a"), place))}
        scores.end(version, silo, replace(scored(0.5), sums=sums))
        (found,) = scores.settle()
    assert found.score.metrics == {"auroc": 1.0}  # of a in version 3 and b in version 2
    scores.forget("b")
    scores.begin(4)
    scores.end(4, "a", replace(scored(0.5), sums={"scores/256": histogram((1, 2))}))
    assert scores.settle()[0].score.metrics == {}  # one class only


def test_the_coordinator_leaves_out_evaluations_with_sums_that_nobody_asked_for() -> None:
    coordinator, given = begin("a", "b", metrics=(AUROC,))
    good = replace(scored(1.0), sums={"scores/256": histogram((1, 10), (0, 3))})
    bad = replace(scored(0.0), sums={"scores/256": (1.0,)})
    coordinator.handle([answer("a", given["a"], evaluation=good), answer("b", given["b"], evaluation=bad)], 1.0)
    assert coordinator.state()["scores.best"] == 1.0


OWN = BlockSums("own")


class Own(Metric[BlockSums]):
    """One of a user's own, which divides by what a silo says."""

    def value(self, sums: Sums) -> float | None:
        return 1 / float(sums[0]) - 1 if sums[1] >= 0 else float("nan")


def test_a_metric_of_one_s_own_may_stumble() -> None:
    assert number(Own("own", OWN), np.array([0.5, 0.0])) == 1.0
    assert number(Own("own", OWN), np.array([0.0, 0.0])) is None
    assert number(Own("own", OWN), np.array([1.0, -1.0])) is None
    assert np.isnan(Own("own", OWN).values(np.array([[0.0, 0.0], [0.5, 0.0]]))).tolist() == [True, False]


@pytest.mark.parametrize(
    "metrics", [(AUROC, AUROC), (DICE, Own("own", BlockSums("dice", 3))), (Own("own", BlockSums("Own")),)]
)
def test_metrics_that_cannot_be_told_apart_are_refused(metrics: tuple[AnyMetric, ...]) -> None:
    assert list(statistics_of((Own("own", OWN), Own("mine", OWN)))) == ["own/16"], "several may read one statistic"
    with pytest.raises(ConfigError):
        statistics_of(metrics)
