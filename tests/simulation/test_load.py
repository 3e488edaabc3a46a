"""Speed over time: Markov contention and traces, alone and multiplied, integrated by hand."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.common.rng import Stream, generator
from fedsync.config.cluster import MarkovConfig
from fedsync.core.events import UpdateArrived
from fedsync.simulation.machine import Load, Piece, Trace, markov, product
from tests.simulation.fake import machines, simulate, strategy

FIXED = strategy(balancer={"kind": "fixed"})

STALL: list[Piece] = [(0.0, 1.0), (10.0, 0.0), (20.0, 0.5)]
HALF: list[Piece] = [(0.0, 1.0), (5.0, 0.5), (12.0, 1.0)]


def load(*pieces: list[Piece]) -> Load:
    return Load([iter(each) for each in pieces])


def contention(config: MarkovConfig, silo: str, seed: int, count: int) -> list[Piece]:
    return list(itertools.islice(markov(config, silo, seed), count))


# Products.


def test_factors_multiply_where_either_changes() -> None:
    assert list(product([iter(STALL), iter(HALF)])) == [(0, 1), (5, 0.5), (10, 0), (12, 0), (20, 0.5)]


def test_changes_at_the_same_instant_are_one_piece() -> None:
    assert list(product([iter([(0.0, 0.5), (4.0, 1.0)]), iter([(0.0, 0.5), (4.0, 0.25)])])) == [(0, 0.25), (4, 0.25)]


pieces = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), max_size=6).map(
    lambda factors: [(3.0 * index, factor) for index, factor in enumerate([*factors, 0.5])]
)


@given(st.lists(pieces, min_size=1, max_size=3), st.lists(st.floats(0.01, 20), min_size=1, max_size=5))
def test_orders_one_after_the_other_add_up_to_the_integral(loads: list[list[Piece]], works: list[float]) -> None:
    """What was forgotten between them was over: the last end is that of all the work in one order."""
    piecewise, now_s = load(*loads), 0.0
    for work_s in works:
        now_s = float(piecewise.ends(now_s, np.array([work_s]))[0])
    assert now_s == pytest.approx(float(load(*loads).ends(0.0, np.cumsum(works))[-1]), rel=1e-9)


def test_a_load_knows_no_more_than_was_asked() -> None:
    asked: list[float] = []

    def endless() -> Iterator[Piece]:
        for number in itertools.count():
            asked.append(float(number))
            yield float(number), 1.0

    assert Load([endless()]).ends(0.0, np.array([2.5]))[0] == 2.5
    assert asked[-1] <= 5


# Markov contention.

ON_OFF = MarkovConfig(kind="markov", factor=0.5, on_s=30.0, off_s=60.0)


def test_contention_comes_from_the_generators_that_the_design_names() -> None:
    """First state: uniform < 30 / 90 is on. Holding times: exponential, in blocks of 16, of the state's mean."""
    on = generator(7, Stream.CONTENTION, "a").random() < 1 / 3
    draws = np.concatenate([generator(7, Stream.CONTENTION, "a", block).exponential(size=16) for block in (1, 2)])
    means = np.where((np.arange(32) + on) % 2 == 1, 30.0, 60.0)
    expected = np.concatenate([[0.0], np.cumsum(draws * means)])[:32]
    found = contention(ON_OFF, "a", 7, 32)
    np.testing.assert_allclose([begin_s for begin_s, _ in found], expected, rtol=1e-12)
    assert [factor for _, factor in found] == [0.5 if mean == 30.0 else 1.0 for mean in means]


def test_trace_and_contention_multiply(tmp_path: Path) -> None:
    """The machine's steps are those of the product of the two step functions."""
    (tmp_path / "trace.csv").write_text("seconds,factor\n0,1\n3,0\n5,2\n")
    contended = MarkovConfig(kind="markov", factor=0.5, on_s=1.0, off_s=1.0)
    silos = machines({"speed": 100.0, "contention": contended.model_dump(), "trace": str(tmp_path / "trace.csv")})
    result = simulate(tmp_path / "out", silos, FIXED)
    expected = Load([Trace.load(tmp_path / "trace.csv").pieces(), markov(contended, "a", 7)])
    now_s = 0.0
    for event in result.events(UpdateArrived):
        now_s = float(expected.ends(now_s, np.cumsum(np.full(20, 0.32)))[-1])
        assert event.at_s == pytest.approx(now_s, rel=1e-12)
