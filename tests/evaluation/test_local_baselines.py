"""What silos train for themselves when the run is over."""

from typing import Any

import pytest

from fedsync.core.actions import Commit, Discard, Dispatch, Evaluate, HaltEarly, Stop
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Evaluated, Event, SiloJoined, SiloLost, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import SiloFacts, Split, Subject, WorkOrder
from fedsync.core.stopping import StopRules
from fedsync.evaluation.local_baselines import CrossSite
from fedsync.policies.barrier.kinds.ssp import Asp
from tests.core.make import WORK, answer, begin, joined, of_type, orders, policies, scored

BOTH = CrossSite(local=True, fine_tune=6)


def answered(entry: JournalEntry, at_s: float = 1.0) -> list[Event]:
    """All that an entry asks for is done."""
    done: list[Event] = [answer(name, order, at_s) for name, order in orders(entry).items()]
    for asked in of_type(entry, Evaluate):
        done += [
            Evaluated(at_s, name, asked.version, scored(0.5), (), asked.split, asked.subject) for name in asked.silos
        ]
    return done


def closed(names: str = "ab", **changes: Any) -> tuple[Coordinator, JournalEntry]:
    """A run of two rounds after its last, and the entry that first trains something apart."""
    changes = {"stop": StopRules(rounds=2), "cross_site": BOTH, **changes}
    coordinator = Coordinator(policies(**changes))
    entry = coordinator.handle(joined(*names), 0.0)
    while not any(order.apart for order in orders(entry).values()):
        entry = coordinator.handle(answered(entry), 1.0)
    return coordinator, entry


def to_the_end(coordinator: Coordinator, entry: JournalEntry) -> list[JournalEntry]:
    entries = [entry]
    while not coordinator.stopped:
        entries.append(coordinator.handle(answered(entries[-1]), 2.0))
    return entries


def trained(entries: list[JournalEntry], name: str = "a") -> list[WorkOrder]:
    return [orders(entry)[name] for entry in entries if name in orders(entry)]


def test_alone_a_silo_does_the_work_that_it_did_in_the_run_and_nothing_of_it_becomes_a_version() -> None:
    coordinator, entry = closed()
    version, entries = coordinator.version, to_the_end(coordinator, entry)
    todo, best = trained(entries), coordinator._state.best.version
    local = [order for order in todo if order.subject is Subject.LOCAL]
    assert [(order.after, order.base_version) for order in local] == [(0, 0), (1, 0)]
    assert {(order.max_steps, order.batch_size, order.learning_rate) for order in todo if order in local} == {
        (WORK.steps, WORK.batch_size, WORK.learning_rate)
    }
    assert sum(order.planned_samples for order in local) == 2 * WORK.steps * WORK.batch_size
    (tuned,) = [order for order in todo if order.subject is Subject.TUNED]
    assert (tuned.max_steps, tuned.base_version, tuned.after) == (6, best, 0)
    assert not any(order.evaluate for order in todo)
    assert len({order.update_id for order in todo}) == 3 and len({order.seed for order in todo}) == 3
    assert coordinator.version == version and not of_type(entries[-1], Stop)[0].failed
    assert not any(of_type(entry, Commit) or of_type(entry, Discard) for entry in entries)
    # Questions about own models come last, and of those who have one.
    asked = [(each.subject, each.split, each.version) for entry in entries for each in of_type(entry, Evaluate)]
    assert asked == [(Subject.LOCAL, Split.TEST, 0), (Subject.TUNED, Split.TEST, best)]


def test_a_silo_that_did_more_trains_longer() -> None:
    """Asynchronous: a has done three orders when the third commit ends the run, b none that counts."""
    rules = StopRules(rounds=3)
    coordinator, first = begin("a", "b", barrier=Asp(), stop=rules, cross_site=CrossSite(local=True))
    entry = coordinator.handle([answer("a", first["a"])], 1.0)
    for _ in range(2):
        entry = coordinator.handle([answer("a", orders(entry)["a"])], 1.0)
    assert of_type(entry, HaltEarly) == [HaltEarly("b", "b/1")] and not of_type(entry, Evaluate)
    entry = coordinator.handle([answer("b", first["b"], steps=1, samples=WORK.batch_size)], 2.0)
    assert of_type(entry, Discard)[0].update_id == "b/1"
    entries = to_the_end(coordinator, entry)
    assert [len(trained(entries, name)) for name in "ab"] == [3, 1]


