"""The fake cluster does what drivers must: budgets, halts, alarms. Otherwise the laws would prove nothing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Progressed, TimerFired, UpdateArrived
from fedsync.core.orders import LocalWork, WorkReport
from fedsync.core.speed.sizing import Sizing
from fedsync.core.state import Policies
from fedsync.core.stopping import StopRules
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.aggregate.weighers import WeightedMean
from fedsync.policies.predict.predictor_base import Ema
from tests.laws.fake_cluster import FakeCluster, Outcome, steps_in_time
from tests.laws.scenario import Scenario, Silo


@dataclass(frozen=True)
class Asynchronous:
    """Commits each update, releases everybody; the verdict is altered by ``change``."""

    change: Callable[[ClusterView, Verdict], Verdict] = lambda view, verdict: verdict

    def init(self) -> None:
        return None

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        pending = tuple(view.pending)[:1]
        return None, self.change(view, Verdict(commit=pending, release=() if pending else view.idle))


SPEEDS = [60.0, 100.0, 180.0]


def run(barrier: Any, silos: int = 3, **changes: Any) -> Outcome:
    """Ten seconds of orders of 100 steps x 10 samples, which take 5 to 18 s each if nothing cuts them short."""
    policies = Policies(
        seed=1,
        predictor=Ema(),
        sizing=Sizing(LocalWork(100, 10, 0.1)),
        barrier=barrier,
        weigher=WeightedMean(),
        stop=StopRules(seconds=10.0),
    )
    cluster = [Silo(f"silo-{place}", place, speed=speed, **changes) for place, speed in enumerate(SPEEDS[:silos])]
    return FakeCluster(Coordinator(policies), Scenario("law", 3, tuple(cluster))).run()


def reports(outcome: Outcome) -> list[WorkReport]:
    return [event.report for entry in outcome.entries for event in entry.events if isinstance(event, UpdateArrived)]


def test_a_budget_ends_an_order_with_the_step_in_which_it_runs_out() -> None:
    def within_a_second(view: ClusterView, verdict: Verdict) -> Verdict:
        return replace(verdict, budget_s=dict.fromkeys(verdict.release, 1.0))

    outcome = run(Asynchronous(within_a_second))
    assert outcome.faults == []
    assert len(reports(outcome)) > 10
    for report in reports(outcome):
        step_s = report.compute_s / report.steps
        assert 1.0 <= report.compute_s <= 1.0 + 1.5 * step_s
        assert report.samples == 10 * report.steps < 1000


@pytest.mark.parametrize(
    ("budget_s", "overrun", "steps"),
    [
        # A step may overrun the budget by its share: the fourth begins in time and ends half of its length late.
        *[(3.5, 1.0, 4), (3.5, 0.5, 4), (3.5, 0.3, 3), (3.5, 0.0, 3)],
        # A step begins before the budget ends, and the first in any case.
        *[(0.1, 1.0, 1), (1.0, 1.0, 1), (1.1, 1.0, 2), (2.0, 1.0, 2), (9.0, 1.0, 5)],
    ],
)
def test_steps_of_a_second_in_a_budget(budget_s: float, overrun: float, steps: int) -> None:
    assert steps_in_time(1.0, 5, budget_s, overrun) == steps


def test_a_probe_is_answered_while_the_order_is_in_work() -> None:
    def probe_all(view: ClusterView, verdict: Verdict) -> Verdict:
        on_the_second = view.now_s == int(view.now_s)
        busy = tuple(name for name, silo in view.silos.items() if silo.busy and on_the_second)
        return replace(verdict, probe=busy, wake_at_s=int(view.now_s) + 1.0)

    outcome = run(Asynchronous(probe_all))
    assert outcome.faults == []
    told = [event for entry in outcome.entries for event in entry.events if isinstance(event, Progressed)]
    answers = {event.at_s: event.steps for event in told if event.update_id == "silo-0/1"}
    job = outcome.jobs["silo-0/1"]
    for second in (1, 2, 3, 4):  # told a hundredth later
        assert answers[second + 0.01] == int(second / job.step_s)


def test_a_halt_ends_an_order_with_the_step_in_work() -> None:
    def halt_after_two_seconds(view: ClusterView, verdict: Verdict) -> Verdict:
        overdue = tuple(n for n, silo in view.silos.items() if silo.busy and view.now_s - silo.since_s >= 2.0)
        return replace(verdict, stop_now=overdue, wake_at_s=view.now_s + 0.5)

    outcome = run(Asynchronous(halt_after_two_seconds))
    assert outcome.faults == []
    assert len(reports(outcome)) > 5
    for report in reports(outcome):
        assert 2.0 <= report.compute_s <= 3.0  # seen at most half a second late, a step is at most 0.22 s
        assert report.steps < 100


def test_an_alarm_goes_off_at_its_time() -> None:
    def every_third_of_a_second(view: ClusterView, verdict: Verdict) -> Verdict:
        return replace(verdict, wake_at_s=view.now_s + 1 / 3)

    outcome = run(Asynchronous(every_third_of_a_second), silos=1)
    fired = [entry.at_s for entry in outcome.entries if any(isinstance(event, TimerFired) for event in entry.events)]
    assert fired[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])


@pytest.mark.parametrize(
    ("verdict", "fault"),
    [(Verdict(), "the run neither ends nor goes on"), (Verdict(wake_at_s=0.0), "the run goes on for ever")],
)
def test_a_run_that_does_not_end_is_a_fault(verdict: Verdict, fault: str) -> None:
    assert run(Asynchronous(lambda view, _: verdict)).faults == [fault]
