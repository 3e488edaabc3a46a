"""The books of a run, by hand. `tests/laws` checks them against what really happened in random runs."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from fedsync.core.actions import Commit, Evaluate, Rollback, Stop
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Evaluated, Event, SiloLost, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import WorkOrder
from fedsync.core.stopping import StopRules
from fedsync.core.views import Verdict
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import RoundFeed
from fedsync.observe.rounds import SiloShare
from fedsync.policies.barrier.kinds.ssp import Asp
from tests.core.make import Scripted, answer, begin, joined, orders, policies, scored

Batch = tuple[float, list[Event]]


def books(coordinator: Coordinator, batches: Iterable[Batch], *names: str) -> Ledger:
    """The ledger of a run that begins with ``names`` joining at 0 s, as `begin` has it."""
    ledger = Ledger(target_accuracy=0.5, model_bytes=100)
    ledger.add(Coordinator(policies()).handle(joined(*names), 0.0))
    for at_s, events in batches:
        ledger.add(coordinator.handle(events, at_s))
    return ledger


def two_rounds() -> Ledger:
    """a computes 0.32 s an order and has overhead for the rest; b is slower. Two rounds, then the evaluation.

    Round 1: a from 0 to 1 s, b from 0 to 2 s. Round 2: a from 2 to 5, b from 2 to 4 s. Answers at 6 s.
    """
    coordinator, first = begin("a", "b", stop=StopRules(rounds=2))
    batches: list[Batch] = [
        (1.0, [answer("a", first["a"], 1.0, loss=3.0, evaluation=scored(0.1))]),
        (2.0, [answer("b", first["b"], 2.0, loss=1.0, steps=2, samples=16, compute_s=1.5, evaluation=scored(0.3))]),
    ]
    ledger = books(coordinator, [], "a", "b")
    second: dict[str, WorkOrder] = {}
    for at_s, events in batches:
        entry = coordinator.handle(events, at_s)
        second |= orders(entry)
        ledger.add(entry)
    for at_s, events in [
        (4.0, [answer("b", second["b"], 4.0, compute_s=2.0, evaluation=scored(0.6))]),
        (5.0, [answer("a", second["a"], 5.0, evaluation=scored(0.8))]),
        (6.0, [Evaluated(6.0, name, 2, scored(0.9)) for name in "ab"]),
    ]:
        ledger.add(coordinator.handle(events, at_s))
    return ledger


def test_rounds_have_times_losses_and_shares() -> None:
    """The loss of round 1 is the mean over 32 samples at 3 and 16 at 1."""
    first, second = two_rounds().rounds
    assert (first.round, first.at_s, first.seconds) == (1, 2.0, 2.0)
    assert (second.round, second.at_s, second.seconds) == (2, 5.0, 3.0)
    assert first.loss == pytest.approx((32 * 3.0 + 16 * 1.0) / 48)
    assert first.silos["a"] == SiloShare(8, 4, 32, compute_s=0.32, overhead_s=pytest.approx(0.68), wait_s=1.0)
    assert first.silos["b"] == SiloShare(8, 2, 16, compute_s=1.5, overhead_s=0.5, wait_s=0.0)
    assert (first.slowest, second.slowest) == ("b", "a")


def test_a_version_is_scored_by_the_orders_that_start_from_it() -> None:
    """Version 1: 60 and 80 of 100 each; version 2 by the final evaluation; version 0's 0.2 belongs to no round."""
    first, second = two_rounds().rounds
    assert (first.accuracy, first.test_loss) == (pytest.approx(0.7), 2.0)
    assert (second.accuracy, second.test_loss) == (pytest.approx(0.9), 2.0)


def test_other_figures_of_evaluations_stand_with_the_version_pooled_by_test_samples() -> None:
    """Whatever their names: `_s` would be added up among figures of training."""
    coordinator, first = begin("a", "b", stop=StopRules(rounds=1))
    ledger = books(coordinator, [], "a", "b")
    said = {"a": {"eval_auc": (0.9, 30), "eval_s": (1.0, 30)}, "b": {"eval_auc": (0.5, 10), "eval_s": (2.0, 10)}}
    for at_s, events in [
        (1.0, [answer(name, first[name], 1.0, metrics={"kept_count": 1.0}) for name in "ab"]),
        (2.0, [Evaluated(2.0, name, 1, replace(scored(0.9), metrics=said[name])) for name in "ab"]),
    ]:
        ledger.add(coordinator.handle(events, at_s))
    (row,) = ledger.rounds
    assert row.metrics == {"kept_count": 2.0, "eval_auc": pytest.approx(0.8), "eval_s": pytest.approx(1.25)}


