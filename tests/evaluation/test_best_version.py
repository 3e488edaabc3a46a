"""Which version is the best, and when it is kept."""

from collections.abc import Mapping

import pytest

from fedsync.common.errors import UserCodeError
from fedsync.core.actions import Commit, Discard, Dispatch, Evaluate, KeepBest, Note
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Evaluated, OperatorAsked, SiloLost
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import DropSilo
from fedsync.core.orders import Evaluation, Score, Split, Subject, WorkOrder
from fedsync.core.stopping import StopRules
from fedsync.evaluation.version_scores import Leader, Numbers, Selection
from fedsync.observe.ledger import Ledger
from fedsync.policies.barrier.kinds.ssp import Asp
from tests.core.make import answer, begin, joined, of_type, orders, policies, scored


def judged(
    rule: Selection, found: Mapping[str, Evaluation], accuracy: float | None, loss: float | None = 1.0
) -> float | None:
    return rule.value(Score(1, accuracy, loss), found, ())


def test_a_version_is_judged_by_all_silos_by_the_worst_or_by_a_rule_of_ones_own() -> None:
    found = {"a": Evaluation(20.0, 9.0, 10), "b": Evaluation(60.0, 3.0, 20)}
    assert judged(Selection(), found, 0.4) == 0.4
    assert judged(Selection("loss", higher=False), found, 0.4) == 1.0
    assert judged(Selection(by="worst"), found, 0.4) == 0.15
    assert judged(Selection("loss", higher=False, by="worst"), found, 0.4) == 3.0
    assert judged(Selection("auroc"), found, 0.4) is None, "nobody measured it"
    without = {name: Evaluation(each.loss, None, each.samples) for name, each in found.items()}
    assert judged(Selection(), without, None) == -1.0, "less loss is better"
    assert judged(Selection(by="worst"), without, None) == -3.0
    assert judged(Selection(), {}, None, None) is None
    assert judged(Selection(by="worst"), {}, 0.4) is None, "single silos are sealed"

    def rule(pooled: Numbers, silos: Mapping[str, Numbers]) -> float:
        return pooled["accuracy"] + silos["a"]["accuracy"] + silos["b"]["loss"]

    assert judged(Selection(by=rule), found, 0.4) == 0.4 + 0.9 + 3.0
    with pytest.raises(UserCodeError, match="it returned nan"):
        judged(Selection(by=lambda pooled, silos: float("nan")), found, 0.4)
    assert judged(Selection(by=lambda pooled, silos: float("-inf")), found, 0.4) is None, "this version is not wanted"


@pytest.mark.parametrize(
    ("higher", "values", "expected"),
    [
        (True, [0.1, 0.5, 0.5, 0.4, 0.6], [(0, 0), (1, 0), (1, 1), (1, 2), (4, 0)]),
        (True, [-500, -70, -90], [(0, 0), (1, 0), (1, 1)]),
        (False, [3.0, 2.0, 2.0, 5.0, 1.0], [(0, 0), (1, 0), (1, 1), (1, 2), (4, 0)]),
    ],
)
def test_of_equals_the_first_stays(higher: bool, values: list[float], expected: list[tuple[int, int]]) -> None:
    leader, history = Leader(), []
    for version, value in enumerate(values):
        leader = leader.after(Selection(higher=higher), Score(version, value, None), {}, ())
        history.append((leader.version, leader.since))
    assert history == expected


def finish(coordinator: Coordinator, entry: JournalEntry, at_s: float, accuracy: float) -> JournalEntry:
    """All silos answer at once, having found this accuracy in the version they started from."""
    return coordinator.handle([answer(n, o, at_s, evaluation=scored(accuracy)) for n, o in orders(entry).items()], at_s)


def test_the_best_is_kept_before_the_next_version_is_made() -> None:
    coordinator = Coordinator(policies())
    entry = coordinator.handle(joined("a", "b"), 0.0)
    entry = finish(coordinator, entry, 1.0, 0.5)
    assert entry.actions[0] == KeepBest(Score(0, 0.5, 2.0), 0.5) and isinstance(entry.actions[1], Commit)
    entry = finish(coordinator, entry, 2.0, 0.4)
    assert not of_type(entry, KeepBest)
    assert finish(coordinator, entry, 3.0, 0.6).actions[0] == KeepBest(Score(2, 0.6, 2.0), 0.6)


