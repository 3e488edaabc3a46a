"""FSP: one view at a time, and whole runs by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import ConfigError
from fedsync.core.views import SiloView, Verdict
from fedsync.extras.intervals.climbing import ClimbingInterval
from fedsync.policies.barrier.intervals import Attempt, FixedInterval, IntervalRound
from fedsync.policies.barrier.kinds.fsp import Fsp, FspRound, FspState, Late, Overhead, WaitFor
from fedsync.policies.barrier.kinds.sampled import Sampling
from tests.policies.barrier.make import commits, meta, race, silo, steps, view

KNOWN = {name: Overhead(1, 0.25) for name in "abcd"}


def fsp(**more: Any) -> Fsp:
    """Rounds of 2 s, with 1 s of grace."""
    return Fsp(FixedInterval(2.0), **more)


def in_work(members: str = "abc", awaited: str | None = None, **more: Any) -> FspState:
    """A round that began at 10 s; all overheads are 0.25 s."""
    names = frozenset(members)
    round = FspRound(10.0, 12.0, 13.0, names, names if awaited is None else frozenset(awaited))
    return FspState(None, replace(round, **more), KNOWN, rounds=1)


def known(**more: Any) -> SiloView:
    """A silo that has finished an order, at 100 samples/s, so 0.08 s a step."""
    return silo(clock=1, speed=100.0, overhead_s=0.25, **more)


def decide(
    barrier: Fsp, state: FspState, now_s: float, silos: dict[str, SiloView], *pending: Any, version: int = 1
) -> Verdict:
    """The verdict; asked once more, about the same, it has nothing new to say."""
    seen = view(silos, *pending, now_s=now_s, version=version)
    after, verdict = barrier.decide(state, seen)
    if not (verdict.release or verdict.commit or verdict.discard):
        again, second = barrier.decide(after, seen)
        assert again == after
        assert replace(second, reason="") == replace(verdict, stop_now=(), reason="")
    return verdict


BUSY = {name: known(busy=True, base=1) for name in "abc"}


# Orders.


def test_a_round_gives_everybody_the_interval_less_its_own_overhead() -> None:
    silos = {"a": silo(clock=3, overhead_s=0.25), "b": silo(clock=2, overhead_s=1.5), "new": silo()}
    state, verdict = fsp(passes=2.0, overrun=0.25).decide(fsp().init(), view(silos, now_s=5.0))
    assert verdict.release == ("a", "b", "new")
    assert verdict.budget_s == {"a": 1.75, "b": 0.5, "new": 2.0}
    assert verdict.steps == {"a": 250, "b": 250, "new": 250}, "twice 1000 examples in batches of 8"
    assert verdict.overrun == 0.25
    assert verdict.wake_at_s == 8.0, "5 + 2, and a grace of half the interval"
    assert "2 s" in verdict.reason
    assert state.round == FspRound(5.0, 7.0, 8.0, frozenset(silos), frozenset(silos))


def test_overheads_are_smoothed_from_order_to_order_and_never_counted_twice() -> None:
    """By hand: 9 with start-up, forgotten at the second's 2, then (2 + 1) / 2 = 1.5, then (1.5 + 0.5) / 2 = 1."""
    barrier, state = fsp(), fsp().init()
    orders = [(0, 0.0, None), (1, 9.0, 9.0), (1, 9.0, 9.0), (2, 2.0, 2.0), (2, 2.0, 2.0), (3, 1.0, 1.5), (4, 0.5, 1.0)]
    for clock, last_s, expected in orders:
        state, _ = barrier.decide(state, view({"a": silo(clock=clock, overhead_s=last_s, busy=True)}))
        assert (state.overheads["a"].seconds if expected else state.overheads.get("a")) == expected
    state, _ = barrier.decide(state, view({"a": silo(clock=0, busy=True)}))
    assert state.overheads["a"] == Overhead(0, 1.0, 4), "a silo that joins again is as slow as before"
    state, _ = barrier.decide(state, view({"a": silo(clock=1, overhead_s=2.0, busy=True)}))
    assert state.overheads["a"].seconds == 1.5


