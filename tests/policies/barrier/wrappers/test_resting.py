"""A silo that keeps failing is set aside for longer and longer, and nobody else waits for it."""

from typing import Any

from fedsync.core.views import Verdict
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.wrappers.default_wrappers import Rest, Resting, RestingState
from tests.policies.barrier.make import silo, view


def decide(barrier: Resting, state: RestingState, now_s: float, **silos: Any) -> tuple[RestingState, Verdict]:
    return barrier.decide(state, view(silos, now_s=now_s))


def test_whoever_fails_three_times_is_set_aside_for_twice_as_long_each_time() -> None:
    """By hand: 10 s from the third failure, 20 s from the fourth, 40 s from the fifth, then 50 s and no more."""
    barrier = Resting(Bsp(), failures=3, pause_s=10.0, longest_s=50.0)
    state = barrier.init()
    for failures, at_s, until_s in [(3, 5.0, 15.0), (4, 100.0, 120.0), (5, 200.0, 240.0), (6, 300.0, 350.0)]:
        failing = silo(failures=failures, since_s=at_s)
        state, verdict = decide(barrier, state, at_s, a=silo(), b=failing)
        assert verdict.release == ("a",)
        assert verdict.wake_at_s == until_s
        assert f"b is set aside for {until_s - at_s:g} s after {failures} failed orders in a row" in verdict.reason
        state, verdict = decide(barrier, state, at_s + 1, a=silo(busy=True), b=failing)
        assert verdict.release == () and "set aside" not in verdict.reason, "said once"
        state, verdict = decide(barrier, state, until_s, a=silo(), b=failing)
        assert verdict.release == ("a", "b")


def test_a_pause_that_has_doubled_for_ever_is_still_a_number() -> None:
    barrier = Resting(Bsp(), failures=1, pause_s=1.0, longest_s=60.0)
    state, _ = decide(barrier, barrier.init(), 0.0, a=silo(), b=silo(failures=100_000))
    assert state.rests == {"b": Rest(100_000, 60.0)}