def test_a_rule_that_fails_rates_no_version_and_one_note_names_it() -> None:
    def rule(pooled: Numbers, silos: Mapping[str, Numbers]) -> float:
        return pooled["accuracy"] if pooled["accuracy"] > 0.5 else silos["a"]["auroc"]

    made = policies(selection=Selection("mine:rule", by=rule), stop=StopRules(rounds=4))
    coordinator, entries = Coordinator(made), list[JournalEntry]()
    entry = coordinator.handle(joined("a", "b"), 0.0)
    for at_s, accuracy in enumerate([0.4, 0.6, 0.5, 0.7], start=1):
        entry = finish(coordinator, entry, at_s, accuracy)
        entries.append(entry)
    (note,) = [note for each in entries for note in of_type(each, Note)]
    assert note.text.startswith("evaluation.best.by: mine:rule does not rate version 0: KeyError: 'auroc'. Correct")
    kept = [each.score.version for entry in entries for each in of_type(entry, KeepBest)]
    assert kept == [1, 3] and of_type(entries[0], Note) == [note]


def test_the_best_is_kept_before_the_order_that_began_with_it_is_given_up() -> None:
    """b was the last at version 0; what it started from is there until it is discarded."""
    coordinator, first = begin("a", "b", barrier=Asp())
    coordinator.handle([answer("a", first["a"], evaluation=scored(0.7))], 1.0)
    entry = coordinator.handle([SiloLost(2.0, "b", "gone")], 2.0)
    assert [type(action) for action in entry.actions] == [KeepBest, Discard]
    assert of_type(entry, KeepBest)[0].score.version == 0


# The end.


def ended(accuracy: float, *names: str, validating: str = "") -> tuple[Coordinator, JournalEntry]:
    """A run after its one round, whose version 0 had this accuracy."""
    coordinator = Coordinator(policies(stop=StopRules(rounds=1)))
    entry = coordinator.handle([event for name in names for event in joined(name, validates=name in validating)], 0.0)
    return coordinator, finish(coordinator, entry, 1.0, accuracy)


def told(question: Evaluate, accuracy: float) -> list[Evaluated]:
    return [
        Evaluated(2.0, name, question.version, scored(accuracy), (), question.split, question.subject)
        for name in question.silos
    ]


@pytest.mark.parametrize(
    ("last", "questions"),
    [(0.4, [(1, "test", "last"), (0, "test", "best")]), (0.6, [(1, "test", "last")])],
    ids=["the best is an earlier one", "the last is the best"],
)
def test_the_test_split_is_evaluated_once_all_is_decided(last: float, questions: list[tuple[int, str, str]]) -> None:
    coordinator, entry = ended(0.5, "a", "b", validating="b")
    asked = []
    while not coordinator.stopped:
        (question,) = of_type(entry, Evaluate)
        assert question.silos == ("a", "b")
        asked.append((question.version, str(question.split), str(question.subject)))
        # What the test split says is no reason to choose another version.
        entry = coordinator.handle(told(question, last if question.split is Split.VALIDATION else 1.0), 2.0)
    assert asked == [(1, "validation", "last"), *questions]
    assert coordinator._state.best.value == max(0.5, last)


def test_an_answer_to_another_question_does_not_count() -> None:
    coordinator, entry = ended(0.5, "a", validating="a")
    (first,) = of_type(entry, Evaluate)
    entry = coordinator.handle(told(first, 0.4), 2.0)
    assert of_type(entry, Evaluate) == [Evaluate(1, ("a",), Split.TEST)]
    assert coordinator.handle(told(first, 0.9), 3.0).actions == ()
    assert coordinator._state.best.value == 0.5
    entry = coordinator.handle(told(Evaluate(1, ("a",), Split.TEST), 0.9), 4.0)
    assert of_type(entry, Evaluate) == [Evaluate(0, ("a",), Split.TEST, Subject.BEST)]