def test_the_models_of_the_run_are_tested_though_nobody_validates() -> None:
    coordinator = Coordinator(policies(stop=StopRules(rounds=1), cross_site=CrossSite(local=True)))
    entry = coordinator.handle(joined("a", "b"), 0.0)
    asked: list[Evaluate] = []
    while not coordinator.stopped:
        entry = coordinator.handle(answered(entry), 1.0)
        asked += of_type(entry, Evaluate)
    assert (Subject.LAST, Split.TEST) in [(each.subject, each.split) for each in asked]


@pytest.mark.parametrize(
    "event",
    [WorkFailed(3.0, "b", "", "training diverged"), SiloJoined(3.0, "b", SiloFacts(1000)), None],
    ids=["fails", "joins again", "nonsense"],
)
def test_an_order_that_fails_is_given_three_times(event: Event | None) -> None:
    coordinator, entry = closed(cross_site=CrossSite(local=True))
    last = coordinator.handle([answer("a", orders(entry)["a"])], 2.0)
    last = coordinator.handle([answer("a", orders(last)["a"])], 2.0)
    assert not orders(last), "a has done its part"
    todo, given = orders(entry)["b"], 1
    while not of_type(last, Evaluate):
        match event:
            case WorkFailed():
                happened: Event = WorkFailed(3.0, "b", todo.update_id, event.reason)
            case None:
                happened = answer("b", todo, steps=99)
            case _:
                happened = event
        last = coordinator.handle([happened], 3.0)
        if "b" in orders(last):
            todo, given = orders(last)["b"], given + 1
            assert todo.after == 0
    assert given == 3
    assert of_type(last, Evaluate)[0].silos == ("a",), "b has no model to evaluate"
    last = coordinator.handle(answered(last), 4.0)
    assert not of_type(last, Stop)[0].failed


def test_one_that_failed_or_was_lost_goes_on_where_it_was_if_it_returns_in_time() -> None:
    coordinator, entry = closed(cross_site=CrossSite(local=True))
    again = coordinator.handle([WorkFailed(2.0, "b", orders(entry)["b"].update_id, "out of memory")], 2.0)
    second = coordinator.handle([answer("b", orders(again)["b"])], 2.0)
    coordinator.handle([SiloLost(2.0, "b", "gone")], 2.0)
    back = coordinator.handle(joined("b", at_s=3.0), 3.0)
    assert [orders(each)["b"].after for each in (again, second, back)] == [0, 1, 1]


def test_a_lost_silo_is_not_waited_for() -> None:
    coordinator, entry = closed(cross_site=CrossSite(local=True, rounds=5))
    last = coordinator.handle([SiloLost(2.0, "b", "gone")], 2.0)
    for after in range(5):
        assert not of_type(last, Evaluate) and orders(entry)["a"].after == after, "five orders, as the run says"
        last = entry = coordinator.handle([answer("a", orders(entry)["a"])], 2.0)
    assert of_type(last, Evaluate)[0].silos == ("a",)


def test_where_all_are_lost_the_run_ends() -> None:
    coordinator, _ = closed()
    entry = coordinator.handle([SiloLost(2.0, name, "gone") for name in "ab"], 2.0)
    assert of_type(entry, Stop) and not of_type(entry, Evaluate)


def test_a_server_that_comes_back_goes_on() -> None:
    """From a checkpoint in the middle: silos are lost and joined again, and their orders are given again."""
    coordinator, entry = closed(cross_site=CrossSite(local=True))
    entry = coordinator.handle([answer("a", orders(entry)["a"])], 2.0)
    other = Coordinator(policies(stop=StopRules(rounds=2), cross_site=CrossSite(local=True)))
    other.restore(coordinator.state())
    back = other.handle([*(SiloLost(3.0, name, "restart") for name in "ab"), *joined("a", "b", at_s=3.0)], 3.0)
    assert {name: order.after for name, order in orders(back).items()} == {"a": 1, "b": 0}
    assert len(trained(to_the_end(other, back))) == 1


def test_a_late_joiner_takes_no_part() -> None:
    coordinator, _ = closed(cross_site=CrossSite(local=True))
    assert not of_type(coordinator.handle(joined("c", at_s=2.0), 2.0), Dispatch)
