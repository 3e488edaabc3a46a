"""Overlap, by hand: what is shown to the barrier inside, who gets how many orders, when machines begin them."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic import ValidationError

from fedsync.common.errors import ConfigError
from fedsync.config.compatibility import simulated
from fedsync.core.actions import Discard, Dispatch
from fedsync.core.events import UpdateArrived
from fedsync.core.orders import WorkOrder
from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.wrappers.overlap import Overlap
from tests.policies.barrier.make import commits, meta, silo, view
from tests.simulation.fake import FakeWorker, Result, machines, simulate, strategy

BSP: dict[str, Any] = {"kind": "overlap", "inner": {"kind": "bsp"}}


def queued(base: int = 0, **more: Any) -> SiloView:
    """A silo with an order in work from version ``base``, and another queued from the next."""
    busy = silo(busy=True, base=base, **more)
    return replace(busy, queued=WorkOrder("?/9", base + 1, 9, 8, 4, 0.1, 1, behind="?/1"), queued_s=5.0)


class Witness(Bsp):
    """BSP that keeps what it was shown."""

    seen: ClassVar[list[ClusterView]] = []

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        self.seen.append(view)
        return Bsp.decide(self, state, view)


def decided(seen: ClusterView) -> tuple[ClusterView, Verdict]:
    """What overlap shows BSP, and what it answers."""
    inner = Witness()
    verdict = Overlap(inner, carry=0.25).decide(None, seen)[1]
    return inner.seen.pop(), verdict


def test_idle_silos_get_two_orders_and_one_that_failed_gets_one() -> None:
    _, verdict = decided(view({"a": silo(), "b": silo(failures=1), "c": silo()}))
    assert (verdict.release, verdict.queue, verdict.carry) == (("a", "b", "c"), ("a", "c"), 0.25)


def test_a_silo_is_busy_until_the_oldest_of_its_orders_is_answered() -> None:
    shown, verdict = decided(view({"a": silo(busy=True), "b": queued()}, meta("a")))
    assert [one.busy for one in shown.silos.values()] == [False, True]
    assert (verdict.release, verdict.queue, verdict.commit) == ((), (), ())


def test_a_round_is_committed_when_the_oldest_of_all_are_answered_and_one_order_is_queued() -> None:
    _, verdict = decided(view({"a": silo(busy=True), "b": silo(busy=True)}, meta("b"), meta("a"), version=1))
    assert sorted(verdict.commit) == ["a/1", "b/1"]
    assert (verdict.release, verdict.queue) == ((), ("a", "b"))


def test_what_a_silo_sent_ahead_waits_for_its_round_and_the_silo_with_it() -> None:
    """a has answered both of its orders: the second is for the next round, of which it has no other order."""
    ahead = [meta("a"), meta("a", number=2)]
    shown, verdict = decided(view({"a": silo(), "b": queued()}, *ahead))
    assert list(shown.pending) == ["a/1"]
    assert verdict.commit == verdict.release == verdict.queue == ()
    _, verdict = decided(view({"a": silo(), "b": silo(busy=True)}, *ahead, meta("b")))
    assert sorted(verdict.commit) == ["a/1", "b/1"]
    assert (verdict.release, verdict.queue) == (("a",), ("b",))


def test_a_busy_silo_has_begun_its_round_when_the_queued_order_was_given() -> None:
    """Barriers around BSP strike off who is late by that, and only if the model has moved on since."""
    shown, _ = decided(view({"a": queued(base=3, since_s=1.0), "b": queued()}, version=4))
    order = shown.silos["a"].order
    assert order is not None
    assert (shown.silos["a"].since_s, order.update_id, order.base_version) == (5.0, "?/1", 4)
    assert shown.silos["a"].queued is None


# In virtual time: 20 steps x 32 samples at 100 a second are 6.4 s.


def run(out: Path, *silos: dict[str, Any], barrier: dict[str, Any] = BSP, **more: Any) -> Result:
    config = strategy(barrier=barrier, balancer={"kind": "fixed"}, stop={"rounds": 5}, **more)
    return simulate(out, machines(*silos), config)


SLOW: dict[str, Any] = {"speed": 100.0, "overhead_s": 1.0}
FAST: dict[str, Any] = {"speed": 200.0, "overhead_s": 1.0}


def dispatches(result: Result, name: str) -> list[tuple[float, str, int, str]]:
    """When a silo was given what, from which version, behind which order."""
    given = [(at_s, each.order) for at_s, each in result.actions(Dispatch) if each.silo == name]
    return [(round(at_s, 9), order.update_id, order.base_version, order.behind) for at_s, order in given]


def test_a_machine_trains_all_the_time_and_each_update_is_one_version_old(tmp_path: Path) -> None:
    """The first is there at 6.4 + 1, the others 6.4 s apart: the second of overhead passes beside training."""
    result = run(tmp_path, SLOW)
    assert [at_s for at_s, _ in commits(result)] == pytest.approx([7.4, 13.8, 20.2, 26.6, 33.0])
    assert dispatches(result, "a") == [
        *[(0.0, "a/1", 0, ""), (0.0, "a/2", 0, "a/1")],
        *[(7.4, "a/3", 1, "a/2"), (13.8, "a/4", 2, "a/3"), (20.2, "a/5", 3, "a/4"), (26.6, "a/6", 4, "a/5")],
    ]
    bases = [event.report.base_version for event in result.events(UpdateArrived)][:5]
    assert bases == [0, 0, 1, 2, 3]
    # Of 33 s all but the last second of overhead are training.
    assert result.ledger.summary()["utilisation"] == pytest.approx(32 / 33)
    assert [action.update_id for action in result.entries[-1].actions if isinstance(action, Discard)] == ["a/6"]


def test_where_overhead_is_longer_than_training_two_rounds_take_one_way(tmp_path: Path) -> None:
    """Training c = 6.4 and overhead o = 10: both orders go out at 0 and are in at 16.4 and 22.8. The third goes out at
    16.4 and is in at 32.8; the fourth goes out at 22.8, is trained after the third at 29.2, and is in at 39.2."""
    result = run(tmp_path, {**SLOW, "overhead_s": 10.0})
    assert [at_s for at_s, _ in commits(result)] == pytest.approx([16.4, 22.8, 32.8, 39.2, 49.2])


def test_a_fast_silo_is_two_orders_ahead_and_counts_once_a_round(tmp_path: Path) -> None:
    """b trains in 3.2 s, so its first two are in at 4.2 and 7.4; its third goes out with the first commit, at 7.4."""
    result = run(tmp_path, SLOW, FAST)
    assert commits(result)[:3] == [
        (pytest.approx(7.4), ["a/1", "b/1"]),
        (pytest.approx(13.8), ["a/2", "b/2"]),
        (pytest.approx(20.2), ["a/3", "b/3"]),
    ]
    assert dispatches(result, "b")[:4] == [(0.0, "b/1", 0, ""), (0.0, "b/2", 0, "b/1"), (7.4, "b/3", 1, ""),
                                           (13.8, "b/4", 2, "")]  # fmt: skip


def test_what_an_order_costs_besides_training_is_what_it_costs_in_rounds(tmp_path: Path) -> None:
    """The second of overhead is hidden behind training, so from the second order on nobody sees it."""
    result = run(tmp_path, SLOW)
    shares = [row.silos["a"] for row in result.ledger.rounds]
    assert [share.overhead_s for share in shares] == pytest.approx([1.0, 0, 0, 0, 0], abs=1e-9)
    assert [share.compute_s for share in shares] == pytest.approx([6.4] * 5)


def test_a_halted_order_lets_the_queued_one_begin_sooner(tmp_path: Path) -> None:
    """a's first is in at 4.2, which is half of all: b stops after its 14th step of 0.32 s, at 4.48, not at 6.4.

    It begins its second then, from which its first steps are 32 samples each 0.32 s.
    """
    aggressive = {"kind": "overlap", "inner": {"kind": "a-bsp", "sync_ratio": 0.5}}
    result = run(tmp_path, FAST, SLOW, barrier=aggressive)
    arrived = [(event.at_s, event.meta.update_id, event.meta.steps) for event in result.events(UpdateArrived)][:4]
    assert arrived[:2] == [(pytest.approx(4.2), "a/1", 20), (pytest.approx(5.48), "b/1", 14)]
    assert commits(result)[0] == (pytest.approx(5.48), ["a/1", "b/1"])
    # a's second was begun at 3.2 and is in at 7.4; b's, begun at 4.48, stops after its 10th step, at 7.68.
    assert arrived[2:] == [(pytest.approx(7.4), "a/2", 20), (pytest.approx(8.68), "b/2", 10)]


def test_a_silo_that_is_lost_loses_both_orders_and_begins_with_two_again(tmp_path: Path) -> None:
    result = run(tmp_path, SLOW, {**SLOW, "faults": [{"at_s": 10.0, "down_s": 2.0}]})
    at_10 = next(entry for entry in result.entries if entry.at_s == 10.0)
    gone = [action.update_id for action in at_10.actions if isinstance(action, Discard)]
    assert gone == ["b/2", "b/3"]
    assert [row[1:] for row in dispatches(result, "b") if row[0] == 13.8] == [("b/4", 2, ""), ("b/5", 2, "b/4")]


def test_models_are_those_that_orders_say(tmp_path: Path) -> None:
    """One silo adds 1 an order, so version n is n; orders begin with 0, 0, 1, 2, 3."""
    silos = machines(SLOW)
    worker = FakeWorker(silos[0])
    config = strategy(barrier=BSP, balancer={"kind": "fixed"}, stop={"rounds": 5})
    result = simulate(tmp_path, silos, config, workers={"a": worker})
    np.testing.assert_allclose([base[0] for base in worker.bases[:5]], [0, 0, 1, 2, 3])
    assert result.model is not None
    np.testing.assert_allclose(result.model, 5.0)


@pytest.mark.parametrize(
    ("barrier", "said"),
    [
        ({"kind": "overlap", "inner": {"kind": "asp"}}, "'asp' silos continue one by one"),
        ({"kind": "overlap", "inner": {"kind": "ssp"}}, "'ssp' silos continue one by one"),
        (
            {"kind": "overlap", "inner": {"kind": "fsp", "interval": {"kind": "fixed", "interval_s": 1.0}}},
            "'fsp' silos continue one by one, or orders end at a fixed time",
        ),
        ({"kind": "overlap", "inner": BSP}, "two orders at most"),
        ({"kind": "overlap", "inner": {"kind": "fraction", "share": 0.5, "inner": {"kind": "bsp"}}}, "sit a round out"),
        ({"kind": "fraction", "share": 0.5, "inner": BSP}, "fraction around overlap"),
        ({"kind": "capped", "cap_s": 1.0, "inner": BSP}, "write overlap around capped"),
        ({**BSP, "carry": 1.5}, "less than or equal to 1"),
    ],
)
def test_what_overlap_does_not_go_with(barrier: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        strategy(barrier=barrier)


def test_overlap_does_not_go_with_masks_nor_a_start_further_on_with_a_mixture() -> None:
    with pytest.raises(ValidationError, match="one version old"):
        strategy(barrier=BSP, cipher={"kind": "masked", "inner": {"kind": "bfv"}})
    with pytest.raises(ValidationError, match="carry: 0"):
        strategy(barrier={**BSP, "carry": 0.5}, aggregation={"kind": "fedasync"})
    strategy(barrier=BSP, cipher={"kind": "bfv"})


def test_flowers_simulation_engine_refuses_it() -> None:
    simulated(strategy())
    with pytest.raises(ConfigError, match=r"one message at a time.*--runtime local or --runtime virtual"):
        simulated(strategy(barrier=BSP))
