"""What no run of a shipped strategy alone can show: barriers such as users may write, and runs side by side."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedsync.core.actions import Dispatch, HaltEarly
from fedsync.core.coordinator import Coordinator
from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.kinds.bulk import Bsp
from tests.laws.corners import corners
from tests.laws.fake_cluster import FakeCluster
from tests.laws.kinds import policies_of
from tests.laws.verdicts import Spy


@dataclass(frozen=True)
class Insistent:
    """Says again with every event that everybody at work is to stop."""

    inner: AnyBarrier = field(default_factory=Bsp)

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        state, verdict = self.inner.decide(state, view)
        busy = tuple(name for name, silo in view.silos.items() if silo.busy)
        return state, replace(verdict, stop_now=busy if view.pending and not verdict.commit else ())


def test_a_silo_is_told_to_stop_once_an_order_however_often_the_barrier_says_so() -> None:
    policies = replace(policies_of(("barrier", "bsp", {}), {"rounds": 6}), barrier=Insistent())
    outcome = FakeCluster(Coordinator(policies), corners(3)["quiet"].scenario).run()
    told = [action.update_id for action in outcome.actions(HaltEarly)]
    assert len(told) == len(set(told)) >= 12


def test_the_runs_seed_decides_the_seed_of_every_order() -> None:
    def seeds(run_seed: int) -> dict[str, int]:
        policies = replace(policies_of(("barrier", "bsp", {}), {"rounds": 6}), seed=run_seed)
        outcome = FakeCluster(Coordinator(policies), corners(3)["quiet"].scenario).run()
        return {action.order.update_id: action.order.seed for action in outcome.actions(Dispatch)}

    one, again, other = seeds(1), seeds(1), seeds(2)
    assert one == again
    assert one.keys() == other.keys()
    assert not set(one.values()) & set(other.values())


@pytest.mark.parametrize(("curve", "launch_s"), [({"kind": "affine"}, 0.1), ({"kind": "linear"}, 0.0)])
def test_what_a_step_costs_besides_samples_is_learned_where_told_so(curve: dict[str, str], launch_s: float) -> None:
    """A tenth of a second in every step of every silo, exactly."""
    case = ("balancer", "proportional", {"curve": curve, "multiple": 5})
    policies = policies_of(case, {"rounds": 24})
    spy = Spy(policies.barrier)
    scenario = corners(3)["quiet"].scenario
    silos = tuple(replace(silo, launch_s=0.1, jitter=0.0) for silo in scenario.silos)
    FakeCluster(Coordinator(replace(policies, barrier=spy)), replace(scenario, silos=silos)).run()
    found = {name: silo.forecast for name, silo in spy.asked[-1].silos.items()}
    assert {name: curve and round(curve.launch_s, 6) for name, curve in found.items()} == dict.fromkeys(found, launch_s)
