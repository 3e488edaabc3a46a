"""Figures that silos tell together: never those of few, and none twice."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from fedsync.cipher.encoding.tally import Tally
from fedsync.cipher.silo.figure_pool import FigurePool
from fedsync.core.orders import Evaluation, PooledFigures, Score
from fedsync.evaluation.metrics.score_histograms import Auroc, ScoreCounts
from tests.cipher.sealers import member_of

QUORUM = 5


def tally(count: int, evaluators: int = 0, loss: float | None = 1.0) -> Tally:
    evaluation = Evaluation(2.0 * evaluators, 3.0 * evaluators, 4 * evaluators) if evaluators else None
    votes = np.zeros((1, 64), dtype=np.int64)
    return Tally(count, count, 1.0, votes, 1, evaluators, evaluation, loss and loss * count, holders=evaluators)


def told(versions: list[str], evaluators: dict[int, int] | None = None) -> list[PooledFigures]:
    """What is told when versions hold one update each of these silos."""
    pool, found = FigurePool(), []
    for version, silos in enumerate(versions, 1):
        members = [member_of(silo, version - 1) for silo in silos]
        of = tally(len(silos), (evaluators or {}).get(version, 0))
        pool, figures = pool.after(version, of, members, QUORUM)
        found += [] if figures is None else [figures]
    return found


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        (["a"] * 40, []),
        (["ab"] * 40, []),  # two of five
        (["abc"] * 3, []),  # more than half, with nine updates
        (["abc"] * 4, [4]),  # with twelve: twice the quorum
        (["abcde"], [1]),
        (["ab", "cd", "e"], [3]),
        (["abcde", "a", "bcde"], [1, 3]),
        (["abcde", "abcd"], [1]),  # what was told is in no second pool
    ],
)
def test_figures_are_of_a_quorum_or_of_over_half_with_many_updates(versions: list[str], expected: list[int]) -> None:
    assert [figures.version for figures in told(versions)] == expected


def test_a_loss_that_one_version_does_not_have_is_unknown_and_only_until_the_next_pool() -> None:
    pool, losses = FigurePool(), []
    for version, loss in enumerate([1.0, None, 2.0, 3.0]):
        members = [member_of(silo, version) for silo in ("abcde" if version > 1 else "ab")]
        pool, figures = pool.after(version + 1, tally(len(members), loss=loss), members, QUORUM)
        assert FigurePool.from_json(json.loads(json.dumps(pool.to_json()))) == pool
        losses += [] if figures is None else [figures.loss]
    assert losses == [None, 3.0]


def test_a_loss_is_the_mean_over_updates_in_four_digits() -> None:
    members = [member_of(silo, 0) for silo in "abcde"]
    _, figures = FigurePool().after(1, tally(5, loss=1.23456789), members, QUORUM)
    assert figures == PooledFigures(1, 1.235, None)


def test_an_evaluation_counts_if_all_silos_of_its_version_evaluated_and_they_are_more_than_half_of_a_quorum() -> None:
    """By hand: 3 of 4 right, a loss of 2 / 4."""
    assert told(["abcde"], {1: 5})[0].score == told(["abc", "de"], {1: 3})[0].score == Score(0, 0.75, 0.5)
    assert told(["abcde"], {1: 4})[0].score is None, "the one left out would be the difference"
    assert told(["ab", "cde"], {1: 2})[0].score is None


@pytest.mark.parametrize(
    ("bases", "version"),
    [
        ({"abcde": 2}, 2),  # all of them evaluated the newest
        ({"a": -1, "b": 0, "c": 1, "d": 2, "e": 2}, 2),  # each in turn: the version that the pool began with
        ({"ab": 0, "c": 3, "de": 1}, 3),  # one that took part twice in a row
        ({"ab": 2, "cd": 2, "e": 3}, 2),  # the newest came when it was not the newest any more
        ({"abcd": 1, "e": 1}, 1),  # all before: silos have no model of it any more
    ],
)
def test_a_score_is_of_a_version_that_silos_have_if_one_evaluated_it(bases: dict[str, int], version: int) -> None:
    """The pool begins with version 2."""
    pool, figures = FigurePool(began=2), None
    for at, (silos, base) in enumerate(bases.items(), 3):
        members = [member_of(silo, base) for silo in silos]
        pool, figures = pool.after(at, tally(len(silos), len(silos)), members, QUORUM)
    assert figures is not None and figures.score is not None and figures.score.version == version


def test_numbers_of_metrics_are_told_in_four_digits() -> None:
    """Pooled by hand: one of three positives is below one of two negatives, which is 5 / 6."""
    statistic = ScoreCounts(resolution=16)
    metric, sums = Auroc("auroc", statistic), [np.zeros(statistic.size) for _ in range(2)]
    sums[0][[5, 25]] = 1, 1
    sums[1][[statistic.bins + 30, statistic.bins + 20]] = 2, 1
    pool, figures = FigurePool(), None
    for at, (silos, own) in enumerate(zip(("abc", "de"), sums, strict=True), 1):
        found = Evaluation(1.0, 2.0, 3, sums={statistic.key: tuple(own.tolist())})
        of = replace(tally(len(silos), len(silos)), evaluation=found)
        pool, figures = pool.after(at, of, [member_of(silo, at - 1) for silo in silos], QUORUM, (metric,))
        assert FigurePool.from_json(json.loads(json.dumps(pool.to_json()))) == pool
    assert figures is not None and figures.score is not None
    assert figures.score.metrics == {"auroc": 0.8333}


def test_a_metric_that_says_no_number_is_not_told() -> None:
    """All of one class."""
    statistic = ScoreCounts(resolution=16)
    found = Evaluation(1.0, 2.0, 3, sums={statistic.key: (3.0, *(statistic.size - 1) * (0.0,))})
    of, members = replace(tally(5, 5), evaluation=found), [member_of(silo, 0) for silo in "abcde"]
    _, figures = FigurePool().after(1, of, members, QUORUM, (Auroc("auroc", statistic),))
    assert figures is not None and figures.score is not None and figures.score.metrics == {}
