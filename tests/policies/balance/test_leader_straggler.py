"""Algorithm 2 step by step, on rounds whose times are written down."""

import pickle

import numpy as np

from fedsync.core.protocols import Bounds, RoundSeen
from fedsync.policies.balance.without_forecast import LeaderStraggler, MovePace, Search

NAMES = ("a", "b", "c")
BALANCER = LeaderStraggler(fast=MovePace(5, 3), fine=MovePace(1, 4))


def seen(
    seconds: dict[str, float], memory: dict[str, float] | None = None, cap: int = 999, floor: int = 1, mean: int = 32
) -> RoundSeen:
    bounds = Bounds(np.full(3, floor), np.full(3, cap))
    return RoundSeen(NAMES, seconds, memory or {}, mean * len(NAMES), bounds)


def times(a: float, b: float, c: float) -> dict[str, float]:
    return {"a": a, "b": b, "c": c}


def play(*rounds: RoundSeen, balancer: LeaderStraggler = BALANCER) -> tuple[Search, list[list[int]], list[str]]:
    """State, sizes after each round, and all notes; before the first round there is nothing to see."""
    state, _ = balancer.advance(balancer.init(), seen({}))
    sizes, notes = [], []
    for each in rounds:
        before = pickle.dumps(state)
        following, said = balancer.advance(state, each)
        assert pickle.dumps(state) == before, "the old state stays"
        assert balancer.advance(pickle.loads(before), each) == (following, said), "and is all that counts"
        state = following
        sizes.append([state.sizes[name] for name in NAMES])
        notes += said
    return state, sizes, notes


EQUAL = [32, 32, 32]


def test_once_two_have_changed_places_one_goes_at_a_time_after_the_long_window() -> None:
    rounds = [seen(times(1, 2, 3))] * 3 + [seen(times(3, 2, 1))] * 6
    state, sizes, notes = play(*rounds)
    assert sizes[2:6] == [[37, 32, 27]] * 4, "the round of the change moves nothing, nor do the three after it"
    assert sizes[6:] == [[36, 32, 28], [35, 32, 29], [34, 32, 30]]
    assert state.fine
    assert notes == ["c and a changed places: batch sizes are fine-tuned"]


def test_a_round_without_a_time_breaks_the_window_and_nothing_else() -> None:
    missing = seen({"a": 1.0, "b": 2.0})
    rounds = [seen(times(1, 2, 3))] * 2 + [missing] + [seen(times(1, 2, 3))] * 3
    state, sizes, notes = play(*rounds)
    assert sizes == [EQUAL, EQUAL, [37, 27, 32], [37, 27, 32], [37, 27, 32], [42, 27, 27]]
    assert not state.fine
    assert notes == []


def test_a_straggler_without_five_to_give_is_reported_once() -> None:
    """32, 27, ... 7, 2: and then 2 is no five."""
    _, sizes, notes = play(
        *[seen(times(1, 2, 3))] * 9, balancer=LeaderStraggler(fast=MovePace(5, 1), fine=MovePace(1, 4))
    )
    assert sizes[5:] == [[62, 32, 2]] * 4
    assert notes == ["c is the slowest, and its 2 samples a step cannot be 5 fewer: leave it out"]


def test_steps_are_multiples_where_sizes_have_to_be() -> None:
    _, sizes, _ = play(
        *[seen(times(1, 2, 3))] * 3, balancer=LeaderStraggler(fast=MovePace(5, 3), fine=MovePace(1, 4), multiple=8)
    )
    assert sizes[-1] == [40, 32, 24]


def test_newcomers_begin_at_the_mean_and_the_others_make_room() -> None:
    """Sizes 42, 32, 22 and a newcomer at 32 are 128, the total of four; without a, two share 64."""
    state, _, _ = play(*[seen(times(1, 2, 3))] * 4)
    bounds = Bounds(np.full(4, 1), np.full(4, 99))
    assert BALANCER.plan(state, ["a", "b", "c", "d"], 128, bounds).tolist() == [42, 32, 22, 32]
    two = Bounds(np.full(2, 1), np.full(2, 99))
    assert BALANCER.plan(state, ["b", "c"], 64, two).tolist() == [37, 27]
