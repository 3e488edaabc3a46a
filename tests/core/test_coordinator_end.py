"""How a run ends: the rule, the final evaluation, and every order and update accounted for."""

import math

import pytest

from fedsync.core.actions import Commit, Discard, Dispatch, Evaluate, Stop, WakeAt
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Evaluated, Event, SiloLost, TimerFired, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import WorkOrder
from fedsync.core.stopping import StopRules
from fedsync.core.views import Verdict
from fedsync.policies.barrier.kinds.ssp import Asp
from tests.core.make import Scripted, answer, begin, but_best, joined, of_type, orders, policies, scored

ONE_ROUND = StopRules(rounds=1)


def dispatching(first: dict[str, WorkOrder]) -> JournalEntry:
    """The first orders as an entry that dispatches them."""
    return JournalEntry(0.0, (), tuple(Dispatch(name, order) for name, order in first.items()), "")


def finish_round(coordinator: Coordinator, entry: JournalEntry, at_s: float, accuracy: float) -> JournalEntry:
    """All silos answer at once, having found this accuracy in the version they started from."""
    answers = [answer(n, o, at_s, evaluation=scored(accuracy)) for n, o in orders(entry).items()]
    return coordinator.handle(answers, at_s)


def test_the_last_commit_is_followed_by_one_evaluation_of_it_and_then_the_stop() -> None:
    coordinator, first = begin("a", "b", stop=ONE_ROUND)
    coordinator.handle([answer("a", first["a"])], 1.0)
    entry = coordinator.handle([answer("b", first["b"])], 2.0)
    assert entry.actions == (Commit(1, {"a/1": 0.5, "b/1": 0.5}), Evaluate(1, ("a", "b")))
    assert not coordinator.stopped
    assert coordinator.handle([Evaluated(3.0, "a", 1, scored(0.5))], 3.0).actions == ()
    entry = coordinator.handle([Evaluated(3.0, "b", 1, scored(0.5))], 3.0)
    assert but_best(entry) == (Stop("1 rounds done", failed=False),)
    assert coordinator.stopped


def test_the_last_commit_has_its_reason_in_the_journal() -> None:
    coordinator, first = begin("a", stop=ONE_ROUND)
    entry = coordinator.handle([answer("a", first["a"])], 1.0)
    assert entry.reason == "all 1 updates are in; 1 rounds done"


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


def test_seconds_end_a_run_although_nothing_happens_then() -> None:
    """The coordinator has itself woken, once."""
    coordinator = Coordinator(policies(stop=StopRules(seconds=5.0)))
    entry = coordinator.handle(joined("a"), 0.0)
    assert WakeAt(5.0) in entry.actions
    assert coordinator.handle([], 1.0).actions == ()
    entry = coordinator.handle([TimerFired(5.0)], 5.0)
    assert Evaluate(0, ("a",)) in entry.actions
    assert entry.reason == "5 s are over"


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


@pytest.mark.parametrize("said", [None, scored(math.nan), scored(0.5, samples=-3)])
def test_an_unusable_evaluation_does_not_hold_up_the_end(said: object) -> None:
    coordinator, first = begin("a", stop=ONE_ROUND)
    coordinator.handle([answer("a", first["a"])], 2.0)
    entry = coordinator.handle([Evaluated(3.0, "a", 1, said)], 3.0)  # type: ignore[arg-type]
    assert but_best(entry) == (Stop("1 rounds done"),)


def test_the_target_stops_the_run_before_the_next_commit() -> None:
    """Version 1 reached it, so version 1 is the model that the user gets."""
    coordinator, first = begin("a", "b", stop=StopRules(rounds=9, target_accuracy=0.8))
    second = finish_round(coordinator, dispatching(first), 1.0, accuracy=0.1)
    assert of_type(second, Commit)
    third = finish_round(coordinator, second, 2.0, accuracy=0.8)
    assert of_type(third, Commit) == []
    assert of_type(third, Evaluate) == [], "version 1 has its score already"
    assert sorted(d.update_id for d in of_type(third, Discard)) == ["a/2", "b/2"]
    assert of_type(third, Stop) == [Stop("target accuracy 0.8 reached: 0.8000")]
    assert coordinator.version == 1


def test_the_target_counts_all_silos_together() -> None:
    """90 of 100 and 0 of 200 correct: 0.3, although one silo alone is above the target."""
    coordinator, first = begin("a", "b", stop=StopRules(rounds=9, target_accuracy=0.5))
    entry = coordinator.handle(
        [
            answer("a", first["a"], evaluation=scored(0.9, samples=100)),
            answer("b", first["b"], evaluation=scored(0.0, samples=200)),
        ],
        1.0,
    )
    assert of_type(entry, Stop) == []
    assert of_type(entry, Commit)


def test_patience_counts_evaluated_versions_without_a_better_accuracy() -> None:
    coordinator, first = begin("a", stop=StopRules(rounds=99, patience=2))
    entry = dispatching(first)
    for at_s, accuracy in enumerate([0.1, 0.5, 0.5, 0.6, 0.6], start=1):  # versions 0..4; the best is version 3's
        entry = finish_round(coordinator, entry, at_s, accuracy)
        assert of_type(entry, Stop) == []
    entry = finish_round(coordinator, entry, 6.0, 0.3)  # version 5: the second without a better one
    assert of_type(entry, Stop) == [Stop("no better accuracy in 2 evaluated versions")]


def test_an_update_that_comes_during_the_final_evaluation_is_discarded() -> None:
    coordinator, first = begin("a", "b", stop=StopRules(seconds=10.0))
    coordinator.handle([answer("a", first["a"], 10.0)], 10.0)
    entry = coordinator.handle([answer("b", first["b"], 11.0)], 11.0)
    assert [d.update_id for d in of_type(entry, Discard)] == ["b/1"]
    assert of_type(entry, Commit) == []


def test_the_first_rule_that_holds_is_the_reason() -> None:
    coordinator, first = begin("a", stop=StopRules(rounds=1, seconds=1.0))
    entry = coordinator.handle([answer("a", first["a"], 5.0)], 5.0)
    assert "1 s are over" in entry.reason
    assert of_type(entry, Commit) == [], "time was over before this update was looked at"


def test_a_silo_with_easy_data_does_not_reach_the_target_for_all() -> None:
    """Where silos go on by themselves: a finds 0.95 in version 1, b had found 0.1 in version 0."""
    coordinator, first = begin("a", "b", barrier=Asp(), stop=StopRules(rounds=9, target_accuracy=0.8))
    entry = coordinator.handle([answer(n, o, evaluation=scored(0.1)) for n, o in first.items()], 1.0)
    for at_s in (2.0, 3.0):
        entry = coordinator.handle([answer("a", orders(entry)["a"], at_s, evaluation=scored(0.95))], at_s)
        assert of_type(entry, Stop) == of_type(entry, Evaluate) == []


def test_the_final_version_is_evaluated_by_all_although_one_has_its_score() -> None:
    coordinator, first = begin("a", "b", barrier=Asp(), stop=StopRules(seconds=3.0))
    entry = coordinator.handle([answer("a", first["a"])], 1.0)
    second = orders(entry)["a"]
    coordinator.handle([WorkFailed(2.0, "b", "b/1", "x")], 2.0)
    entry = coordinator.handle([answer("a", second, 3.0, evaluation=scored(0.5))], 3.0)
    assert of_type(entry, Evaluate) == [Evaluate(1, ("a", "b"))]
