"""The climbing interval: trials by hand, and that it finds what is best where it can be known."""

import math
from collections.abc import Callable

import pytest

from fedsync.extras.intervals.climbing import ClimbingInterval, relative_rate, score
from fedsync.policies.barrier.intervals import IntervalRound
from tests.policies.barrier.make import follow, lengths

CLIMB = ClimbingInterval(floor_s=2.0, ceiling_s=9.0, factor=1.5, trials=3, confidence=2.0, rest=2)


def falling(policy: ClimbingInterval, rounds: int, fall: Callable[[int, float], float]) -> list[float]:
    """Intervals in a run whose loss falls by ``exp(-fall(round, interval))`` in a round."""
    state, asked, loss = policy.init(), [], 1.0
    for index in range(rounds):
        asked.append(policy.attempt(state).interval_s)
        state = policy.observe(state, IntervalRound(asked[-1], 0.0, loss))
        loss *= math.exp(-fall(index, asked[-1]))
    return asked


def test_the_rate_is_relative_and_of_elapsed_time() -> None:
    """The loss is halved twice in 3 s and 5 s; what the last round took is not in it."""
    rounds = (IntervalRound(3.0, 1.0, 8.0), IntervalRound(5.0, 1.0, 4.0), IntervalRound(9.0, 1.0, 2.0))
    assert relative_rate(rounds) == pytest.approx(math.log(4) / 8)


@pytest.mark.parametrize(
    ("before", "during", "after", "expected"),
    [
        (0.4, 0.2, 0.1, 0.0),  # sqrt(0.4 x 0.1) = 0.2: it falls geometrically, and the trial is as good as any
        (0.4, 0.6, 0.1, 0.5),  # (0.6 - 0.2) / 0.8
        (0.4, 0.1, 0.1, -1 / 3),  # (0.1 - 0.2) / 0.3
        (-0.3, 0.1, 0.5, 0.0),  # no geometric mean; (-0.3 + 0.5) / 2 = 0.1
        (-0.1, 0.3, -0.1, 1.0),
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_a_trial_is_held_against_before_and_after(before: float, during: float, after: float, expected: float) -> None:
    assert score(before, during, after) == pytest.approx(expected)


def test_three_trials_that_agree_move_the_interval() -> None:
    """2 s bring 0.2 a round, 3 s bring 0.6. Two rounds, two on trial, two after it; a rest of two, which are the next
    "before". After the third trial 3 s stay, and 4.5 s are on trial as soon as two rounds have shown their rate.
    """
    asked = falling(CLIMB, 22, lambda _, interval_s: 0.2 if interval_s == 2 else 0.6)
    assert asked == [*[2, 2, 3, 3, 2, 2] * 3, 3, 3, 4.5, 4.5]


def test_of_a_long_rest_only_its_end_is_compared() -> None:
    """The loss falls to a tenth in the first of five rounds, and by a hundredth in the last: that is the rate."""
    policy = ClimbingInterval(floor_s=2.0, ceiling_s=9.0, rest=5)
    state = policy.init()
    for loss in (10.0, 1.0, 1.0, 1.0, 0.99):
        state = policy.observe(state, IntervalRound(2.0, 0.0, loss))
    assert state.trial is not None
    assert state.trial.before == pytest.approx(math.log(1.0 / 0.99) / 2.0)


def test_two_trials_are_not_enough_and_three_that_differ_are_not() -> None:
    """Scores 0.5, 0.5, then -0.2: mean 0.267, standard error 0.404 / sqrt(3) = 0.233, which twice is more."""

    def fall(index: int, interval_s: float) -> float:
        """0.1 a second with 2 s. A third of that three times over makes 0.5; two thirds make -0.2."""
        return 0.2 if interval_s == 2 else (0.9 if index < 12 else 0.2)

    asked = falling(CLIMB, 22, fall)
    assert asked == [*[2, 2, 3, 3, 2, 2] * 3, 2, 2, 3, 3]


def test_where_longer_is_better_it_climbs_to_the_ceiling() -> None:
    asked = falling(CLIMB, 120, lambda _, interval_s: 1e-3 * interval_s**2)
    assert asked[:2] == [2, 2]
    assert max(asked[:50]) >= 4.5
    assert asked[-24:].count(9.0) >= 16, "6 s is tried now and then"


def test_where_shorter_is_better_it_stays_at_the_floor_and_tries_ever_more_rarely() -> None:
    """Trials of two rounds, between them two rounds that judge, and then rests of 2 - 2, 4 - 2... beyond those."""
    asked = falling(CLIMB, 60, lambda _, interval_s: 0.1 * math.sqrt(interval_s))
    trials = [index for index, interval_s in enumerate(asked) if interval_s == 3.0]
    gaps = [after - before for before, after in zip(trials[1::2], trials[2::2], strict=False)]
    assert set(asked) == {2.0, 3.0}
    assert gaps == [5, 7, 11, 19]


def test_it_comes_down_again_when_shorter_is_better() -> None:
    def fall(index: int, interval_s: float) -> float:
        return 1e-3 * interval_s**2 if index < 40 else 0.02 * math.sqrt(interval_s)

    asked = falling(CLIMB, 400, fall)
    assert max(asked[:40]) >= 4.5
    assert asked[-24:].count(2.0) >= 16


def test_no_round_is_shorter_than_twice_its_barrier() -> None:
    """From 0.1 s: overhead of 2 s makes it 4 s, and trials of 6 s."""
    policy = ClimbingInterval(0.1, 60.0, rest=2)
    assert lengths(follow(policy, [10.0, 9.0, 8.0, 7.0], cost_s=2.0)) == [0.1, 4, 6, 6, 4]


def test_without_room_there_is_no_trial() -> None:
    assert lengths(follow(ClimbingInterval(3.0, 3.0, rest=1), [5.0, 4.0, 3.0, 2.0, 1.0])) == [3.0] * 6
