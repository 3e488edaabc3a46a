"""What each barrier around a barrier promises, to the second and to the silo.

Around BSP, whose rounds begin together, a promise is a formula: when a round ends, and whose updates it commits.
Durations are multiples of a quarter second, so that sums are exact; no two are equal.
"""

import math
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.kinds.bulk import Absp, Bsp
from fedsync.policies.barrier.wrappers.default_wrappers import MinimumSilos, Resting
from fedsync.policies.barrier.wrappers.fraction import Fraction
from fedsync.policies.barrier.wrappers.late_orders import Capped, Deadline, LateRule, Quorum
from tests.laws.rounds import Rounds

HURRIED = Absp(sync_ratio=1.0, report_s=0.25)

quarters = st.lists(st.integers(1, 60), min_size=2, max_size=6, unique=True)
late_rules = st.sampled_from(list(LateRule))


def named(durations: list[int]) -> dict[str, float]:
    return {f"s{index}": quarter / 4 for index, quarter in enumerate(durations)}


def expect_a_round(rounds: Rounds, durations: dict[str, float], length_s: float, late: LateRule) -> None:
    """All have begun now; the round ends after ``length_s`` with who is in by then, and they go on; others are late."""
    begin_s, commits = rounds.now_s, len(rounds.commits)
    assert all(silo.since_s == begin_s and silo.busy for silo in rounds.silos.values())
    in_time = {name: seconds for name, seconds in durations.items() if seconds <= length_s}
    rounds.round(in_time)
    rounds.wait(begin_s + length_s + 1 / 64)
    end_s = begin_s + length_s
    assert rounds.commits[commits:] == [(end_s, tuple(sorted(in_time)))]
    assert sorted(name for at_s, name in rounds.released if at_s == end_s) == sorted(in_time)
    halted = sorted(name for at_s, name in rounds.halted if at_s == end_s)
    assert halted == (sorted(set(durations) - set(in_time)) if late is LateRule.DROP else [])
    assert rounds.discards == []


@settings(max_examples=40)
@given(durations=quarters, cap=st.integers(1, 70), late=late_rules)
def test_a_cap_ends_a_round_on_the_dot_or_with_the_first(durations: list[int], cap: int, late: LateRule) -> None:
    rounds, times = Rounds(Capped(Bsp(), cap / 4, late)), named(durations)
    rounds.join(*times)
    first, last = min(times.values()), max(times.values())
    expect_a_round(rounds, times, min(last, max(cap / 4, first)), late)


@settings(max_examples=80)
@given(
    durations=quarters, needed=st.sampled_from([0.2, 1 / 3, 0.5, 0.6, 0.75, 1.0]) | st.integers(1, 8), late=late_rules
)
def test_a_quorum_ends_a_round_with_its_last_silo(durations: list[int], needed: float | int, late: LateRule) -> None:
    """A share of the silos, or so many; all, if there are fewer."""
    share = isinstance(needed, float)
    quorum = Quorum(Bsp(), share=needed, late=late) if share else Quorum(Bsp(), count=int(needed), late=late)
    rounds, times = Rounds(quorum), named(durations)
    rounds.join(*times)
    enough = math.ceil(round(needed * len(times), 6)) if share else min(int(needed), len(times))
    expect_a_round(rounds, times, sorted(times.values())[enough - 1], late)


@settings(max_examples=60)
@given(
    durations=quarters,
    shuffled=st.randoms(use_true_random=False),
    spread=st.sampled_from([0.0, 1.0, 3.0]),
    floor=st.sampled_from([0.0, 0.0, 6.0]),
    share=st.sampled_from([0.3, 0.5, 1.0]),
    late=late_rules,
)
def test_a_deadline_is_the_median_and_so_many_deviations(
    durations: list[int], shuffled: object, spread: float, floor: float, share: float, late: LateRule
) -> None:
    """Nobody is late in the first round, from which it learns; the second ends at the deadline, if its share is in."""
    rounds = Rounds(Deadline(Bsp(), spread=spread, floor_s=floor, share=share, late=late))
    times = named(durations)
    rounds.join(*times)
    rounds.round(times)
    assert rounds.commits == [(max(times.values()), tuple(sorted(times)))]
    shuffled.shuffle(durations)  # type: ignore[attr-defined]
    again = named(durations)
    seconds, enough = sorted(again.values()), math.ceil(round(share * len(again), 6))

    def limit_s(arrived: int) -> float:
        """It goes on learning while silos arrive."""
        seen = seconds + seconds[:arrived]
        usual = median(seen)
        return max(usual + spread * median(abs(each - usual) for each in seen), floor)

    ends = [max(seconds[count - 1], limit_s(count)) for count in range(enough, len(seconds))]
    early = [end for end, following in zip(ends, seconds[enough:], strict=True) if end < following]
    expect_a_round(rounds, again, early[0] if early else seconds[-1], late)


