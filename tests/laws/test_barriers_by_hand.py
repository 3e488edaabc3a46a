"""What each kind of barrier promises beside what all promise, to the second, the step and the silo.

Small clusters, and what has to happen in them worked out by hand. A local step of 10 samples takes a silo of
``speed`` samples per second 10 / speed.
"""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.extras.compass import Compass
from fedsync.extras.intervals.published import FittedInterval
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.intervals import FixedInterval
from fedsync.policies.barrier.kinds.bulk import Absp, OnTime
from fedsync.policies.barrier.kinds.elastic import Elastic
from fedsync.policies.barrier.kinds.fsp import Fsp, Late, WaitFor
from fedsync.policies.barrier.kinds.sampled import Sampled, Sampling
from fedsync.policies.barrier.kinds.ssp import Buffered, Ssp
from tests.laws.rounds import Rounds

# All that let silos go on one by one: whoever may goes at once, and one whose order failed sits out.

ONE_BY_ONE = [Ssp(1), Ssp(0), Sampled(1, staleness=1), Sampled(3), Buffered(1), Compass(4, 4)]


@pytest.mark.parametrize("barrier", ONE_BY_ONE, ids=repr)
def test_all_that_may_go_on_go_on_in_one_instant(barrier: BarrierPolicy[object]) -> None:
    """All are in at once, so nobody is ahead of anybody."""
    rounds = Rounds(barrier)
    rounds.join("a", "b", "c")
    rounds.finish(1.0, "a", "b", "c")
    assert sorted(rounds.released[3:]) == [(1.0, "a"), (1.0, "b"), (1.0, "c")]


@pytest.mark.parametrize("barrier", ONE_BY_ONE, ids=repr)
def test_one_whose_order_failed_sits_out_until_the_next_commit(barrier: BarrierPolicy[object]) -> None:
    rounds = Rounds(barrier)
    rounds.join("a", "b")
    rounds.finish(1.0, "a", fails=True)
    assert len(rounds.released) == 2, "asked again at once, it might fail at once for ever"
    rounds.finish(2.0, "b")
    assert (2.0, "a") in rounds.released[2:]


@pytest.mark.parametrize("barrier", ONE_BY_ONE, ids=repr)
def test_one_whose_order_failed_is_asked_again_if_nobody_is_at_work(barrier: BarrierPolicy[object]) -> None:
    rounds = Rounds(barrier)
    rounds.join("a")
    rounds.finish(1.0, "a", fails=True)
    assert rounds.released == [(0.0, "a"), (1.0, "a")]


# Sampled: a silo that is ahead waits for those it has drawn, as long as they are here.

KEEPING = [Sampled(1, sampling=Sampling.BASIC), Sampled(1, redraw=False)]


def frees(barrier: Sampled, seed: int) -> set[str]:
    """Who of two slow silos, by leaving, lets a third go on that has drawn one of them and is ahead of both."""
    found = set()
    for leaver in ("b", "c"):
        rounds = Rounds(barrier, seed)
        rounds.join("a", "b", "c")
        rounds.finish(1.0, "a")
        assert [name for _, name in rounds.released] == ["a", "b", "c"], "a waits for whom it has drawn"
        rounds.leave(leaver)
        found |= {leaver} if rounds.silos["a"].busy else set()
    return found


@pytest.mark.parametrize("barrier", KEEPING)
def test_a_silo_waits_for_the_one_that_it_has_drawn_until_that_is_gone(barrier: Sampled) -> None:
    """Which one that is depends on the run's seed."""
    drawn = [frees(barrier, seed) for seed in range(24)]
    assert {"b"} in drawn and {"c"} in drawn
    assert all(len(names) == 1 for names in drawn)


# Buffered: buffers are filled in the order of arrival.


@given(size=st.integers(1, 4), arrivals=st.permutations([f"s{number}" for number in range(9)]))
def test_a_buffer_is_filled_in_the_order_of_arrival(size: int, arrivals: list[str]) -> None:
    """All in one instant, so that several buffers are full; what fills none waits for more."""
    rounds = Rounds(Buffered(size))
    rounds.join(*arrivals)
    rounds.finish(1.0, *arrivals)
    full = [arrivals[begin : begin + size] for begin in range(0, 9 - 9 % size, size)]
    assert rounds.commits == [(1.0, tuple(sorted(buffer))) for buffer in full]
    assert [meta.silo for meta in rounds.pending.values()] == arrivals[9 - 9 % size :]


# A-BSP: once the first is in and enough samples are done, the others stop where they are.


@given(ratio=st.sampled_from([0.2, 1 / 3, 0.5, 0.6, 0.75, 1.0]), steps=st.tuples(*[st.integers(0, 4)] * 2))
def test_the_others_stop_once_the_share_of_all_samples_is_done(ratio: float, steps: tuple[int, int]) -> None:
    """Three orders of 40 samples: one is in, and of the others the silos tell."""
    rounds = Rounds(Absp(ratio, report_s=0.25))
    rounds.join("a", "b", "c")
    rounds.finish(1.0, "a")
    done = 40
    assert rounds.halted == ([(1.0, "b"), (1.0, "c")] if done >= ratio * 120 else [])
    for name, number in zip("bc", steps, strict=True):
        rounds.tell(name, number)
        done += 10 * number
        assert rounds.halted == ([(1.0, "b"), (1.0, "c")] if done >= ratio * 120 else [])


