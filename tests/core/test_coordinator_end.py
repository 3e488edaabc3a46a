"""How a run ends: the rule, the final evaluation, and every order and update accounted for."""

import math

import pytest

from fedsync.core.actions import Commit, Evaluate, Stop, WakeAt
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Evaluated, Event, SiloLost, TimerFired
from fedsync.core.stopping import StopRules
from fedsync.core.views import Verdict
from tests.core.make import Scripted, answer, begin, but_best, joined, of_type, orders, policies, scored

ONE_ROUND = StopRules(rounds=1)


@pytest.mark.parametrize("said", [None, scored(math.nan), scored(0.5, samples=-3)])
def test_an_unusable_evaluation_does_not_hold_up_the_end(said: object) -> None:
    coordinator, first = begin("a", stop=ONE_ROUND)
    coordinator.handle([answer("a", first["a"])], 2.0)
    entry = coordinator.handle([Evaluated(3.0, "a", 1, said)], 3.0)  # type: ignore[arg-type]
    assert but_best(entry) == (Stop("1 rounds done"),)


def test_going_back_to_an_earlier_model_is_no_round() -> None:
    """Or a run could end with the model that it was sent back to, all training since then for nothing."""
    barrier = Scripted(
        [
            lambda view: Verdict(savepoint=True, release=view.idle),
            lambda view: Verdict(commit=tuple(view.pending)),
            lambda view: Verdict(rollback=True, release=view.idle),
            lambda view: Verdict(commit=tuple(view.pending)),
        ]
    )
    coordinator, first = begin("a", barrier=barrier, stop=StopRules(rounds=2))
    entry = coordinator.handle([answer("a", first["a"])], 1.0)
    assert coordinator.version == 2 and of_type(entry, Evaluate) == []
    entry = coordinator.handle([answer("a", orders(entry)["a"], 2.0)], 2.0)
    assert of_type(entry, Commit) == [Commit(3, {"a/2": 1.0})]
    assert of_type(entry, Evaluate) == [Evaluate(3, ("a",))]


@pytest.mark.parametrize(
    "noise",
    [
        Evaluated(3.0, "a", 0, scored(0.5)),  # another version
        Evaluated(3.0, "ghost", 1, scored(0.5)),
        TimerFired(3.0),
        *joined("new", at_s=3.0),
        SiloLost(3.0, "ghost", "never there"),
    ],
)
def test_the_final_evaluation_waits_for_its_silos_and_no_others(noise: Event) -> None:
    coordinator, first = begin("a", stop=ONE_ROUND)
    coordinator.handle([answer("a", first["a"])], 2.0)
    assert coordinator.handle([noise], 3.0).actions == ()
    entry = coordinator.handle([Evaluated(4.0, "a", 1, scored(0.5))], 4.0)
    assert but_best(entry) == (Stop("1 rounds done"),)


def test_the_wait_for_silos_before_the_first_order_is_no_time_of_the_run() -> None:
    coordinator = Coordinator(policies(stop=StopRules(seconds=10.0)))
    coordinator.handle([TimerFired(30.0)], 30.0)
    entry = coordinator.handle(joined("a", at_s=40.0), 40.0)
    assert of_type(entry, WakeAt) == [WakeAt(50.0)] and "a" in orders(entry)
    entry = coordinator.handle([answer("a", orders(entry)["a"], 49.0)], 49.0)
    assert of_type(entry, Commit) and not of_type(entry, Evaluate)
    assert coordinator.handle([TimerFired(50.0)], 50.0).reason == "10 s are over"


def test_the_first_rule_that_holds_is_the_reason() -> None:
    coordinator, first = begin("a", stop=StopRules(rounds=1, seconds=1.0))
    entry = coordinator.handle([answer("a", first["a"], 5.0)], 5.0)
    assert "1 s are over" in entry.reason
    assert of_type(entry, Commit) == [], "time was over before this update was looked at"
