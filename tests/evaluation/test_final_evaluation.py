"""The end of a run whose figures are sealed: one more version scores the last, and changes nothing."""

from typing import Any

import pytest

from fedsync.core.actions import Commit, Discard, Dispatch, Evaluate, HaltEarly, OperatorAnswered, Stop
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Evaluated, Event, OperatorAsked, SiloJoined, SiloLost, TimerFired, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import PauseRun
from fedsync.core.orders import PooledFigures, Score, SiloFacts, WorkOrder
from fedsync.core.stopping import StopRules
from fedsync.policies.barrier.kinds.ssp import Asp
from tests.core.make import answer, begin, joined, of_type, orders, policies

ONE_ROUND = StopRules(rounds=1)


def ended(names: str = "ab", stop: StopRules = ONE_ROUND, tally: int = 9) -> tuple[Coordinator, dict[str, WorkOrder]]:
    """A run after its one round, and the orders that score it."""
    coordinator, first = begin(*names, stop=stop, tally=tally)
    entry = coordinator.handle([answer(name, order, loss=None) for name, order in first.items()], 1.0)
    assert of_type(entry, Commit) and not of_type(entry, Evaluate)
    return coordinator, orders(entry)


def told(*names: str, accuracy: float = 0.5, version: int = 2) -> list[Event]:
    """What silos answer when they are sent the sum with the scores."""
    found = PooledFigures(version, 1.0, Score(version - 1, accuracy, 1.0))
    return [Evaluated(3.0, name, version, None, (found,)) for name in names]


def test_the_last_version_is_scored_by_one_that_changes_nothing() -> None:
    coordinator, last = ended()
    assert {name: (order.learning_rate, order.base_version, order.evaluate) for name, order in last.items()} == {
        "a": (0.0, 1, True),
        "b": (0.0, 1, True),
    }
    assert coordinator.handle([answer("a", last["a"], 2.0, loss=None)], 2.0).actions == ()
    entry = coordinator.handle([answer("b", last["b"], 2.0, loss=None)], 2.0)
    assert entry.actions == (Commit(2, {"a/2": 0.5, "b/2": 0.5}), Evaluate(2, ("a", "b")))
    assert not coordinator.stopped
    coordinator.handle(told("a", "b"), 3.0)
    assert coordinator.stopped and coordinator._state.scores.best == 0.5
    assert coordinator._state.commits == 1, "rounds of training"


@pytest.mark.parametrize(
    "event",
    [SiloLost(2.0, "b", "gone"), WorkFailed(2.0, "b", "b/2", "broken"), SiloJoined(2.0, "b", SiloFacts(1000)), None],
    ids=lambda event: type(event).__name__,
)
def test_a_silo_that_cannot_score_is_not_waited_for(event: Event | None) -> None:
    """None: its report is nonsense."""
    coordinator, last = ended("abc")
    happened = answer("b", last["b"], loss=None, steps=99) if event is None else event
    coordinator.handle([answer("a", last["a"], loss=None), happened], 2.0)
    entry = coordinator.handle([answer("c", last["c"], loss=None)], 2.0)
    assert of_type(entry, Commit)[0].weights.keys() == {"a/2", "c/2"}
    assert not of_type(entry, Dispatch)


def test_where_all_are_lost_the_run_ends() -> None:
    coordinator, _ = ended()
    entry = coordinator.handle([SiloLost(2.0, name, "gone") for name in "ab"], 2.0)
    assert of_type(entry, Stop) and not of_type(entry, Commit)


def test_a_server_that_comes_back_amid_the_scores_orders_all_of_them_again() -> None:
    """As from a checkpoint that an operator's request caused. Orders have their old ids, so silos score again."""
    coordinator, last = ended()
    other = Coordinator(policies(stop=ONE_ROUND, tally=9))
    coordinator.handle([answer("a", last["a"], loss=None), OperatorAsked(2.0, "1", PauseRun())], 2.0)
    other.restore(coordinator.state())
    entry = other.handle([*(SiloLost(2.0, name, "restart") for name in "ab"), *joined("a", "b")], 3.0)
    assert {each.update_id for each in of_type(entry, Discard)} == {"a/2", "b/2"} and not of_type(entry, Commit)
    assert {order.update_id for order in orders(entry).values()} == {"a/2", "b/2"}
    again = [answer(name, order, loss=None) for name, order in orders(entry).items()]
    entry = other.handle([*again, OperatorAsked(4.0, "1", PauseRun())], 4.0)
    assert of_type(entry, Commit)[0].weights.keys() == {"a/2", "b/2"}
    assert [each.again for each in of_type(entry, OperatorAnswered)] == [True]


def test_silos_at_work_are_halted_and_then_score() -> None:
    coordinator, first = begin("a", "b", barrier=Asp(), stop=ONE_ROUND, tally=9)
    entry = coordinator.handle([answer("a", first["a"], loss=None)], 1.0)
    assert of_type(entry, HaltEarly) == [HaltEarly("b", "b/1")] and orders(entry).keys() == {"a"}
    later = coordinator.handle([answer("a", orders(entry)["a"], loss=None), answer("b", first["b"], loss=None)], 2.0)
    assert of_type(later, Discard)[0].update_id == "b/1" and orders(later).keys() == {"b"}
    end = coordinator.handle([answer("b", orders(later)["b"], loss=None)], 3.0)
    assert of_type(end, Commit)[0].weights.keys() == {"a/2", "b/2"}


def test_no_more_score_than_one_sum_takes() -> None:
    assert ended("abcde", tally=3)[1].keys() == {"a", "b", "c"}


def finish(coordinator: Coordinator, entry: JournalEntry, at_s: float, **told_by_a: Any) -> JournalEntry:
    """All of a round answer, ``a`` first."""
    todo = orders(entry)
    first = coordinator.handle([answer("a", todo.pop("a"), at_s, loss=None, **told_by_a)], at_s)
    assert first.actions == () or not (of_type(first, Commit) or of_type(first, Evaluate))
    return coordinator.handle([answer(name, order, at_s, loss=None, **told_by_a) for name, order in todo.items()], at_s)


def test_a_target_ends_the_run_with_the_commit_that_follows() -> None:
    """When silos tell a score they have evaluated the next version for their updates, and evaluate none twice."""
    coordinator = Coordinator(policies(stop=StopRules(rounds=9, target_accuracy=0.4), tally=9))
    entry = finish(coordinator, coordinator.handle(joined("a", "b", "c"), 0.0), 1.0)
    found = (PooledFigures(1, 1.0, Score(0, 0.5, 1.0)),)
    entry = finish(coordinator, entry, 2.0, pooled=found)
    assert of_type(entry, Commit)[0].version == 2 and not of_type(entry, Evaluate)
    assert all(order.scores_only and order.base_version == 2 for order in orders(entry).values())


@pytest.mark.parametrize("sealed", [True, False])
def test_where_nothing_is_sealed_or_time_is_up_nothing_is_trained_to_score_it(sealed: bool) -> None:
    coordinator, first = begin("a", "b", stop=StopRules(rounds=1, seconds=5.0), tally=9 if sealed else 0)
    happened = [TimerFired(5.0)] if sealed else [answer(name, order) for name, order in first.items()]
    entry = coordinator.handle(happened, 5.0 if sealed else 1.0)
    assert of_type(entry, Evaluate) and not of_type(entry, Dispatch)