def test_a_superstep_ends_with_the_last_of_those_that_were_stopped() -> None:
    """Also when one has gone whose update is in."""
    rounds = Rounds(Absp(0.0))
    rounds.join("a", "b", "c")
    rounds.finish(1.0, "a")
    rounds.finish(1.5, "b", steps=2)
    rounds.leave("a")
    rounds.finish(2.0, "c", steps=1)
    assert rounds.commits == [(2.0, ("a", "b", "c"))]
    assert rounds.released[3:] == [(2.0, "b"), (2.0, "c")]


# On time: rounds end when they would with the right sizes, the second one too, and where orders cost something besides.


@given(steps=st.tuples(*[st.integers(1, 4)] * 2), cost_s=st.sampled_from([0.0, 0.5]), slack=st.sampled_from([0.0, 0.2]))
def test_silos_stop_when_right_sizes_would_end_the_round(steps: tuple[int, int], cost_s: float, slack: float) -> None:
    """Orders of 40 samples. a trains 1 s; then b and c tell of steps, and are half through the one that they are in."""
    rounds = Rounds(OnTime(slack, report_s=99.0), overheads={"a": cost_s})
    rounds.join("a", "b", "c")
    rounds.finish(2.0, "a", "b", "c")
    first_s = 3.0 + cost_s
    rounds.finish(first_s, "a")
    for name, number in zip("bc", steps, strict=True):
        rounds.tell(name, number)
    rounds.wait(50.0)
    speeds = [40.0, *((number + 0.5) * 10 / (first_s - 2.0) for number in steps)]
    right_s, slowest = 120 / sum(speeds), min(speeds)
    in_time = 40 / slowest <= (1 + slack) * right_s
    due_s = 2.0 + (right_s * (1 + slack) if in_time else right_s - 5 / slowest)
    late = [name for name, number in zip("bc", steps, strict=True) if number < 3]
    assert [name for _, name in rounds.halted] == late
    assert all(math.isclose(at_s, max(due_s, first_s)) for at_s, _ in rounds.halted)


# Elastic: silos get the steps with which they end together.


@settings(max_examples=30)
@given(speeds=st.lists(st.integers(4, 40), min_size=2, max_size=3), costs=st.lists(st.integers(0, 8), min_size=3))
def test_no_other_steps_would_let_silos_end_closer_together(speeds: list[int], costs: list[int]) -> None:
    """All numbers of 2 to 8 steps for each silo are tried."""
    names = [f"s{number}" for number in range(len(speeds))]
    speed = dict(zip(names, map(float, speeds), strict=True))
    cost_s = {name: cost / 8 for name, cost in zip(names, costs, strict=False)}
    rounds = Rounds(Elastic(), speeds=speed, overheads=cost_s)
    rounds.join(*names)
    assert {rounds.order(name).max_steps for name in names} == {4}, "as configured, before anybody is measured"
    rounds.round({name: cost_s[name] + 40 / speed[name] for name in names})

    def spread_s(steps: tuple[int, ...]) -> float:
        ends = [cost_s[name] + 10 * k / speed[name] for name, k in zip(names, steps, strict=True)]
        return max(ends) - min(ends)

    found = tuple(rounds.order(name).max_steps for name in names)
    least = min(map(spread_s, product(range(2, 9), repeat=len(names))))
    assert spread_s(found) == pytest.approx(least, abs=1e-9)


# FSP: a round has so many seconds, and each silo a budget that lets its update come in with the others.

INTERVAL_S = 2.0


def two_rounds(late: Late = Late.NEXT, wait_for: WaitFor | None = None) -> Rounds:
    """Three silos that are known, at the beginning of a round, at 10 s. Their orders cost 0, 1/4 and 1/2 s."""
    barrier = Fsp(FixedInterval(INTERVAL_S), grace=0.5, late=late, wait_for=wait_for)
    speeds, costs = dict.fromkeys("abc", 100.0), {"a": 0.0, "b": 0.25, "c": 0.5}
    rounds = Rounds(barrier, speeds=speeds, overheads=costs)
    rounds.join("a", "b", "c")
    rounds.finish(10.0, "a", "b", "c", steps=5)
    assert rounds.commits == [(10.0, ("a", "b", "c"))]
    assert rounds.released[3:] == [(10.0, "a"), (10.0, "b"), (10.0, "c")]
    return rounds


def test_a_silos_budget_ends_with_the_round_less_what_its_orders_cost() -> None:
    rounds = two_rounds()
    assert {name: rounds.order(name).budget_s for name in "abc"} == {"a": 2.0, "b": 1.75, "c": 1.5}


