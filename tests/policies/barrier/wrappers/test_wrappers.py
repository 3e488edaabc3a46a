"""Capped, quorum and deadline: who is not waited for, and what becomes of what they send."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from fedsync.core.orders import WorkOrder
from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.wrappers.late_orders import Capped, Deadline, LateState, Quorum
from tests.policies.barrier.make import begins, meta, race, silo, view

SPEEDS = [256.0, 128.0, 64.0]
"""Orders of 1, 2 and 4 s."""


@dataclass(frozen=True)
class Counting:
    """Counts, in its state, how often it was asked, and says what it saw."""

    def init(self) -> int:
        return 0

    def decide(self, state: int, view: ClusterView) -> tuple[int, Verdict]:
        seen = f"call {state}: {','.join(view.silos)} | {','.join(view.pending)}"
        return state + 1, Verdict(release=view.idle, wake_at_s=50.0, reason=seen)


def busy(name: str, since_s: float = 0.0) -> SiloView:
    return replace(silo(), order=WorkOrder(f"{name}/1", 0, 1, 8, 4, 0.1, 1), since_s=since_s)


# Capped.


@pytest.mark.parametrize(("version", "late"), [(0, frozenset()), (1, {"b/1"})])
def test_somebody_is_in_if_the_model_has_moved_on(version: int, late: frozenset[str]) -> None:
    """As it does at once where each arrival is committed. An idle silo that sent nothing is nobody to go on with."""
    barrier = Capped(Bsp(), cap_s=5.0)
    silos = {"a": silo(), "b": busy("b")}
    assert barrier.decide(barrier.init(), view(silos, now_s=9.0, version=version))[0].late == late


def test_a_late_silo_that_failed_or_was_lost_is_forgotten() -> None:
    barrier = Capped(Counting(), 5.0)
    state, _ = barrier.decide(LateState(frozenset({"b/1", "c/1"}), 0), view({"b": silo(failures=1)}, now_s=7.0))
    assert state.late == frozenset()


def test_a_cap_frees_the_fast_from_a_staleness_bound(tmp_path: Path) -> None:
    """SSP with s = 0 holds a for b and c. With a cap of 1.5 s it waits for none of them longer than that."""
    barrier = {"kind": "capped", "cap_s": 1.5, "inner": {"kind": "ssp", "staleness": 0}}
    result = race(tmp_path, SPEEDS, barrier, stop={"seconds": 3.4})
    assert begins(result)["a"][:2] == [0, 1.5]


# Quorum.


def test_silos_that_take_no_part_do_not_count() -> None:
    """b joined in the middle of the round: of a and c, who take part, half is enough."""
    barrier = Quorum(Bsp(), share=0.5)
    silos = {"a": silo(clock=1), "b": silo(), "c": busy("c")}
    assert barrier.decide(barrier.init(), view(silos, meta("a")))[1].commit == ("a/1",)


def test_two_updates_of_one_silo_are_no_quorum_of_two() -> None:
    barrier = Quorum(Bsp(), count=2)
    silos = {"a": silo(clock=2), "c": busy("c")}
    assert barrier.decide(barrier.init(), view(silos, meta("a"), meta("a", number=2)))[1].commit == ()


# Deadline.


def test_durations_run_from_release_to_arrival_and_a_failed_order_has_none() -> None:
    barrier = Deadline(Bsp(), window=3)
    state, _ = barrier.decide(barrier.init(), view({"a": silo(), "b": silo(), "c": silo()}, now_s=2.0))
    assert dict(state.begun) == {"a": 2.0, "b": 2.0, "c": 2.0}
    silos = {"a": silo(clock=1, since_s=3.5), "b": silo(failures=1, since_s=4.0), "c": busy("c", since_s=2.0)}
    state, _ = barrier.decide(state, view(silos, meta("a"), now_s=4.0))
    assert (state.durations, dict(state.begun)) == ((1.5,), {"c": 2.0})
    state, _ = barrier.decide(state, view(silos, meta("a"), now_s=4.0))
    assert state.durations == (1.5,), "counted once"
    state, _ = barrier.decide(state, view({"a": silos["a"]}, meta("a"), now_s=5.0))
    assert (state.durations, dict(state.begun)) == ((1.5,), {"a": 5.0}), "c is gone; a is released"
