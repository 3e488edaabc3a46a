"""Interval policies: searches by hand, equation 7 by calculus and by brute force, and whole FSP runs."""

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.core.actions import Commit, Dispatch, Rollback, Savepoint
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.extras.intervals.climbing import ClimbingInterval
from fedsync.extras.intervals.published import FittedInterval, HalvingInterval, QualityFit
from fedsync.model.layout import Vector
from fedsync.policies.barrier.intervals import IntervalPolicy, IntervalRound
from tests.policies.barrier.make import follow, lengths, race

# Halving.


@pytest.mark.parametrize(
    ("policy", "losses", "asked"),
    [
        # 8 s: 10 to 8 in one round, 0.25 a second. 4 s: 8 to 5 in two rounds, 3/8, better. 2 s: 5 to 3 in two rounds,
        # 2/4, better. 1 s: 3 to 2.2 in two rounds, 0.4, worse: 2 s it is.
        (
            HalvingInterval(8.0),
            [10, 8, 8, 6, 5, 5, 4, 3, 3, 2.5, 2.2, 1, 0.5],
            [8, 8, 4, 4, 4, 2, 2, 2, 1, 1, 1, 2, 2, 2],
        ),
        # One second at a time or two, the loss falls by 1 a second.
        (HalvingInterval(2.0), [10, 8, 8, 7, 6, 6], [2, 2, 1, 1, 1, 2, 2]),
        (HalvingInterval(9.0, factor=3), [10, 9, 9, 8, 7, 6, 6, 6], [9, 9, 3, 3, 3, 3, 1, 1, 1]),
        # It would go below 1 s: 2 / 2 is still allowed, 1 / 2 is not.
        (HalvingInterval(2.0, floor_s=1.0), [100, 98, 98, 95, 92, 92, 92], [2, 2, 1, 1, 1, 1, 1, 1]),
    ],
    ids=["until it no longer pays", "equal is not better", "a third takes three rounds", "ends at the floor"],
)
def test_halving_by_hand(policy: HalvingInterval, losses: list[float], asked: list[float]) -> None:
    assert lengths(follow(policy, losses)) == asked


def test_elapsed_time_counts_barrier_and_all() -> None:
    """Rounds that take twice as long as asked halve the rate: 2 in 4 s against 1.2 in 2 x 1 s."""
    policy = HalvingInterval(2.0)
    state = policy.init()
    for seconds, loss in [(4.0, 10.0), (4.0, 8.0), (1.0, 8.0), (1.0, 7.5), (1.0, 6.8)]:
        state = policy.observe(state, IntervalRound(seconds, 0.0, loss))
    assert policy.attempt(state).interval_s == 0.5


# Equation 7.


def gain(fit: QualityFit, eta: float, cost_s: float, stage_s: float = 60.0) -> float:
    """As printed."""
    return (stage_s - cost_s * stage_s / (eta + cost_s)) * fit.at(eta)


@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(0, 3))
def test_no_interval_gains_more(slope: float, offset: float, cost_s: float) -> None:
    fit = QualityFit(slope, offset)
    best = fit.best(cost_s, 0.1, 9.0)
    assert 0.1 <= best <= 9.0
    most = max(gain(fit, eta, cost_s) for eta in np.linspace(0.1, 9.0, 500))
    assert gain(fit, best, cost_s) >= most - 1e-9 * max(abs(most), 1)


# Fitting.

FITTED = FittedInterval(interval_s=1.5, stage_s=100.0, floor_s=0.1, ceiling_s=20.0)


def test_two_trials_and_then_the_best() -> None:
    """By hand, with a barrier of 0.5 s, so eta = 1 and 2 s.

    Two rounds with eta: 10, 9, 8.2, so 1.8 in 2 s: g(1) = 0.9. Back; one round with 2 eta: 10, 8.6: g(2) = 0.7.
    So a = -0.2, b = 1.1, and eta* = sqrt(0.25 + 0.5 x 5.5) - 0.5 = 1.2320508, a round of 1.7320508 s.
    """
    attempts = follow(FITTED, [10.0, 9.0, 8.2, 10.0, 8.6], cost_s=0.5)
    assert lengths(attempts) == pytest.approx([1.5, 1.5, 1.5, 2.5, 2.5, math.sqrt(3)])
    assert [attempt.savepoint for attempt in attempts] == [True, False, False, False, False, False]
    assert [attempt.rollback for attempt in attempts] == [False, False, False, True, False, False]


def as_predicted(rounds: int, share: float = 1.0) -> list[float]:
    """Losses of a stage after the trials above: g(1.2320508) x 1.2320508 = 1.05166 a round, times a share."""
    eta = math.sqrt(3) - 0.5
    return [8.6 - share * (1.1 - 0.2 * eta) * eta * index for index in range(rounds)]


@pytest.mark.parametrize(
    ("stage_s", "rounds", "share", "ends"),
    [
        (100.0, 8, 0.51, False),
        (100.0, 4, 0.49, True),  # below half of the prediction; looked at from the third gain, so the fourth round, on
        (3.0, 4, 1.0, True),  # three gains of 1.232 s each are more than 3 s
    ],
)
def test_a_stage_goes_on_until_time_or_its_loss_ends_it(stage_s: float, rounds: int, share: float, ends: bool) -> None:
    """Then there are new trials."""
    policy = replace(FITTED, stage_s=stage_s)
    attempts = follow(policy, [10.0, 9.0, 8.2, 10.0, 8.6, *as_predicted(rounds, share)], cost_s=0.5)[5:]
    assert lengths(attempts) == pytest.approx([math.sqrt(3)] * rounds + [1.5 if ends else math.sqrt(3)])
    assert [attempt.savepoint for attempt in attempts] == [False] * rounds + [ends]


