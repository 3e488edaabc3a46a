"""What an operator may ask of a run, what it is refused, and what becomes of it in a replay and after a restart."""

import pickle

import pytest

from fedsync.core.actions import Commit, Discard, HaltEarly, Note, OperatorAnswered, Stop, WakeAt
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import OperatorAsked, SiloLost, TimerFired, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import (
    ChangeStop,
    ContinueRun,
    DropSilo,
    OperatorQuestion,
    PauseRun,
    ReadmitSilo,
)
from fedsync.core.operator.operator_execution import MOST_ANSWERS
from fedsync.core.orders import Presence
from fedsync.core.stopping import StopRules
from fedsync.policies.barrier.kinds.ssp import Asp
from tests.core.make import answer, begin, joined, of_type, orders


def asked(question: OperatorQuestion, at_s: float = 1.0, request: str = "1") -> OperatorAsked:
    return OperatorAsked(at_s, request, question)


def ask(coordinator: Coordinator, question: OperatorQuestion, at_s: float = 1.0, request: str = "") -> JournalEntry:
    return coordinator.handle([asked(question, at_s, request or f"{at_s:g}")], at_s)


def refused(entry: JournalEntry) -> str:
    """Why; "" where it was done."""
    (told,) = of_type(entry, OperatorAnswered)
    return str(told.refused)


def test_a_paused_run_keeps_what_arrives_and_commits_and_orders_nothing() -> None:
    coordinator, first = begin("a", "b")
    assert refused(ask(coordinator, PauseRun())) == ""
    assert coordinator.paused
    for at_s, name in ((2.0, "a"), (3.0, "b")):
        entry = coordinator.handle([answer(name, first[name], at_s)], at_s)
        assert (entry.actions, entry.reason) == ((), "paused by the operator")
    assert coordinator.handle(joined("c", at_s=4.0), 4.0).actions == ()
    entry = ask(coordinator, ContinueRun(), 5.0)
    assert of_type(entry, Commit) == [Commit(1, {"a/1": 0.5, "b/1": 0.5})], "nothing that came meanwhile is lost"
    assert set(orders(entry)) == {"a", "b", "c"}


def test_a_paused_run_does_not_end_before_it_continues() -> None:
    coordinator, _ = begin("a", stop=StopRules(seconds=10.0))
    ask(coordinator, PauseRun(), 9.0)
    assert coordinator.handle([TimerFired(10.0)], 11.0).actions == ()
    entry = ask(coordinator, ContinueRun(), 12.0)
    assert entry.reason == "10 s are over"


def test_whoever_pauses_a_run_that_is_over_its_time_can_give_it_more() -> None:
    coordinator, _ = begin("a", stop=StopRules(seconds=10.0))
    ask(coordinator, PauseRun(), 9.0)
    assert WakeAt(30.0) not in ask(coordinator, PauseRun(), 11.0).actions
    assert refused(ask(coordinator, ChangeStop(seconds=30.0), 12.0)) == ""
    entry = ask(coordinator, ContinueRun(), 13.0)
    assert not of_type(entry, Stop)
    assert coordinator.handle([TimerFired(30.0)], 30.0).reason == "30 s are over"


def test_a_changed_limit_in_seconds_is_on_the_clock() -> None:
    coordinator, _ = begin("a")
    assert of_type(ask(coordinator, ChangeStop(seconds=20.0)), WakeAt) == [WakeAt(20.0)]


def test_a_dropped_silo_halts_and_its_work_is_discarded_and_the_others_go_on() -> None:
    coordinator, first = begin("a", "b", "c")
    entry = ask(coordinator, DropSilo("c"))
    assert of_type(entry, HaltEarly) == [HaltEarly("c", "c/1")]
    assert of_type(entry, Discard) == [Discard("c/1", "the operator dropped the silo")]
    coordinator.handle([answer("a", first["a"], 2.0)], 2.0)
    entry = coordinator.handle([answer("b", first["b"], 3.0)], 3.0)
    assert of_type(entry, Commit) == [Commit(1, {"a/1": 0.5, "b/1": 0.5})]
    assert set(orders(entry)) == {"a", "b"}
    late = coordinator.handle([answer("c", first["c"], 4.0)], 4.0)
    assert of_type(late, Discard), "what it sends all the same is thrown away"