def test_a_silo_that_is_lost_at_the_end_is_waited_for_by_no_question() -> None:
    coordinator, entry = ended(0.5, "a", "b", validating="ab")
    entry = coordinator.handle(told(of_type(entry, Evaluate)[0], 0.4), 2.0)
    coordinator.handle(told(Evaluate(1, ("a",), Split.TEST), 0.9), 3.0)
    entry = coordinator.handle([SiloLost(3.0, "b", "gone")], 3.0)
    assert of_type(entry, Evaluate) == [Evaluate(0, ("a",), Split.TEST, Subject.BEST)]


# Versions that few silos scored.


def test_a_version_that_only_a_minority_scored_is_not_the_best_and_ends_no_run() -> None:
    """a has easy data. Its 0.99 alone is no better version than the 0.6 of all three, and reaches no target for all."""
    rules = StopRules(rounds=9, target_accuracy=0.95)
    coordinator = Coordinator(policies(stop=rules))
    entry = coordinator.handle(joined("a", "b", "c"), 0.0)
    accuracies = {"a": 0.98, "b": 0.4, "c": 0.42}
    first = [answer(n, o, 1.0, evaluation=scored(accuracies[n])) for n, o in orders(entry).items()]
    work = orders(coordinator.handle(first, 1.0))
    assert coordinator.best == KeepBest(Score(0, 0.6, 2.0), 0.6)
    lost = [SiloLost(2.0, name, "gone") for name in "bc"]
    entry = coordinator.handle([*lost, answer("a", work["a"], 2.0, evaluation=scored(0.99))], 2.0)
    assert coordinator.best == KeepBest(Score(0, 0.6, 2.0), 0.6)
    assert orders(entry).keys() == {"a"}, "the run goes on"
    entry = coordinator.handle([answer("a", orders(entry)["a"], 3.0), *joined("b", at_s=3.0)], 3.0)
    entry = finish(coordinator, entry, 4.0, 0.7)
    assert coordinator.best == KeepBest(Score(3, 0.7, 2.0), 0.7), "two of three are a majority"


def test_a_dropped_silo_need_not_score_a_version() -> None:
    coordinator = Coordinator(policies(stop=StopRules(rounds=9)))
    entry = finish(coordinator, coordinator.handle(joined("a", "b"), 0.0), 1.0, 0.5)
    entry = coordinator.handle([OperatorAsked(1.5, "1", DropSilo("b")), answer("a", orders(entry)["a"], 2.0)], 2.0)
    finish(coordinator, entry, 3.0, 0.6)
    assert coordinator.best == KeepBest(Score(2, 0.6, 2.0), 0.6)


def test_a_fast_silo_alone_chooses_no_version_after_lost_first_orders() -> None:
    coordinator, ledger = Coordinator(policies(barrier=Asp(), stop=StopRules(rounds=9))), Ledger()
    events, work = joined("a", "b", "c"), list[WorkOrder]()
    for at_s in range(5):
        entry = coordinator.handle(events, at_s)
        ledger.add(entry)
        work += [each.order for each in of_type(entry, Dispatch) if each.silo == "a"]
        events = [answer("a", work.pop(0), at_s + 1, evaluation=scored(0.9))]
        if at_s == 0:
            work, events = [], [*(SiloLost(0.5, silo, "restarted") for silo in "abc"), *joined("a", "b", "c")]
    assert ledger.accuracy == 0.9 and ledger.seconds_to(0.9) is None and coordinator.best is None


def test_silos_that_never_evaluate_do_not_keep_a_version_from_being_the_best() -> None:
    """b and c have no validation split, and are at work again when a's second score settles."""
    coordinator, work = begin("a", "b", "c", barrier=Asp(), stop=StopRules(rounds=9))
    again = orders(coordinator.handle([answer("a", work["a"], evaluation=scored(0.5))], 1.0))["a"]
    assert orders(coordinator.handle([answer(name, work[name], 2.0) for name in "bc"], 2.0)).keys() == {"b", "c"}
    coordinator.handle([answer("a", again, 3.0, evaluation=scored(0.7))], 3.0)
    assert coordinator.best == KeepBest(Score(1, 0.7, 2.0), 0.7)