@pytest.mark.parametrize(("late", "then"), [(Late.NEXT, ("a", "b", "c")), (Late.DROP, ("a", "b"))])
def test_a_straggler_is_late_when_grace_is_over_and_only_an_alarm_says_so(late: Late, then: tuple[str, ...]) -> None:
    """Half the interval after its end; its update is in the next commit, or in none."""
    rounds = two_rounds(late)
    rounds.finish(11.5, "a", "b", steps=5)
    rounds.wait(20.0)
    assert rounds.commits[1:] == [(13.0, ("a", "b"))]
    rounds.finish(20.5, "c", steps=5)
    rounds.finish(20.5, "a", "b", steps=5)
    assert rounds.commits[2] == (20.5, then)
    assert rounds.discards == ([(20.5, "c")] if late is Late.DROP else [])


def test_who_waits_for_nobody_commits_on_the_dot() -> None:
    rounds = two_rounds(wait_for=WaitFor(0))
    rounds.finish(11.5, "a", steps=5)
    rounds.wait(20.0)
    assert rounds.commits[1:] == [(12.0, ("a",))]


def test_who_is_in_before_the_others_waits_for_the_next_round() -> None:
    """It did what it could in its budget; with a second order its next update would be late."""
    rounds = two_rounds()
    rounds.finish(10.5, "a", steps=5)
    rounds.finish(11.0, "b", steps=5)
    assert not rounds.silos["a"].busy and not rounds.silos["b"].busy
    rounds.finish(12.0, "c", steps=5)
    assert [name for at_s, name in rounds.released if at_s == 12.0] == ["a", "b", "c"]


@given(examples=st.lists(st.integers(1, 500), min_size=1, max_size=4), passes=st.sampled_from([0.1, 0.5, 1.0, 3.0]))
def test_nobody_gets_more_than_so_many_passes_over_its_own_data(examples: list[int], passes: float) -> None:
    held = {f"s{number}": each for number, each in enumerate(examples)}
    rounds = Rounds(Fsp(FixedInterval(INTERVAL_S), passes=passes), examples=held)
    rounds.join(*held)
    for name in held:
        steps = rounds.order(name).max_steps
        assert (steps - 1) * 10 < passes * held[name] <= steps * 10


def test_a_way_back_leads_to_the_model_before_the_first_trial_and_makes_what_began_since_worthless() -> None:
    """Three rounds of 1 s from version 0 on, then back: in FSPV a second trial begins with the same model."""
    rounds = Rounds(Fsp(FittedInterval(1.0), grace=0.5), speeds=dict.fromkeys("abc", 100.0))
    rounds.join("a", "b", "c")
    for at_s in (1.0, 2.0):
        rounds.finish(at_s, "a", "b", "c", steps=5)
    rounds.finish(3.0, "a", "b", steps=5)
    rounds.wait(3.6)
    assert [at_s for at_s, _ in rounds.commits] == [1.0, 2.0, 3.5]
    assert rounds.returns == [(3.5, 0)]
    rounds.finish(4.0, "c", steps=5)
    assert rounds.discards == [(4.0, "c")], "it began before the way back"


# FedCompass: everybody does between so many steps and so many.


@settings(max_examples=40)
@given(
    speeds=st.lists(st.sampled_from([5.0, 10.0, 20.0, 37.0, 80.0, 300.0]), min_size=2, max_size=5),
    bounds=st.sampled_from([(1, 4), (2, 8), (5, 6)]),
)
def test_nobody_does_fewer_steps_than_the_least_nor_more_than_the_most(
    speeds: list[float], bounds: tuple[int, int]
) -> None:
    """Silos do as they are told, for forty orders; who is unknown does the least."""
    speed = {f"s{number}": each for number, each in enumerate(speeds)}
    rounds = Rounds(Compass(*bounds), speeds=speed)
    rounds.join(*speed)
    assert {rounds.order(name).max_steps for name in speed} == {bounds[0]}
    for _ in range(40):
        ends = {
            name: silo.since_s + 10 * silo.order.max_steps / speed[name]
            for name, silo in rounds.silos.items()
            if silo.order is not None
        }
        first = min(ends, key=lambda name: (ends[name], name))
        rounds.finish(ends[first], first)
        steps = [silo.order.max_steps for silo in rounds.silos.values() if silo.order is not None]
        assert all(bounds[0] <= number <= bounds[1] for number in steps)


def test_a_group_is_over_at_its_latest_time_while_another_is_open() -> None:
    """Two silos with steps of 1/8 s, one with steps of a second; of the two, one hangs."""
    rounds = Rounds(Compass(2, 8, latest_factor=1.25), speeds={"a": 80.0, "b": 80.0, "c": 10.0})
    rounds.join("a", "b", "c")
    for at_s in (0.25, 1.25):
        rounds.finish(at_s, "a", "b")
    rounds.finish(2.0, "c")  # two steps more: with 8 to do in the group of a and b, it founds its own for 4 s
    rounds.finish(2.25, "a", "b")  # 8 steps more: a group for 3.25 s, open for a quarter of a second longer
    rounds.finish(3.25, "a")
    rounds.wait(4.0)
    assert rounds.commits[-1] == (3.5, ("a",))
    assert rounds.released[-1] == (3.5, "a")