def test_the_summary_adds_up() -> None:
    """Training lasts 5 s. a: busy 1 + 3 s; b: 2 + 2 s. The final evaluation counts for nothing."""
    summary = two_rounds().summary()
    assert (summary["rounds"], summary["seconds"], summary["samples"]) == (2, 5.0, 32 + 16 + 32 + 32)
    assert summary["accuracy"] == pytest.approx(0.9)
    assert summary["stopped_by"] == "2 rounds done"
    assert summary["utilisation"] == pytest.approx((0.32 + 1.5 + 2.0 + 0.32) / 10)
    assert summary["wait_fraction"] == pytest.approx((10 - 8) / 10)
    a, b = summary["silos"]
    assert (a["name"], a["orders"], a["failures"], a["steps"], a["samples"]) == ("a", 2, 0, 8, 64)
    assert (a["compute_s"], a["overhead_s"], a["wait_s"]) == pytest.approx((0.64, 3.36, 1.0))
    assert (b["compute_s"], b["overhead_s"], b["wait_s"]) == pytest.approx((3.5, 0.5, 1.0))


def test_bytes_are_counted() -> None:
    """Models of 100 bytes go out with 4 orders and 2 evaluations; 4 updates of 40 come in."""
    ledger = two_rounds()
    assert (ledger.bytes_down, ledger.bytes_up) == (600, 160)


def test_the_target_is_reached_when_the_version_was_made() -> None:
    """Version 1, with 0.7, was made after 2 s, although that was known at 5 s only."""
    ledger = two_rounds()
    assert ledger.seconds_to_target == 2.0
    assert ledger.seconds_to(0.85) == 5.0
    assert ledger.seconds_to(0.95) is None


def test_time_begins_with_the_first_order() -> None:
    coordinator = Coordinator(policies(stop=StopRules(rounds=1)))
    ledger = Ledger()
    ledger.add(coordinator.handle([], 3.0))
    entry = coordinator.handle(joined("a", at_s=10.0), 10.0)
    ledger.add(entry)
    ledger.add(coordinator.handle([answer("a", orders(entry)["a"], 12.0)], 12.0))
    assert ledger.seconds == 2.0
    assert ledger.rounds[0].at_s == 2.0


def test_nothing_is_known_before_the_first_order() -> None:
    summary = Ledger().summary()
    assert (summary["seconds"], summary["rounds"], summary["accuracy"], summary["utilisation"]) == (0.0, 0, None, 0.0)


def test_rounds_are_handed_out_once_scored_or_past_all_scores_or_at_the_end() -> None:
    coordinator, work = begin("a", stop=StopRules(rounds=3))
    ledger = books(coordinator, [], "a")
    handed, feed = list[list[int]](), RoundFeed()
    for number, accuracy in [(1, None), (2, None), (3, 0.5)]:  # version 1 is never scored, version 2 is
        said = None if accuracy is None else scored(accuracy)
        entry = coordinator.handle([answer("a", work["a"], float(number), evaluation=said)], float(number))
        work = orders(entry)
        ledger.add(entry)
        handed.append([row.round for row in feed.closed(ledger)])
    assert handed == [[], [1], [2]]
    ledger.add(coordinator.handle([Evaluated(4.0, "a", 3, None)], 4.0))
    assert [row.round for row in feed.closed(ledger)] == [3]
    assert ledger.rounds[0].accuracy is None


# What went wrong.


def test_failures_are_counted_and_cost_time() -> None:
    """a fails after 1 s and waits 3 s for b; a bad report and a loss count likewise."""
    coordinator, first = begin("a", "b")
    ledger = books(coordinator, [(1.0, [WorkFailed(1.0, "a", "a/1", "disk")])], "a", "b")
    ledger.add(coordinator.handle([answer("b", first["b"], 4.0, loss=math.nan)], 4.0))
    assert [(silo.failures, silo.orders, silo.busy_s) for silo in ledger.silos.values()] == [(1, 0, 1.0), (1, 0, 4.0)]
    ledger.add(coordinator.handle([SiloLost(6.0, "a", "gone")], 6.0))
    assert (ledger.silos["a"].failures, ledger.silos["a"].busy_s) == (2, 3.0)
    assert ledger.summary()["samples"] == 0


