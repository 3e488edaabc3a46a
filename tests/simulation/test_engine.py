"""Virtual time, by hand: what takes how long, who is told when, and what goes wrong without ending the run."""

import math
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import FedSyncError, ProtocolError, RunError
from fedsync.core.actions import Commit, Dispatch
from fedsync.core.events import Evaluated, SiloJoined, UpdateArrived, WorkFailed
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.model.layout import Vector
from fedsync.observe.replay import replay
from fedsync.silo.protocol import EvaluateModel
from tests.simulation.fake import FakeWorker, Result, Twist, machines, simulate, spoil, strategy

HETERO = machines(*({"speed": speed} for speed in (300.0, 250.0, 200.0, 150.0, 100.0)))
FIXED = strategy(balancer={"kind": "fixed"})


def batch_sizes(result: Result) -> list[list[int]]:
    """Batch sizes of every entry that dispatches."""
    sizes = [[a.order.batch_size for a in entry.actions if isinstance(a, Dispatch)] for entry in result.entries]
    return [row for row in sizes if row]


def test_fixed_batches_wait_for_the_slowest(tmp_path: Path) -> None:
    """20 x 32 samples at 100/s take 6.4 s; the others 640/300, 640/250, 3.2 and 640/150 s."""
    result = simulate(tmp_path, HETERO, FIXED)
    assert result.round_seconds() == pytest.approx([6.4] * 3, rel=1e-12)
    assert result.at()[:6] == pytest.approx([0, 640 / 300, 2.56, 3.2, 640 / 150, 6.4], rel=1e-12)
    summary = result.ledger.summary()
    assert summary["seconds"] == pytest.approx(19.2)
    # Shares of 6.4 s: 1/3, 0.4, 0.5, 2/3 and 1 of it are spent computing.
    assert summary["utilisation"] == pytest.approx((1 / 3 + 0.4 + 0.5 + 2 / 3 + 1) / 5)
    assert summary["wait_fraction"] == pytest.approx(1 - summary["utilisation"])


def test_the_model_is_what_the_workers_made_of_it(tmp_path: Path) -> None:
    """Everybody adds 1 a round: versions 0, 1, 2 go out and 3 comes back."""
    workers = {silo.name: FakeWorker(silo) for silo in HETERO}
    result = simulate(tmp_path, HETERO, workers=dict(workers))
    assert result.model is not None
    np.testing.assert_allclose(result.model, np.full(3, 3.0), rtol=1e-6)
    for worker in workers.values():
        np.testing.assert_allclose([base[0] for base in worker.bases], [0, 1, 2], rtol=1e-6)


def test_overhead_comes_after_training_and_is_not_speed(tmp_path: Path) -> None:
    """The slow silo's second of overhead delays every round, and does not change its batch."""
    silos = machines({"speed": 300.0}, {"speed": 100.0, "overhead_s": 1.0})
    result = simulate(tmp_path, silos)
    assert batch_sizes(result) == [[32, 32], [48, 16], [48, 16]]
    assert result.round_seconds() == pytest.approx([7.4, 4.2, 4.2], rel=1e-12)
    reports = [event.report for event in result.events(UpdateArrived) if event.meta.silo == "b"]
    assert [dict(report.overhead_s) for report in reports] == [{"order": 1.0}] * 3
    assert [report.compute_s for report in reports] == pytest.approx([6.4, 3.2, 3.2], rel=1e-12)


