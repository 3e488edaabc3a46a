"""Figures that silos tell together: never those of few, and none twice."""

from __future__ import annotations

import numpy as np
import pytest

from fedsync.cipher.encoding.tally import Tally
from fedsync.cipher.silo.figure_pool import FigurePool
from fedsync.core.orders import Evaluation, PooledFigures, Score
from tests.cipher.sealers import member_of

QUORUM = 5


def tally(count: int, evaluators: int = 0, loss: float = 1.0) -> Tally:
    evaluation = Evaluation(2.0 * evaluators, 3.0 * evaluators, 4 * evaluators) if evaluators else None
    return Tally(count, count, 1.0, np.zeros((1, 64), dtype=np.int64), 1, evaluators, evaluation, loss * count)


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
def test_figures_are_of_a_quorum_or_of_more_than_half_with_many_updates(
    versions: list[str], expected: list[int]
) -> None:
    assert [figures.version for figures in told(versions)] == expected


def test_a_loss_is_the_mean_over_updates_in_four_digits() -> None:
    members = [member_of(silo, 0) for silo in "abcde"]
    _, figures = FigurePool().after(1, tally(5, loss=1.23456789), members, QUORUM)
    assert figures == PooledFigures(1, 1.235, None)


def test_an_evaluation_counts_if_all_silos_of_its_version_evaluated() -> None:
    """By hand: 3 of 4 right, a loss of 2 / 4."""
    assert told(["abcde"], {1: 5})[0].score == Score(0, 0.75, 0.5)
    assert told(["abcde"], {1: 4})[0].score is None, "the one left out would be the difference"


def test_a_score_is_of_more_than_half_of_a_quorum() -> None:
    assert told(["ab", "cde"], {1: 2})[0].score is None
    assert told(["abc", "de"], {1: 3})[0].score == Score(0, 0.75, 0.5)


def test_it_comes_back_from_a_file() -> None:
    pool, _ = FigurePool().after(1, tally(2, 2, 1 / 3), [member_of(silo, 0) for silo in "ab"], QUORUM)
    assert FigurePool.from_json(pool.to_json()) == pool
