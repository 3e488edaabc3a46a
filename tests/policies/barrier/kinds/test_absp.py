"""A-BSP: Algorithm 1 one view at a time, and whole runs by hand."""

from pathlib import Path
from typing import Any

from fedsync.core.actions import Commit, Dispatch, HaltEarly, Probe
from fedsync.core.events import Progressed
from fedsync.core.views import SiloView
from fedsync.policies.barrier.kinds.bulk import Absp, AbspState
from tests.policies.barrier.make import meta, race, silo, steps, view

PLANNED = AbspState(dict.fromkeys("abc", 1000))


def at_work(samples: int) -> SiloView:
    """One of figure 5's tasks: 1000 samples planned, so many processed."""
    return silo(busy=True, steps=100, batch=10, progress_steps=samples // 10)


def figure_5(**processed: int) -> dict[str, SiloView]:
    """a has finished."""
    return {"a": silo(clock=1), **{name: at_work(samples) for name, samples in processed.items()}}


FIRST = meta("a", steps=100, batch=10)


def test_nobody_is_asked_before_the_first_has_finished() -> None:
    state, verdict = Absp(0.1).decide(PLANNED, view({name: at_work(900) for name in "abc"}))
    assert (state, verdict.probe, verdict.stop_now, verdict.wake_at_s) == (PLANNED, (), (), None)


def test_silos_are_asked_once_a_report_interval_however_often_it_wakes_up() -> None:
    barrier, silos, state = Absp(0.9, report_s=0.5), figure_5(b=100, c=100), PLANNED
    asked = []
    for now_s in (4.0, 4.0, 4.1, 4.4999, 4.5, 4.5, 4.9, 5.0, 7.3, 7.7, 7.8):
        state, verdict = barrier.decide(state, view(silos, FIRST, now_s=now_s))
        assert verdict.wake_at_s is not None
        assert now_s < verdict.wake_at_s <= now_s + 0.5
        if verdict.probe:
            asked.append(now_s)
    assert asked == [4.0, 4.5, 5.0, 7.3, 7.8]


def test_an_update_tells_of_progress_too() -> None:
    """Without an answer to any question: 1 of 3 orders is too little, 2 of 3 is enough."""
    silos = figure_5(b=0, c=0)
    assert Absp(0.5).decide(PLANNED, view(silos, FIRST))[1].stop_now == ()
    silos["b"] = silo(clock=1)
    assert Absp(0.5).decide(PLANNED, view(silos, FIRST, meta("b", steps=100, batch=10)))[1].stop_now == ("c",)


def test_what_is_planned_follows_who_is_left() -> None:
    """c is gone, d has joined and waits: 1000 + 300 of 2000."""
    silos = {"a": silo(clock=1), "b": at_work(300), "d": silo()}
    assert Absp(0.65).decide(PLANNED, view(silos, FIRST))[1].stop_now == ("b",)
    assert Absp(0.66).decide(PLANNED, view(silos, FIRST))[1].stop_now == ()


def test_a_first_finisher_that_is_gone_counts() -> None:
    assert Absp(0.5).decide(PLANNED, view({"b": at_work(500), "c": at_work(300)}, FIRST))[1].stop_now == ("b", "c")


# Whole runs: 8 steps of 1/8, 1/4 and 1/2 s. a is in at 1 s; b has done 4 steps by then, c 2.


def absp(**more: Any) -> dict[str, Any]:
    return {"kind": "a-bsp", **more}


SPEEDS = [256.0, 128.0, 64.0]


def test_enough_is_processed_after_some_questions(tmp_path: Path) -> None:
    """R_s = 0.75 is 18 of 24 steps.

    At 1 s 8 are known, and 8 + 4 + 2 = 14 once the others have answered; at 1.5 s it is 8 + 6 + 3 = 17. At 2 s b is in,
    which makes 8 + 8 + 3 = 19: c stops after its 4th step, which ends then.
    """
    result = race(tmp_path, SPEEDS, absp(sync_ratio=0.75, report_s=0.5), stop={"rounds": 1})
    assert [(at_s, probe.silo) for at_s, probe in result.actions(Probe)] == [
        (1.0, "b"),
        (1.0, "c"),
        (1.5, "b"),
        (1.5, "c"),
    ]
    assert [(at_s, halt.silo) for at_s, halt in result.actions(HaltEarly)] == [(2.0, "c")]
    assert steps(result) == [{"a": 8, "b": 8, "c": 4}]
    assert [event.steps for event in result.events(Progressed)] == [4, 2, 6, 3]


def test_a_ratio_of_1_is_bsp(tmp_path: Path) -> None:
    decided = []
    for barrier in (absp(sync_ratio=1.0), {"kind": "bsp"}):
        out = tmp_path / barrier["kind"]
        result = race(out, [300.0, 170.0, 40.0], barrier, {"jitter": 0.3}, stop={"rounds": 10})
        decided.append(result.actions(Dispatch, Commit))
    assert decided[0] == decided[1]