def test_old_news_of_a_failure_does_not_end_the_order_in_work() -> None:
    coordinator, first = begin("a")
    ledger = books(coordinator, [(1.0, [WorkFailed(1.0, "a", "a/0", "old news")])], "a")
    ledger.add(coordinator.handle([answer("a", first["a"], 2.0)], 2.0))
    assert (len(ledger.rounds), ledger.silos["a"].failures, ledger.silos["a"].orders) == (1, 0, 1)


def test_a_duplicate_is_counted_once() -> None:
    coordinator, first = begin("a", "b")
    twice = answer("a", first["a"], 1.0)
    ledger = books(coordinator, [(1.0, [twice, twice]), (2.0, [twice])], "a", "b")
    assert (ledger.silos["a"].samples, ledger.silos["a"].orders, ledger.silos["a"].failures) == (32, 1, 0)
    assert ledger.bytes_up == 120, "but it was sent three times"


FINAL = Evaluated(3.0, "a", 1, scored(0.5))


@pytest.mark.parametrize(
    "noise",
    [
        Evaluated(3.0, "a", 0, scored(0.0)),
        Evaluated(3.0, "ghost", 1, scored(0.0)),
        Evaluated(3.0, "b", 1, scored(math.nan)),
        Evaluated(3.0, "b", 7, scored(0.0)),
        SiloLost(3.0, "b", "gone"),
        SiloLost(3.0, "ghost", "gone"),
        *joined("b", at_s=3.0),
    ],
)
def test_the_final_score_counts_the_answers_that_the_coordinator_counted(noise: Event) -> None:
    coordinator, first = begin("a", "b", stop=StopRules(rounds=1))
    ledger = books(coordinator, [(2.0, [answer(name, order, 2.0) for name, order in first.items()])], "a", "b")
    ledger.add(coordinator.handle([noise, FINAL, FINAL], 3.0))
    ledger.add(coordinator.handle([Evaluated(4.0, "b", 1, None)], 4.0))
    assert ledger.stopped is not None
    assert ledger.rounds[0].accuracy == 0.5


def test_an_evaluation_out_of_the_blue_is_no_reason_to_fall_over() -> None:
    coordinator, _ = begin("a", "b")
    ledger = books(coordinator, [(1.0, [Evaluated(1.0, "a", 0, scored(0.5))])], "a", "b")
    assert ledger.accuracy is None


def test_work_cut_off_by_the_end_is_no_failure_and_no_waiting() -> None:
    """The run is over at 3 s, while b has been at work since 0 s."""
    coordinator, first = begin("a", "b", stop=StopRules(seconds=3.0))
    ledger = books(coordinator, [(3.0, [answer("a", first["a"], 3.0)])], "a", "b")
    ledger.add(coordinator.handle([Evaluated(4.0, name, 0, scored(0.5)) for name in "ab"], 4.0))
    assert ledger.stopped is not None
    rows = {row["name"]: row for row in ledger.summary()["silos"]}
    assert [(rows[name]["failures"], rows[name]["wait_s"]) for name in "ab"] == [(0, 0.0), (0, 0.0)]


def test_an_update_that_meets_the_end_is_no_failure() -> None:
    """Version 1 reaches the target: what was trained from it is thrown away, but it was trained."""
    coordinator, work = begin("a", stop=StopRules(rounds=9, target_accuracy=0.5))
    entry = coordinator.handle([answer("a", work["a"], 1.0, evaluation=scored(0.1))], 1.0)
    ledger = books(coordinator, [], "a")
    ledger.add(entry)
    ledger.add(coordinator.handle([answer("a", orders(entry)["a"], 2.0, evaluation=scored(0.6))], 2.0))
    assert ledger.stopped is not None
    row = ledger.summary()["silos"][0]
    assert (row["orders"], row["failures"], row["samples"]) == (2, 0, 64)
    assert ledger.accuracy == pytest.approx(0.6)


