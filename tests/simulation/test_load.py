"""Speed over time: Markov contention, periodic load and traces, alone and multiplied, integrated by hand."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.common.rng import Stream, generator
from fedsync.config.cluster import MarkovConfig, PeriodicConfig
from fedsync.core.events import UpdateArrived
from fedsync.simulation.machine import PERIOD_PIECES, Load, Piece, Trace, markov, periodic, product
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


def test_an_order_runs_over_changes_of_state_exactly(tmp_path: Path) -> None:
    """Ends worked out segment by segment, in plain arithmetic, from the same step function."""
    config = MarkovConfig(kind="markov", factor=0.25, on_s=2.0, off_s=3.0)
    silos = machines({"speed": 100.0, "contention": config.model_dump()})
    result = simulate(tmp_path, silos, FIXED)  # orders of 6.4 s, back to back
    changes = contention(config, "a", 7, 100)
    now_s = 0.0
    for event in result.events(UpdateArrived):
        left_s = 6.4
        for (begin_s, factor), (end_s, _) in itertools.pairwise(changes):
            if end_s <= now_s or left_s <= 0:
                continue
            span_s = min((end_s - max(begin_s, now_s)), left_s / factor)
            left_s, now_s = left_s - span_s * factor, now_s + span_s
        assert event.at_s == pytest.approx(now_s, rel=1e-9)
    assert now_s > 3 * 6.4, "contention took place"


# Periodic load.


def test_a_whole_period_costs_half_the_amplitude_exactly() -> None:
    """The mean of the sine over a period is 0: a period of 60 s at amplitude 0.5 does 45 s of work."""
    day = PeriodicConfig(kind="periodic", period_s=60.0, amplitude=0.5, phase=0.3)
    ends = Load([periodic(day)]).ends(0.0, np.array([45.0, 90.0, 450.0]))
    np.testing.assert_allclose(ends, [60.0, 120.0, 600.0], rtol=1e-12)


def test_half_a_period_by_the_integral_of_the_sine() -> None:
    """Integral of 1 - A (1 + sin) / 2 over the loaded half: 30 - 0.25 x 30 - 0.25 x 2 x 60 / (2 pi)."""
    day = PeriodicConfig(kind="periodic", period_s=60.0, amplitude=0.5)
    work_s = 30 - 7.5 - 0.25 * 60 / np.pi
    np.testing.assert_allclose(Load([periodic(day)]).ends(0.0, np.array([work_s])), [30.0], rtol=1e-12)


def test_the_phase_is_a_share_of_the_period() -> None:
    """At 0.25 the run begins at the peak, at 0.75 at full speed."""
    factors = [
        next(periodic(PeriodicConfig(kind="periodic", period_s=8.0, amplitude=0.6, phase=phase)))[1]
        for phase in (0.25, 0.75, 0.0, 0.5)
    ]
    half_a_piece = np.pi / PERIOD_PIECES
    assert factors == pytest.approx([0.4, 1.0, 0.7, 0.7], abs=0.3 * half_a_piece)


def test_pieces_are_equally_long_and_repeat() -> None:
    day = PeriodicConfig(kind="periodic", period_s=32.0, amplitude=0.5)
    found = list(itertools.islice(periodic(day), 3 * PERIOD_PIECES))
    assert [begin_s for begin_s, _ in found] == [index * 0.5 for index in range(3 * PERIOD_PIECES)]
    factors = [factor for _, factor in found]
    assert factors[:PERIOD_PIECES] == factors[PERIOD_PIECES : 2 * PERIOD_PIECES]
    assert all(0.5 <= factor <= 1.0 for factor in factors)


def test_trace_and_periodic_load_multiply(tmp_path: Path) -> None:
    """Half speed throughout: two whole periods for the work of one."""
    (tmp_path / "half.csv").write_text("seconds,factor\n0,0.5\n")
    day = {"kind": "periodic", "period_s": 6.4, "amplitude": 0.0}
    silos = machines({"speed": 100.0, "trace": str(tmp_path / "half.csv"), "load": day})
    assert simulate(tmp_path / "out", silos, FIXED).round_seconds() == pytest.approx([12.8] * 3, rel=1e-12)
    silos = machines({"speed": 100.0, "trace": str(tmp_path / "half.csv"), "load": {**day, "amplitude": 0.5}})
    # 6.4 s of work at 0.5 x 0.75 in the mean: 17.07 s = 2.67 periods; three orders are 8 periods.
    assert sum(simulate(tmp_path / "day", silos, FIXED).round_seconds()) == pytest.approx(8 * 6.4, rel=1e-12)


def test_all_three_multiply(tmp_path: Path) -> None:
    """The machine's steps are those of the product of the three step functions."""
    (tmp_path / "trace.csv").write_text("seconds,factor\n0,1\n3,0\n5,2\n")
    contended = MarkovConfig(kind="markov", factor=0.5, on_s=1.0, off_s=1.0)
    day = PeriodicConfig(kind="periodic", period_s=4.0, amplitude=0.5)
    silo = {"speed": 100.0, "contention": contended.model_dump(), "load": day.model_dump()}
    silos = machines({**silo, "trace": str(tmp_path / "trace.csv")})
    result = simulate(tmp_path / "out", silos, FIXED)
    trace = Trace.load(tmp_path / "trace.csv").pieces()
    expected = Load([trace, markov(contended, "a", 7), periodic(day)])
    now_s = 0.0
    for event in result.events(UpdateArrived):
        now_s = float(expected.ends(now_s, np.cumsum(np.full(20, 0.32)))[-1])
        assert event.at_s == pytest.approx(now_s, rel=1e-12)