def test_an_interval_full_of_overhead_is_stretched() -> None:
    """Overheads of 1, 3 and 9 s: twice the median is 6 s, and 3 s of grace."""
    silos = {name: silo(clock=1, overhead_s=seconds) for name, seconds in [("a", 1.0), ("b", 3.0), ("c", 9.0)]}
    state, verdict = fsp().decide(fsp().init(), view({**silos, "new": silo()}))
    assert verdict.budget_s == {"a": 5.0, "b": 3.0, "c": 0.0, "new": 6.0}
    assert state.round is not None
    assert (state.round.deadline_s, verdict.wake_at_s) == (6.0, 9.0)


# The end of a round.


def without(names: str) -> dict[str, SiloView]:
    """The round's silos, of which ``names`` are idle."""
    return {name: known() if name in names else one for name, one in BUSY.items()}


def test_a_silo_that_never_finished_an_order_is_waited_for() -> None:
    """Its first order includes starting up, which nobody could know."""
    state = replace(in_work(), overheads={"a": KNOWN["a"], "b": KNOWN["b"]})
    silos = {"a": known(), "b": known(busy=True, base=1), "c": silo(busy=True, base=1)}
    assert decide(fsp(), state, 50.0, silos, meta("a", base=1)).commit == ()
    silos["c"] = known()
    assert decide(fsp(), state, 50.0, silos, meta("a", base=1), meta("c", base=1)).commit == ("a/1", "c/1")


def test_what_a_lost_silo_sent_counts() -> None:
    assert decide(fsp(), in_work("a"), 11.0, {}, meta("a", base=1)).commit == ("a/1",)
    assert decide(fsp(), in_work("a"), 11.0, {}).reason == "no silo is here"


# Going once through the data.


def test_who_is_through_its_data_stops_the_others_once() -> None:
    """125 steps of 8 samples are its 1000 examples."""
    through = meta("a", base=1, steps=125)
    state, verdict = fsp().decide(in_work(), view(without("a"), through, now_s=10.5, version=1))
    assert verdict.stop_now == ("b", "c")
    assert "a is through" in verdict.reason
    assert decide(fsp(), state, 10.6, without("a"), through).stop_now == ()
    assert decide(fsp(), state, 10.6, without("ab"), through, meta("b", base=1)).stop_now == ()


def test_who_is_not_through_stops_nobody() -> None:
    assert decide(fsp(), in_work(), 10.5, without("a"), meta("a", base=1, steps=124)).stop_now == ()
    assert decide(fsp(passes=3.0), in_work(), 10.5, without("a"), meta("a", base=1, steps=125)).stop_now == ()
    assert decide(fsp(), in_work(), 10.5, without("a"), meta("a", base=0, steps=125)).stop_now == (), "long ago"


# Joining a round in work.


@pytest.mark.parametrize(
    ("now_s", "joins"),
    [
        (11.0, True),  # 1 s left, less 0.25 s of overhead: time for steps of 0.08 s
        (11.67, True),  # 0.33 - 0.25 = 0.08
        (11.68, False),
        (12.5, False),
    ],
)
def test_a_late_silo_joins_while_there_is_time_for_a_step(now_s: float, joins: bool) -> None:
    verdict = decide(fsp(late=Late.NEXT), in_work("abc"), now_s, {**BUSY, "d": known()}, meta("d", base=0))
    assert verdict.release == (("d",) if joins else ())
    assert verdict.budget_s == (pytest.approx({"d": 12.0 - now_s - 0.25}) if joins else {})
    assert verdict.commit == ()


def test_strangers_and_silos_that_had_their_turn_wait_for_the_next_round() -> None:
    silos = {"a": known(busy=True, base=1), "b": known(failures=1), "new": silo()}
    assert decide(fsp(), in_work(), 10.5, silos).release == ()


def test_nobody_joins_a_round_that_is_being_stopped() -> None:
    silos = {**without("a"), "d": known()}
    assert decide(fsp(), in_work(), 10.5, silos, meta("a", base=1, steps=125)).release == ()


# Late updates.


def test_late_updates_alone_make_no_commit() -> None:
    """It would make everybody else late."""
    assert decide(fsp(), in_work("abc"), 14.0, {**BUSY, "d": known()}, meta("d", base=0)).commit == ()


# What the interval policy is told, and what it may ask for.