def test_the_bounds_hold_for_trials_too() -> None:
    policy = FittedInterval(interval_s=1.5, stage_s=100.0, floor_s=1.2, ceiling_s=2.0)
    attempts = follow(policy, [10.0, 9.0, 8.2, 10.0, 9.9, 9.0], cost_s=0.5)
    assert lengths(attempts) == pytest.approx([1.5, 1.5, 1.5, 2.0, 2.0, 1.2, 1.2]), "1.01 s would be best"


@pytest.mark.parametrize(
    ("losses", "interval_s"),
    [
        ([1.0, 1.1, 1.3, 1.0, 1.2], 2.5),  # it only rises; -0.15 and -0.1 a second: the better of the two
        ([1.0, 1.0, 1.0, 1.0, 1.0], 1.5),
    ],
)
def test_without_any_progress_there_is_nothing_to_fit(losses: list[float], interval_s: float) -> None:
    attempts = follow(FITTED, [*losses, *losses], cost_s=0.5)
    assert lengths(attempts)[5:] == pytest.approx([interval_s] * 6)


def test_trials_of_the_same_length_cannot_be_fitted() -> None:
    """The silos are through with their data after 1 s whatever they are asked for."""
    state = FITTED.init()
    for loss in [10.0, 9.0, 8.0, 10.0, 9.0]:
        state = FITTED.observe(state, IntervalRound(1.5, 0.5, loss))
    assert FITTED.attempt(state).interval_s == pytest.approx(1.5)


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=30), st.floats(0, 5))
def test_whatever_happens_intervals_stay_within_their_bounds(losses: list[float], cost_s: float) -> None:
    policies: list[tuple[IntervalPolicy[Any], float, float]] = [
        (HalvingInterval(8.0, 2, 0.5), 0.5, 8.0),
        (FittedInterval(1.5, 5.0, 0.5, 8.0), 0.5, 8.0),
        (ClimbingInterval(2.0, 9.0, factor=1.5, trials=3, confidence=2.0, rest=2), 2.0, 9.0),
    ]
    for policy, low, high in policies:
        state = policy.init()
        for loss in losses:
            attempt = policy.attempt(state)
            assert low <= attempt.interval_s <= high
            assert pickle.loads(pickle.dumps(state)) == state
            state = policy.observe(state, IntervalRound(attempt.interval_s, cost_s, loss))


# Whole runs of FSP, in which the loss follows from the version that an order starts from.


def intervals(result: Any) -> list[float]:
    """Length of each round, from orders to commit [s]."""
    return [row.seconds for row in result.ledger.rounds]


def spoiling(loss: Callable[[int], float]) -> Any:
    """A twist that reports a loss by base version."""

    def twist(order: WorkOrder, update: Vector, report: WorkReport) -> tuple[Vector, WorkReport]:
        return update, replace(report, loss=loss(order.base_version))

    return twist


def test_fitting_in_a_run_rolls_back_to_where_the_trials_began(tmp_path: Path) -> None:
    """Versions: 3 commits of the first trial, the rollback makes version 4, 2 commits of the second make 6.

    Losses 10, 9, 8.2 and back to 10, then 8.6, with overheads of 0.5 s and eta = 1 and 2 s. The first round does not
    know the overhead yet and takes 2 s, 1.5 of them training: g = 1.8 / 2.5 = 0.72 at eta = 1.25, and then 2.5 s with
    1.4 / 2.5 = 0.56. a = -0.128, b = 0.88, eta* = sqrt(0.25 + 0.5 x 6.875) - 0.5 = 1.4202.
    """
    losses = {0: 10.0, 1: 9.0, 2: 8.2, 4: 10.0, 5: 8.6}
    barrier = {"kind": "fsp", "interval": {"kind": "linear", "interval_s": 1.5, "ceiling_s": 20.0}}
    result = race(
        tmp_path,
        [1024.0, 1024.0],  # steps of 1/32 s
        barrier,
        {"overhead_s": 0.5},
        stop={"rounds": 6},
        twists=dict.fromkeys("ab", spoiling(lambda version: losses.get(version, 8.0))),
    )
    done = [(type(each).__name__, each.version) for _, each in result.actions(Savepoint, Rollback, Commit)]
    assert done == [
        ("Savepoint", 0), ("Commit", 1), ("Commit", 2), ("Commit", 3),
        ("Rollback", 4), ("Commit", 5), ("Commit", 6), ("Commit", 7),
    ]  # fmt: skip
    bases = {each.order.base_version for _, each in result.actions(Dispatch)}
    assert bases == {0, 1, 2, 4, 5, 6}, "nobody trains from version 3, which is gone"
    assert intervals(result)[:5] == pytest.approx([2.0, 1.5, 1.5, 3.0, 3.0], abs=1 / 32)
    assert intervals(result)[5] == pytest.approx(1.4202 + 0.5, abs=1 / 32)
    assert result.model is not None
    np.testing.assert_array_equal(result.model, np.full(3, 3.0)), "of six commits three are left"
