"""A silo that keeps failing is set aside for longer and longer, and nobody else waits for it."""

from typing import Any

from fedsync.core.views import Verdict
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.wrappers.default_wrappers import Rest, Resting, RestingState
from tests.policies.barrier.make import silo, view


def decide(barrier: Resting, state: RestingState, now_s: float, **silos: Any) -> tuple[RestingState, Verdict]:
    return barrier.decide(state, view(silos, now_s=now_s))


def test_a_pause_that_has_doubled_for_ever_is_still_a_number() -> None:
    barrier = Resting(Bsp(), failures=1, pause_s=1.0, longest_s=60.0)
    state, _ = decide(barrier, barrier.init(), 0.0, a=silo(), b=silo(failures=100_000))
    assert state.rests == {"b": Rest(100_000, 60.0)}
