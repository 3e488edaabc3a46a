"""Rounds that end on time: one view at a time, and whole runs by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsync.core.actions import Commit, Dispatch, HaltEarly
from fedsync.core.views import SiloView
from fedsync.policies.barrier.kinds.bulk import OnTime, OnTimeState
from tests.policies.barrier.make import commits, meta, race, silo, steps, view

ORDER = {"steps": 10, "batch": 10}
BEGUN = OnTimeState(dict.fromkeys("abc", 100), begun_s=1.0)
"""Three silos have 100 samples each, since 1 s."""

FIRST = meta("a", **ORDER)


def cluster(b: int = 0, c: int = 0, **more: Any) -> dict[str, SiloView]:
    """a took 2 s; b and c are at work and have told of so many steps."""
    b_works, c_works = (silo(busy=True, progress_steps=steps, **ORDER | more) for steps in (b, c))
    return {"a": silo(clock=1, since_s=3.0), "b": b_works, "c": c_works}


def asked(barrier: OnTime, b: int, c: int, at_s: float = 3.0) -> OnTimeState:
    """At 3 s a is in: the others are asked, and tell of so many steps."""
    state, verdict = barrier.decide(BEGUN, view(cluster(), FIRST, now_s=3.0))
    assert verdict.probe == ("b", "c")
    return barrier.decide(state, view(cluster(b, c), FIRST, now_s=at_s))[0]


def test_nobody_is_asked_before_the_first_is_in() -> None:
    state, verdict = OnTime().decide(BEGUN, view(cluster() | {"a": silo(busy=True, **ORDER)}, now_s=2.0))
    assert (state, verdict.probe, verdict.stop_now, verdict.wake_at_s) == (BEGUN, (), (), None)


def test_one_that_does_not_answer_goes_by_its_forecast() -> None:
    """b and c at 25 samples/s: 300 / 100 = 3 s, and their steps of 0.4 s end half of one later."""
    barrier, silos = OnTime(report_s=9.0), cluster(speed=25.0)
    verdict = barrier.decide(BEGUN, view(silos, FIRST, now_s=3.0))[1]
    assert (verdict.probe, verdict.wake_at_s) == (("b", "c"), pytest.approx(1 + 3.0 - 0.2))


def test_nobody_is_asked_who_is_expected_in_time() -> None:
    """b and c at 49 samples/s: 300 / 148 = 2.027 s is right, and they take 2.041 s. Half of the slack is 5 %."""
    barrier, silos = OnTime(0.1, report_s=9.0), cluster(speed=49.0)
    state, verdict = barrier.decide(BEGUN, view(silos, FIRST, now_s=3.0))
    assert (verdict.probe, verdict.wake_at_s) == ((), pytest.approx(1 + 1.05 * 300 / 148))
    state, verdict = barrier.decide(state, view(silos, FIRST, now_s=3.13))
    assert (verdict.probe, verdict.wake_at_s) == (("b", "c"), pytest.approx(1 + 1.1 * 300 / 148))
    assert barrier.decide(state, view(silos, FIRST, now_s=3.24))[1].stop_now == ("b", "c")


def test_beside_a_long_overhead_a_little_more_training_is_waited_for() -> None:
    """b and c at 25 samples/s: 3 s are right, and they take 4 s. With 8 s of overhead, which may come first, the round
    takes 11 s, and the slack is 10 %."""
    barrier, silos = OnTime(0.1, report_s=9.0), cluster(speed=25.0, overhead_s=8.0)
    state, verdict = barrier.decide(BEGUN, view(silos, FIRST, now_s=3.0))
    assert (verdict.probe, verdict.wake_at_s) == ((), pytest.approx(1 + 11 + 0.55))
    verdict = barrier.decide(state, view(silos, FIRST, now_s=12.6))[1]
    assert (verdict.probe, verdict.wake_at_s) == (("b", "c"), pytest.approx(1 + 11 + 1.1))


def test_overhead_before_the_first_step_is_not_slowness() -> None:
    """At 4 s, after 2 s of overhead and 1 s of training at 25 samples/s, b and c have done 2 of 10 steps. A half of
    the third is assumed: 25 samples in 1 s. Alone, 25 samples in 3 s would be 8.3 samples/s, and c would be stopped."""
    barrier, silos = OnTime(0.5, report_s=0.5), cluster(2, 2, speed=25.0, overhead_s=2.0)
    state, _ = barrier.decide(BEGUN, view(cluster(speed=25.0, overhead_s=2.0), FIRST, now_s=3.0))
    state, verdict = barrier.decide(state, view(silos, FIRST, now_s=4.0))
    assert verdict.stop_now == () and verdict.wake_at_s == pytest.approx(1 + 3 + 2 + 0.5 * 5 / 2)


def test_of_whom_nothing_is_known_counts_as_standing_still() -> None:
    """300 samples at a's 50 a second are 6 s."""
    state, verdict = OnTime(report_s=9.0).decide(BEGUN, view(cluster(), FIRST, now_s=3.0))
    assert verdict.wake_at_s == 7.0
    assert OnTime(report_s=9.0).decide(state, view(cluster(), FIRST, now_s=7.0))[1].stop_now == ("b", "c")