@given(late=late_rules)
def test_what_is_late_is_in_the_next_commit_or_in_none(late: LateRule) -> None:
    rounds = Rounds(Capped(Bsp(), 2.0, late))
    rounds.join("a", "b", "slow")
    rounds.round({"a": 1.0, "b": 1.5})
    rounds.wait(2.25)
    assert rounds.commits == [(2.0, ("a", "b"))]
    rounds.finish(2.5, "slow")  # half a second into the next round, which began at 2.0
    rounds.round({"a": 1.0, "b": 1.25})
    both = ("a", "b") if late is LateRule.DROP else ("a", "b", "slow")
    assert rounds.commits[1:] == [(3.25, both)]
    assert [name for at_s, name in rounds.released if at_s == 3.25] == ["a", "b", "slow"]
    rounds.round({"a": 1.0, "b": 1.0, "slow": 1.0})
    assert rounds.commits[2:] == [(4.25, ("a", "b", "slow"))]


@given(needed=st.integers(1, 5))
def test_nobody_begins_before_enough_silos_are_there_and_nobody_stops_when_they_go(needed: int) -> None:
    rounds = Rounds(MinimumSilos(Bsp(), needed))
    for number in range(1, needed + 1):
        rounds.join(f"s{number}")
        assert len(rounds.released) == (needed if number == needed else 0)
    for name in list(rounds.silos)[1:]:
        del rounds.silos[name]
    rounds.finish(1.0, "s1")
    assert rounds.released[-1] == (1.0, "s1")


@settings(max_examples=30)
@given(failures=st.integers(1, 11), most=st.sampled_from([1, 2, 3]))
def test_a_silo_that_keeps_failing_rests_for_twice_as_long_each_time(failures: int, most: int) -> None:
    """And is asked again on the second when its rest is over; one success, and all is forgotten."""
    rounds = Rounds(Resting(Bsp(), failures=most, pause_s=10.0, longest_s=600.0))
    rounds.join("a")
    expected_s, began = 0.0, [0.0]
    for number in range(1, failures + 1):
        expected_s += 0.25
        rounds.finish(expected_s, "a", fails=True)
        if number >= most:
            expected_s += min(10.0 * 2 ** (number - most), 600.0)
        rounds.wait(expected_s + 0.125)
        began.append(expected_s)
        assert [at_s for at_s, _ in rounds.released] == began
        rounds.now_s = expected_s
    rounds.finish(expected_s + 0.25, "a")
    assert rounds.released[-1] == (expected_s + 0.25, "a")
    rounds.finish(expected_s + 0.5, "a", fails=True)
    assert (rounds.released[-1][0] == expected_s + 0.5) == (most > 1)


def test_others_do_not_wait_for_one_that_rests() -> None:
    rounds = Rounds(Resting(Bsp(), failures=1, pause_s=10.0))
    rounds.join("a", "b")
    rounds.finish(1.0, "a", fails=True)
    rounds.finish(2.0, "b")
    rounds.finish(3.0, "b")
    assert rounds.commits == [(2.0, ("b",)), (3.0, ("b",))]
    assert rounds.released[2:] == [(2.0, "b"), (3.0, "b")]
    rounds.finish(11.5, "b")
    assert rounds.released[4:] == [(11.5, "a"), (11.5, "b")]


@pytest.mark.parametrize(
    "wrapper", [Capped(Bsp(), 1e6), Quorum(Bsp(), share=1.0), Deadline(Bsp(), floor_s=1e6), Fraction(Bsp(), 1.0)]
)
def test_a_wrapper_that_never_binds_changes_nothing(wrapper: BarrierPolicy[object]) -> None:
    plain, wrapped = Rounds(Bsp()), Rounds(wrapper)
    for rounds in (plain, wrapped):
        rounds.join("a", "b", "c")
        for turn in range(4):
            rounds.round({"a": 1.0 + turn, "b": 3.0 - turn / 2, "c": 2.0})
    assert (plain.commits, plain.released) == (wrapped.commits, wrapped.released)
    assert (wrapped.discards, wrapped.halted) == ([], [])


@pytest.mark.parametrize(
    "wrapper", [Capped(HURRIED, 100.0), Quorum(HURRIED, share=1.0), Deadline(HURRIED, floor_s=100.0)]
)
def test_a_wrapper_leaves_the_alarm_of_what_is_inside_as_it_is(wrapper: BarrierPolicy[object]) -> None:
    """A-BSP asks how far the others are when the first is in, and again every quarter second."""
    rounds = Rounds(Resting(MinimumSilos(wrapper, 1)))
    rounds.join("a", "b")
    rounds.finish(1.0, "a")
    assert rounds.wake_s == 1.25
    rounds.wait(1.3)
    assert rounds.wake_s == 1.5