def test_a_halted_order_arrives_once_and_the_next_one_begins_after_it(tmp_path: Path) -> None:
    """a's first is in at 3.2 + 1 s, and half of all is done: b stops after its 14th step of 0.32 s, at 4.48 s, not 6.4.

    Nothing comes at 7.4 s, when b's whole order would have been in. The second round begins at 5.48 s, and is alike.
    """
    silos = machines({"speed": 200.0, "overhead_s": 1.0}, {"speed": 100.0, "overhead_s": 1.0})
    halting = strategy(barrier={"kind": "a-bsp", "sync_ratio": 0.5}, balancer={"kind": "fixed"}, stop={"rounds": 2})
    arrived = [
        (event.at_s, event.meta.update_id, event.meta.steps)
        for event in simulate(tmp_path, silos, halting).events(UpdateArrived)
    ]
    first = [(pytest.approx(4.2), "a/1", 20), (pytest.approx(5.48), "b/1", 14)]
    assert arrived == [*first, (pytest.approx(9.68), "a/2", 20), (pytest.approx(10.96), "b/2", 14)]


def test_polling_sees_together_what_happened_between(tmp_path: Path) -> None:
    """Ends at 2.13, 2.56, 3.2, 4.27, 6.4 are seen at 3, 3, 4, 5, 7; the next round begins at 7."""
    result = simulate(tmp_path, HETERO, FIXED, poll_s=1.0)
    assert result.at()[:10] == [0, 3, 4, 5, 7, 10, 11, 12, 14, 17]
    assert [len(entry.events) for entry in result.entries[:5]] == [5, 2, 1, 1, 1]
    assert all(event.at_s == entry.at_s for entry in result.entries for event in entry.events)
    first = [event.report.compute_s for event in result.events(UpdateArrived)][:5]
    assert first == pytest.approx([640 / 300, 2.56, 3.2, 640 / 150, 6.4]), "a late look makes nobody slower"


def test_an_end_on_a_tick_is_seen_at_it(tmp_path: Path) -> None:
    result = simulate(tmp_path, machines({"speed": 128.0}), FIXED, poll_s=5.0)  # 20 steps of a quarter of a second
    assert result.at()[:3] == [0, 5, 10]


def test_silos_at_the_same_instant_come_in_one_batch_in_order(tmp_path: Path) -> None:
    result = simulate(tmp_path, machines(*[{"speed": 100.0}] * 3))
    assert [[type(event) for event in entry.events] for entry in result.entries] == [
        [SiloJoined] * 3,
        *[[UpdateArrived] * 3] * 3,
        [Evaluated] * 3,
    ]
    assert [event.meta.silo for event in result.entries[1].events] == ["a", "b", "c"]


@pytest.mark.parametrize(("steps", "windows"), [(1, 1), (64, 64), (65, 64), (1000, 64)])
def test_a_report_has_at_most_64_windows(tmp_path: Path, steps: int, windows: int) -> None:
    config = strategy(local={"steps": steps, "batch_size": 8}, stop={"rounds": 1})
    report = simulate(tmp_path, HETERO[:1], config).events(UpdateArrived)[0].report
    assert len(report.windows) == windows
    assert [window.speed for window in report.windows] == pytest.approx([300.0] * windows)


def test_a_report_of_fewer_steps_counts_the_time_of_those(tmp_path: Path) -> None:
    """5 of 20 steps of 0.32 s; the update still arrives when the whole order would have ended."""
    result = simulate(tmp_path, machines({"speed": 100.0}), FIXED, {"a": spoil(steps=5, samples=160)})
    assert [event.report.compute_s for event in result.events(UpdateArrived)] == pytest.approx([1.6] * 3)
    assert result.ledger.summary()["samples"] == 3 * 160


# Faults.


def raise_error(order: WorkOrder, update: Vector, report: WorkReport) -> tuple[Vector, WorkReport]:
    raise FedSyncError("out of coffee")


def poison(value: float) -> Twist:
    return lambda order, update, report: (np.full_like(update, value), report)


