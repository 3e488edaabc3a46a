"""A silo's side in the clear: what an update loses on the wire is in the next one."""

from dataclasses import replace

import numpy as np
import pytest

from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.silo_weight import Weighting
from fedsync.model.layout import Vector
from fedsync.model.plain_replica import LOST, RECEIVED, PlainReplica
from fedsync.model.plain_wire import FP32, Bf16, Fp16, Int8, TopK, Wire, WireFormat

SIZE = 900
LOSSY = [Int8(), TopK(0.05), TopK(0.1, Int8())]


def order(number: int) -> WorkOrder:
    return WorkOrder(f"a/{number}", number - 1, number, 32, 10, 0.1, seed=number)


def report(steps: int = 10, samples: int = 320) -> WorkReport:
    return WorkReport(0, steps, samples, 1.0, 0.5)


def updates(count: int) -> list[Vector]:
    rng = np.random.default_rng(4)
    return [(rng.standard_normal(SIZE) * 0.1).astype(np.float32) for _ in range(count)]


def send(replica: PlainReplica, up: WireFormat, number: int, update: Vector, done: WorkReport) -> Vector:
    """What arrives of an update that the silo then saves as done."""
    payload = replica.send(update.copy(), order(number), done).view(np.uint8)
    replica.owe(replica.owed)
    up.check(payload, SIZE, "a")
    return up.decode(payload, 0, SIZE)


@pytest.mark.parametrize("up", LOSSY, ids=["int8", "top-k", "top-k int8"])
def test_all_that_was_found_in_training_arrives_but_for_what_is_owed(up: WireFormat) -> None:
    replica = PlainReplica(SIZE, Wire(up))
    found = updates(30)
    arrived = [send(replica, up, number, update, report()) for number, update in enumerate(found, 1)]
    assert replica.owed is not None
    np.testing.assert_allclose(np.sum(arrived, axis=0) + replica.owed, np.sum(found, axis=0), atol=1e-5)
    alone = [send(PlainReplica(SIZE, Wire(up)), up, n, update, report()) for n, update in enumerate(found, 1)]
    lost = np.linalg.norm(np.sum(found, axis=0) - np.sum(alone, axis=0))
    assert np.linalg.norm(replica.owed) < 0.5 * lost, "less than what would be lost without it"


@pytest.mark.parametrize("up", [FP32, Bf16(), Fp16()], ids=["fp32", "bf16", "fp16"])
def test_nothing_is_owed_where_the_loss_is_a_share_of_each_value(up: WireFormat) -> None:
    replica = PlainReplica(SIZE, Wire(up))
    update = updates(1)[0]
    np.testing.assert_allclose(send(replica, up, 1, update, report()), update, rtol=2**-8)
    assert replica.owed is None


@pytest.mark.parametrize(
    ("weighting", "done", "next_done"),
    [
        (Weighting(normalised=True), report(steps=40), report(steps=10)),
        (Weighting(by="samples"), report(samples=100), report(samples=400)),
    ],
    ids=["divided by steps", "weighed by samples"],
)
def test_what_is_owed_counts_as_much_in_the_next_commit_as_it_would_have_in_this(
    weighting: Weighting, done: WorkReport, next_done: WorkReport
) -> None:
    """FedNova divides an update by its steps: of one with 40 steps, what is owed is four times as much in one of 10.
    So it is where the next update weighs four times as much."""
    up = TopK(0.01)
    replica = PlainReplica(SIZE, Wire(up), weighting)
    first = updates(1)[0]
    arrived = send(replica, up, 1, first, done)
    second = send(replica, up, 2, np.zeros(SIZE, np.float32), next_done)
    sent = np.flatnonzero(second)
    np.testing.assert_allclose(second[sent], (first - arrived)[sent] / 4, rtol=1e-5)


def test_an_order_that_is_done_again_has_the_same_bytes() -> None:
    """It was never saved: what the silo owed before is what it owes."""
    one, other, third = updates(3)
    replica = PlainReplica(SIZE, Wire(Int8()))
    send(replica, Int8(), 1, one, report())
    replica.send(third.copy(), order(2), report())  # killed before it was saved
    again = replica.send(other.copy(), order(2), report())
    straight = PlainReplica(SIZE, Wire(Int8()))
    send(straight, Int8(), 1, one, report())
    np.testing.assert_array_equal(again, straight.send(other.copy(), order(2), report()))


def test_the_server_is_told_what_was_lost_and_what_came() -> None:
    plain = PlainReplica(SIZE)
    plain.receive(updates(1)[0], 0)
    plain.send(updates(1)[0], order(1), report())
    assert plain.disclosed(report()) == report()
    replica = PlainReplica(SIZE, Wire(TopK(0.5, FP32), Int8()))
    whole = np.concatenate([np.array([-1, 0], np.int64).view(np.uint8), np.zeros(4 * SIZE, np.uint8)])
    replica.receive(whole, 0)
    update = np.zeros(SIZE, np.float32)
    update[: SIZE // 2], update[-1] = 2, 1
    replica.send(update.copy(), order(1), report())
    own = replace(report(), metrics={"own": 3.0})
    told = replica.disclosed(own).metrics
    assert told == {"own": 3.0, RECEIVED: 16 + 4 * SIZE, LOST: pytest.approx(1 / np.sqrt(4 * SIZE / 2 + 1))}
    replica.send(np.zeros(SIZE, np.float32), order(2), report())
    assert replica.disclosed(report()).metrics[LOST] == 0