class Recording(FixedInterval):
    """Keeps what it was told, as its state; asks for a rollback once it was told something."""

    __slots__ = ()

    def init(self) -> tuple[IntervalRound, ...]:  # type: ignore[override]
        return ()

    def attempt(self, state: tuple[IntervalRound, ...]) -> Attempt:  # type: ignore[override]
        return Attempt(2.0, savepoint=not state, rollback=bool(state))

    def observe(self, state: tuple[IntervalRound, ...], seen: IntervalRound) -> tuple[IntervalRound, ...]:  # type: ignore[override]
        return (*state, seen)


def test_the_interval_policy_is_told_of_the_updates_that_began_with_the_round() -> None:
    """By hand: losses 1 and 4 over 32 and 96 samples are (32 + 384) / 128 = 3.25; the late one does not count."""
    barrier = Fsp(Recording(2.0))
    state = replace(
        in_work("ab"), interval=(), overheads={"a": Overhead(1, 0.1), "b": Overhead(1, 0.3), "d": KNOWN["d"]}
    )
    pending = (meta("a", base=1, loss=1.0), meta("b", base=1, steps=12, loss=4.0), meta("d", base=0, loss=100.0))
    state, verdict = barrier.decide(state, view(dict.fromkeys("abd", known()), *pending, now_s=12.5, version=1))
    assert len(verdict.commit) == 3
    (seen,) = state.interval
    assert (seen.seconds, seen.cost_s, seen.loss) == (2.5, pytest.approx(0.2), 3.25)


def test_an_interval_that_goes_by_losses_is_refused_where_no_silo_reports_one() -> None:
    seen = view(dict.fromkeys("ab", known()), meta("a", base=1, loss=None), now_s=12.0, version=1)
    state = replace(in_work("ab"), interval=ClimbingInterval().init())
    with pytest.raises(ConfigError, match=r"barrier.interval: goes by the loss of each round, which no silo reports"):
        Fsp(ClimbingInterval()).decide(state, seen)
    assert fsp().decide(in_work("ab"), seen)[1].commit, "a fixed interval needs none"
    after, verdict = Fsp(ClimbingInterval()).decide(replace(state, rounds=2), seen)
    assert verdict.commit and after.interval == state.interval, "silos that log a loss every few steps may skip a round"


# Waiting for a few.


@pytest.mark.parametrize(
    ("now_s", "arrived", "commits"),
    [
        (11.9, "ab", False),  # before the deadline all are waited for
        (12.0, "ab", True),
        (12.0, "a", False),
        (12.0, "bc", False),
        (13.0, "bc", True),  # the grace is over
        (12.0, "abc", True),
    ],
)
def test_after_the_deadline_only_the_sample_is_waited_for(now_s: float, arrived: str, commits: bool) -> None:
    barrier = fsp(wait_for=WaitFor(2, Sampling.DYNAMIC))
    verdict = decide(barrier, in_work("abc", "ab"), now_s, without(arrived), *(meta(name, base=1) for name in arrived))
    assert (verdict.commit != ()) == commits
    assert verdict.wake_at_s == (None if commits else 12.0 if now_s < 12.0 else 13.0)


def test_the_sample_is_drawn_round_by_round_from_those_who_begin() -> None:
    barrier = fsp(wait_for=WaitFor(2, Sampling.DYNAMIC))
    drawn = set()
    for rounds in range(20):
        state, _ = barrier.decide(
            FspState(None, rounds=rounds), view({**BUSY, **{n: known() for n in "defg"}}, version=5)
        )
        assert state.round is not None
        assert len(state.round.awaited) == 2
        assert state.round.awaited <= set("defg")
        drawn.add(state.round.awaited)
    assert len(drawn) > 2


# Whole runs.


def fixed(interval_s: float, **more: Any) -> dict[str, Any]:
    return {"kind": "fsp", "interval": {"kind": "fixed", "interval_s": interval_s}, **more}


@pytest.mark.parametrize(
    ("overrun", "slow", "ends"),
    [
        (0.0, 2, 2.0),  # steps of 0.8 s: two end in time, at 1.6 s
        (0.49, 2, 2.0),  # the third would end at 2.4 s, half a step over
        (0.51, 3, 2.4),
        (1.0, 3, 2.4),
    ],
)
def test_the_last_step_may_run_over_by_its_share(tmp_path: Path, overrun: float, slow: int, ends: float) -> None:
    result = race(tmp_path, [256.0, 40.0], fixed(2.0, overrun=overrun), stop={"rounds": 1})
    assert steps(result) == [{"a": 16, "b": slow}]
    assert commits(result)[0][0] == pytest.approx(ends)