def test_a_score_that_comes_late_is_not_its_versions() -> None:
    """c alone starts from its version, and is slow. It is pooled with what others have found in later ones by then."""
    coordinator, work = begin("a", "b", "c", barrier=Asp(), stop=StopRules(rounds=99))
    ledger = books(coordinator, [], "a", "b", "c")
    entry = coordinator.handle([answer("a", work["a"], 1.0, evaluation=scored(0.1))], 1.0)
    ledger.add(entry)
    entry_c = coordinator.handle([answer("c", work["c"], 1.5, evaluation=scored(0.1))], 1.5)
    ledger.add(entry_c)
    version_c = orders(entry_c)["c"].base_version
    latest = {"a": orders(entry)["a"], "b": work["b"]}
    for number in range(2, 8):
        for name in "ab":
            said = scored(0.1 if number == 2 else 0.9)
            entry = coordinator.handle([answer(name, latest[name], number, evaluation=said)], number)
            ledger.add(entry)
            latest[name] = orders(entry)[name]
    ledger.add(coordinator.handle([answer("c", orders(entry_c)["c"], 9.0, evaluation=scored(0.3))], 9.0))
    assert ledger.rounds[version_c - 1].accuracy is None
    first = next(row for row in ledger.rounds if row.accuracy is not None and row.accuracy >= 0.5)
    assert ledger.seconds_to_target == first.at_s and first.round > version_c


def test_of_an_update_that_a_barrier_drops_nothing_is_kept() -> None:
    barrier = Scripted(
        [lambda view: Verdict(release=view.idle), lambda view: Verdict(discard=tuple(view.pending), reason="late")]
    )
    coordinator, work = begin("a", barrier=barrier)
    ledger = books(coordinator, [(1.0, [answer("a", work["a"])])], "a")
    assert ledger.summary()["samples"] == 32, "it was trained"
    assert ledger._arrived == {}


def test_a_rollback_makes_a_version_without_a_round() -> None:
    """Versions 1, 2 (the rollback), 3: two rounds, and version 3's score goes to its own row."""
    coordinator, first = begin("a")
    ledger = books(coordinator, [], "a")
    entry = coordinator.handle([answer("a", first["a"], 1.0)], 1.0)
    ledger.add(entry)
    order = orders(entry)["a"]
    news = (answer("a", order, 2.0),)
    ledger.add(JournalEntry(2.0, news, (Rollback(2), Commit(3, {"a/2": 1.0}), Evaluate(3, ("a",))), ""))
    ledger.add(JournalEntry(3.0, (Evaluated(3.0, "a", 3, scored(0.25)),), (Stop("done"),), ""))
    assert [(row.round, row.accuracy) for row in ledger.rounds] == [(1, None), (3, 0.25)]


def test_a_run_that_ends_with_a_rollback_has_the_score_of_the_version_that_it_made() -> None:
    """Version 2 is the rollback's and has no row; the summary is about the model that the run ends with."""
    coordinator, first = begin("a")
    ledger = books(coordinator, [(1.0, [answer("a", first["a"], 1.0)])], "a")
    ledger.add(JournalEntry(2.0, (), (Rollback(2), Evaluate(2, ("a",))), ""))
    ledger.add(JournalEntry(3.0, (Evaluated(3.0, "a", 2, scored(0.25)),), (Stop("done"),), ""))
    assert [row.round for row in ledger.rounds] == [1]
    summary = ledger.summary()
    assert (summary["accuracy"], summary["loss"]) == (0.25, 2.0)


def test_orders_in_work_count_as_busy_so_far() -> None:
    coordinator, _ = begin("a", "b")
    ledger = books(coordinator, [(2.5, [])], "a", "b")
    assert [row["wait_s"] for row in ledger.summary()["silos"]] == [0.0, 0.0]


def test_a_note_counts_the_versions_that_few_silos_scored() -> None:
    """b is lost in round 2; then a alone scores version 1 and, at the end, version 2."""
    coordinator, first = begin("a", "b", stop=StopRules(rounds=2))
    ledger = books(coordinator, [], "a", "b")
    entry = coordinator.handle([answer(n, o, 1.0, evaluation=scored(0.5)) for n, o in first.items()], 1.0)
    ledger.add(entry)
    ledger.add(coordinator.handle([SiloLost(2.0, "b", "gone")], 2.0))
    ledger.add(coordinator.handle([answer("a", orders(entry)["a"], 3.0, evaluation=scored(0.9))], 3.0))
    ledger.add(coordinator.handle([Evaluated(4.0, "a", 2, scored(0.9))], 4.0))
    assert ledger.summary()["best"]["version"] == 0
    assert ledger.seconds_to(0.9) is None, "no target counts these versions"
    assert "2 versions cannot be the best: half of the silos or fewer scored them" in ledger.summary()["notes"]