@pytest.mark.parametrize(
    ("twist", "kind", "told"),
    [
        (raise_error, WorkFailed, "out of coffee"),
        (poison(math.nan), WorkFailed, "'finite'"),
        (poison(math.inf), WorkFailed, "'finite'"),
        (poison(3e38), WorkFailed, "'finite'"),
        (lambda order, update, report: (update[:2], report), WorkFailed, "'shape'"),
        (lambda order, update, report: (update.astype(np.float64), report), WorkFailed, "'shape'"),
        (spoil(loss=math.nan), UpdateArrived, "'loss'"),
        (spoil(loss=math.inf), UpdateArrived, "'loss'"),
        (spoil(samples=10**6), UpdateArrived, "'samples'"),
        (spoil(base_version=5), UpdateArrived, "'version'"),
    ],
)
def test_a_fault_costs_one_silo_its_round_and_is_journaled(tmp_path: Path, twist: Twist, kind: type, told: str) -> None:
    def once(order: WorkOrder, update: Vector, report: WorkReport) -> tuple[Vector, WorkReport]:
        return twist(order, update, report) if order.round == 2 else (update, report)

    result = simulate(tmp_path, machines({"speed": 300.0}, {"speed": 100.0}), FIXED, {"b": once})
    assert [dict(commit.weights) for _, commit in result.actions(Commit)] == [
        {"a/1": 0.5, "b/1": 0.5},
        {"a/2": 1.0},
        {"a/3": 0.5, "b/3": 0.5},
    ]
    (line,) = [line for line in result.text.splitlines() if told in line]
    assert f'"type":"{kind.__name__}"' in line
    assert '"update_id":"b/2"' in line
    assert result.ledger.silos["b"].failures == 1
    assert result.round_seconds() == pytest.approx([6.4] * 3)
    assert len(replay(result.out / "journal.jsonl")) == len(result.entries)


def test_a_run_of_failures_only_ends_as_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"every silo failed 3 orders in a row.*out of coffee"):
        simulate(tmp_path, HETERO[:2], FIXED, {"a": raise_error, "b": raise_error})
    assert '"failed":true' in (tmp_path / "journal.jsonl").read_text()
    assert (tmp_path / "summary.json").exists()


def test_a_bug_is_not_taken_for_a_failure_of_the_silo(tmp_path: Path) -> None:
    def bug(order: WorkOrder, update: Vector, report: WorkReport) -> tuple[Vector, WorkReport]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        simulate(tmp_path, HETERO[:2], FIXED, {"a": bug})


def test_a_silo_that_cannot_evaluate_does_not_end_the_run(tmp_path: Path) -> None:
    class Blind(FakeWorker):
        def evaluate(self, received: Vector, asked: EvaluateModel) -> Evaluation:
            if received[0] >= 2.9:
                raise ProtocolError("b", "evaluation", "lost its test data")
            return super().evaluate(received, asked)

    workers = {"a": FakeWorker(HETERO[0]), "b": Blind(HETERO[1])}
    result = simulate(tmp_path, HETERO[:2], workers=dict(workers))
    assert result.ledger.rounds[-1].accuracy == 0.5, "the others' answers count"


def test_seconds_end_a_run_and_its_last_model_is_evaluated(tmp_path: Path) -> None:
    """At 13.1 s the third round is under way: the next update would come at 12.8 + 2.1 s, and nobody waits for it."""
    result = simulate(tmp_path, HETERO, strategy(balancer={"kind": "fixed"}, stop={"seconds": 13.1}))
    assert len(result.ledger.rounds) == 2
    assert result.ledger.rounds[-1].accuracy == 0.5
    summary = result.ledger.summary()
    assert summary["seconds"] == 13.1
    assert [row["wait_s"] for row in summary["silos"]] == pytest.approx(
        [2 * (6.4 - 6.4 * share) for share in (1 / 3, 0.4, 0.5, 2 / 3, 1)]
    ), "what was cut off was work, not waiting"


# Reproducibility.


def test_an_altered_journal_does_not_replay(tmp_path: Path) -> None:
    simulate(tmp_path, HETERO)
    path = tmp_path / "journal.jsonl"
    path.write_text(path.read_text().replace('"batch_size":48', '"batch_size":47', 1))
    with pytest.raises(FedSyncError, match=r"entry \d+ replays differently"):
        replay(path)