def test_answers_come_before_anybody_is_stopped() -> None:
    """a has come late, and by their forecasts b and c, which are twice as fast, should be in long since."""
    barrier, silos = OnTime(report_s=0.5), cluster(speed=100.0)
    state, verdict = barrier.decide(BEGUN, view(silos, FIRST, now_s=3.5))
    assert (verdict.stop_now, verdict.probe, verdict.wake_at_s) == ((), ("b", "c"), 4.0)
    assert barrier.decide(state, view(silos, FIRST, now_s=4.0))[1].stop_now == ("b", "c")


def test_silos_are_asked_once_a_report_interval_however_often_it_wakes_up() -> None:
    barrier, state, asked = OnTime(report_s=0.5), BEGUN, []
    for now_s in (3.0, 3.0, 3.1, 3.4999, 3.5, 3.5, 3.9, 4.0, 6.3, 6.7, 6.8):
        state, verdict = barrier.decide(state, view(cluster(), FIRST, now_s=now_s))
        assert verdict.wake_at_s is not None and now_s < verdict.wake_at_s <= now_s + 0.5
        if verdict.probe:
            asked.append(now_s)
    assert asked == [3.0, 3.5, 4.0, 6.3, 6.8]


def test_in_its_last_step_nobody_is_asked_or_stopped() -> None:
    """An order of one step has no other."""
    verdict = OnTime().decide(BEGUN, view(cluster(9, 9), FIRST, now_s=3.0))[1]
    assert (verdict.probe, verdict.wake_at_s) == ((), None)
    short = {"a": silo(clock=1, since_s=3.0), "b": silo(busy=True, steps=1, batch=100)}
    assert OnTime().decide(BEGUN, view(short, FIRST, now_s=99.0))[1].probe == ()


def test_an_update_of_another_round_tells_nothing_of_this_one() -> None:
    """A barrier around this one has let d be late: it was at work for longer than this round is old."""
    barrier = OnTime(report_s=9.0)
    late = {**cluster(4, 1), "d": silo(clock=1, since_s=1.1)}
    alone, both = (
        barrier.decide(asked(barrier, 4, 1), replace(view(each, FIRST, *more, now_s=3.0), version=0))[1].wake_at_s
        for each, more in ((cluster(4, 1), ()), (late, (meta("d", base=-1, **ORDER),)))
    )
    assert alone == both


# Whole runs: 8 steps of 1/8, 1/4 and 1/2 s. a is in at 1 s; b has done 4 steps by then, c 2.

ON_TIME = {"kind": "on-time"}
SPEEDS = [256.0, 128.0, 64.0]


def test_once_sizes_are_right_it_is_bsp(tmp_path: Path) -> None:
    """55, 27 and 14 of 96 samples: steps of 0.215, 0.211 and 0.219 s."""
    result = race(tmp_path, SPEEDS, ON_TIME, balancer={"kind": "proportional"}, stop={"rounds": 5})
    assert steps(result)[1:] == [{"a": 8, "b": 8, "c": 8}] * 4
    assert [at_s < 1.5 for at_s, _ in result.actions(HaltEarly)] == [True, True], "in the first round"


@pytest.mark.parametrize(
    ("speeds", "more"), [([200.0] * 4, {}), ([200.0, 190.0], {}), ([200.0] * 4, {"overhead_s": 0.5})]
)
def test_where_all_are_equal_or_nearly_it_is_bsp(speeds: list[float], more: dict[str, float], tmp_path: Path) -> None:
    def deeds(name: str, barrier: dict[str, Any]) -> list[Any]:
        sections: dict[str, Any] = {"balancer": {"kind": "proportional"}, "stop": {"rounds": 5}}
        result = race(tmp_path / name, speeds, barrier, more, aggregation={"kind": "fednova"}, **sections)
        return result.actions(Dispatch, Commit, HaltEarly)

    assert deeds("on-time", ON_TIME) == deeds("bsp", {"kind": "bsp"})


def test_a_machine_that_gets_slower_holds_nobody_up_for_long(tmp_path: Path) -> None:
    """With noise no round lasts longer than 1.1 times the right time and a step."""
    sections: dict[str, Any] = {"balancer": {"kind": "proportional"}, "stop": {"rounds": 20}}
    noisy = {"contention": {"kind": "markov", "factor": 0.25, "on_s": 3, "off_s": 6}}
    ends = {}
    for kind in ("on-time", "bsp"):
        result = race(tmp_path / kind, [256.0] * 4, {"kind": kind}, noisy, **sections)
        ends[kind] = commits(result)[-1][0]
    assert ends["on-time"] < 0.8 * ends["bsp"]