def test_a_dropped_silo_stays_out_when_it_joins_until_it_is_readmitted() -> None:
    coordinator, first = begin("a", "b")
    ask(coordinator, DropSilo("b"))
    assert coordinator.handle(joined("b", at_s=2.0), 2.0).actions == ()
    ask(coordinator, ReadmitSilo("b"), 3.0)
    entry = coordinator.handle([answer("a", first["a"], 4.0)], 4.0)
    assert orders(entry)["b"].update_id == "b/2", "the names of orders go on"


def test_a_silo_that_is_readmitted_while_it_is_away_joins_when_it_comes() -> None:
    coordinator, first = begin("a", "b")
    ask(coordinator, DropSilo("b"))
    coordinator.handle([SiloLost(2.0, "b", "its node is gone")], 2.0)
    ask(coordinator, ReadmitSilo("b"), 3.0)
    entry = coordinator.handle([answer("a", first["a"], 4.0)], 4.0)
    assert set(orders(entry)) == {"a"}
    coordinator.handle(joined("b", at_s=5.0), 5.0)
    assert set(orders(coordinator.handle([answer("a", orders(entry)["a"], 6.0)], 6.0))) == {"a", "b"}


def without_part_timer() -> Coordinator:
    """b, which said at 1 s that it is there until 10 s and again from 101 s on, was dropped at 2 s."""
    coordinator, _ = begin("a", "b", barrier=Asp(), stop=StopRules())
    coordinator.handle(joined("b", at_s=1.0, presence=Presence(left_s=9.0, back_s=100.0)), 1.0)
    ask(coordinator, DropSilo("b"), 2.0)
    return coordinator


@pytest.mark.parametrize("again", [False, True], ids=["it stays connected", "it joins anew while it is out"])
def test_a_silo_that_is_readmitted_has_the_window_that_it_told_before(again: bool) -> None:
    """Told at 1 s, or at 8 s: there until 10 s, and again at 101 s. At 20 s its window is over."""
    coordinator = without_part_timer()
    if again:
        coordinator.handle([SiloLost(7.0, "b", "its node is gone")], 7.0)
        coordinator.handle(joined("b", at_s=8.0, presence=Presence(left_s=2.0, back_s=93.0)), 8.0)
    entry = ask(coordinator, ReadmitSilo("b"), 20.0)
    assert (orders(entry), of_type(entry, WakeAt)) == ({}, [WakeAt(101.0)])
    assert "b is away for 81 s" in entry.reason
    assert set(orders(coordinator.handle([TimerFired(101.0)], 101.0))) == {"b"}


def test_a_silo_that_is_readmitted_within_its_window_goes_when_that_ends() -> None:
    coordinator = without_part_timer()
    assert set(orders(ask(coordinator, ReadmitSilo("b"), 5.0))) == {"b"}
    assert "b is away for 91 s" in coordinator.handle([TimerFired(10.0)], 10.0).reason


def test_a_silo_that_is_readmitted_after_its_next_window_began_is_asked_and_believed_that_it_is_away() -> None:
    """Nobody knows by then when that one ends."""
    coordinator = without_part_timer()
    work = orders(ask(coordinator, ReadmitSilo("b"), 101.0))
    assert set(work) == {"b"}
    entry = coordinator.handle([WorkFailed(122.0, "b", work["b"].update_id, "AWAY", back_s=79.0)], 122.0)
    assert (orders(entry), of_type(entry, WakeAt)) == ({}, [WakeAt(201.0)])
    assert "b is away for 79 s" in entry.reason
    assert orders(coordinator.handle([TimerFired(200.0)], 200.0)) == {}
    assert set(orders(coordinator.handle([TimerFired(201.0)], 201.0))) == {"b"}, "which is no failure to rest for"


def test_a_silo_that_is_away_can_be_dropped() -> None:
    coordinator, _ = begin("a", "b")
    coordinator.handle([SiloLost(2.0, "b", "its node is gone")], 2.0)
    assert refused(ask(coordinator, DropSilo("b"), 3.0)) == ""
    assert coordinator.handle(joined("b", at_s=4.0), 4.0).actions == ()


def test_the_rounds_of_a_run_can_be_fewer_or_more() -> None:
    coordinator, first = begin("a", stop=StopRules(rounds=3))
    assert of_type(ask(coordinator, ChangeStop(rounds=1)), Note)[0].text.startswith("the operator changed when the run")
    entry = coordinator.handle([answer("a", first["a"], 2.0)], 2.0)
    assert entry.reason.endswith("1 rounds done")
    coordinator, first = begin("a", stop=StopRules(rounds=1))
    notes = [note.text for note in of_type(ask(coordinator, ChangeStop(rounds=2)), Note)]
    assert "owners confirmed 1 rounds" in notes[1]
    assert set(orders(coordinator.handle([answer("a", first["a"], 2.0)], 2.0))) == {"a"}


REFUSED = [
    (ContinueRun(), "the run is not paused"),
    (DropSilo("x"), "no silo is called 'x'; here are a, b, c"),
    (DropSilo("c"), "2 silos would be left, and silos decrypt no sum of fewer than 3 (cipher)"),
    (ReadmitSilo("a"), "'a' was not dropped; no silo is"),
    (ChangeStop(), "no rule is named"),
    (ChangeStop(rounds=10**400), "no run has more than 1000000000000 rounds; write fewer"),
    (ChangeStop(rounds=0), "0 rounds are too few; write 1 or more"),
    (ChangeStop(seconds=0.0), "0 s is no duration; write a number greater than 0"),
    (ChangeStop(seconds=float("inf")), "inf s is no duration; write a number greater than 0"),
    (ChangeStop(target_accuracy=float("nan")), "nan is no accuracy"),
]


@pytest.mark.parametrize(("question", "why"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_is_refused_with_a_reason_and_changes_nothing(question: OperatorQuestion, why: str) -> None:
    coordinator, _ = begin("a", "b", "c", least=3)
    before = pickle.dumps(replace_answers(coordinator))
    assert ask(coordinator, question).actions == (OperatorAnswered("1", why),)
    assert pickle.dumps(replace_answers(coordinator)) == before


def replace_answers(coordinator: Coordinator) -> dict[str, object]:
    """The coordinator's state but for what it has answered."""
    state = dict(coordinator.state())
    steering = {"paused": False, "dropped": {}, "stop": None, **state["extensions"].get("steering", {}), "answered": {}}
    return {**state, "extensions": {**state["extensions"], "steering": steering}}


def test_the_only_silo_cannot_be_dropped_and_nothing_is_done_twice() -> None:
    coordinator, _ = begin("a", "b")
    assert refused(ask(coordinator, PauseRun(), 1.0)) == ""
    assert refused(ask(coordinator, PauseRun(), 2.0)) == "the run is paused already"
    assert refused(ask(coordinator, DropSilo("b"), 3.0)) == ""
    assert refused(ask(coordinator, DropSilo("b"), 4.0)) == "'b' is out already"
    assert "only silo" in refused(ask(coordinator, DropSilo("a"), 5.0))


def test_what_the_driver_finds_wrong_is_refused_and_in_the_journal() -> None:
    coordinator, _ = begin("a")
    entry = coordinator.handle([OperatorAsked(1.0, "1", ChangeStop(target_accuracy=7.0), "7 is not allowed")], 1.0)
    assert entry.actions == (OperatorAnswered("1", "7 is not allowed"),)


def test_nothing_is_changed_any_more_once_training_is_over() -> None:
    coordinator, first = begin("a", stop=StopRules(rounds=1))
    coordinator.handle([answer("a", first["a"])], 1.0)
    for at_s, question in enumerate([PauseRun(), DropSilo("a"), ChangeStop(rounds=9)], start=2):
        assert refused(ask(coordinator, question, float(at_s))).startswith("training is over")


def test_a_question_that_comes_again_is_answered_again_and_not_done_again() -> None:
    coordinator, _ = begin("a", "b")
    assert refused(ask(coordinator, PauseRun(), 1.0, "once")) == ""
    ask(coordinator, ContinueRun(), 2.0)
    again = ask(coordinator, PauseRun(), 3.0, "once")
    assert again.actions == (OperatorAnswered("once", again=True), *again.actions[1:])
    assert not coordinator.paused


def test_answers_that_are_remembered_are_bounded() -> None:
    coordinator, _ = begin("a")
    for number in range(MOST_ANSWERS + 9):
        ask(coordinator, ContinueRun(), request=str(number))
    kept = coordinator.state()["extensions"]["steering"]["answered"]
    assert list(kept) == [str(number) for number in range(9, MOST_ANSWERS + 9)]
