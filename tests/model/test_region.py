"""A relay in the clear: the server moves its model by a region's mean as by the region's updates."""

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.core.actions import Commit
from fedsync.core.orders import WorkReport
from fedsync.core.silo_weight import Weighting
from fedsync.extras.relays.plain_region import PlainRegion
from fedsync.extras.relays.region_sums import share_of
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.plain_wire import Bf16, Wire
from fedsync.model.server_optimizer import HeavyBall, ServerOptimizer
from tests.model.stores import vector

UPDATES = {"a/1": [4.0, 8.0], "b/1": [-8.0, 4.0], "c/1": [2.0, 0.0], "d/1": [16.0, 32.0]}
SHARES = {"a/1": 1.0, "b/1": 3.0, "c/1": 2.0, "d/1": 2.0}
WEIGHTS = {update_id: share / 8 for update_id, share in SHARES.items()}


def store(wire: Wire | None = None, optimizer: ServerOptimizer | None = None) -> PlainAggregator:
    found = PlainAggregator(vector(1, 2), wire=wire, optimizer=optimizer)
    for update_id in UPDATES:
        found.begin(update_id)
    return found


def region(*update_ids: str, wire: Wire | None = None) -> PlainRegion:
    wire = wire or Wire()
    found = PlainRegion(2, wire.up)
    for update_id in update_ids:
        payload = wire.up.encode(vector(*UPDATES[update_id]))
        found.put(update_id[0], update_id, 0, SHARES[update_id], payload.view(np.uint8))
    return found


def deliver(to: PlainAggregator, *update_ids: str, wire: Wire | None = None) -> None:
    for each in region(*update_ids, wire=wire).sums(update_ids):
        if len(each.update_ids) == 1:
            to.put("silo", each.update_ids[0], each.payload)
        else:
            assert each.payload.nbytes == to.sum_bytes(len(each.update_ids))
            to.put_sum("relay", each.update_ids, each.payload)


@pytest.mark.parametrize("wire", [Wire(), Wire(up=Bf16())])
@pytest.mark.parametrize("optimizer", [None, HeavyBall(0.5, 0.5)])
def test_means_of_regions_move_the_model_as_their_updates_do(wire: Wire, optimizer: ServerOptimizer | None) -> None:
    """(4 - 24 + 4 + 32) / 8 = 2 and (8 + 12 + 0 + 64) / 8 = 10.5; all numbers are exact in both formats."""
    found, alone = store(wire, optimizer), store(wire, optimizer)
    deliver(found, "a/1", "b/1", wire=wire)
    deliver(found, "c/1", wire=wire)
    deliver(found, "d/1", wire=wire)
    for update_id, values in UPDATES.items():
        alone.put("silo", update_id, wire.up.encode(vector(*values)))
    for each in (found, alone):
        each.commit(Commit(1, WEIGHTS))
    np.testing.assert_array_equal(found.model, alone.model)
    if optimizer is None:
        np.testing.assert_array_equal(found.model, vector(3, 12.5))
    assert found.pending == ()


def test_a_model_moves_towards_a_region_as_towards_its_silos() -> None:
    """1 + 0.125 (1 + 4 - 1) + 0.375 (1 - 8 - 1) = -1.5, 2 + 0.125 x 8 + 0.375 x 4 = 4.5."""
    found = store()
    deliver(found, "a/1", "b/1")
    found.commit(Commit(1, {"a/1": 0.125, "b/1": 0.375}, toward=True))
    np.testing.assert_array_equal(found.model, vector(-1.5, 4.5))


def test_a_sum_in_the_clear_counts_whole_or_not_at_all(caplog: pytest.LogCaptureFixture) -> None:
    """Without it c and d make up the weight: (2 + 16) / 2 = 9, (0 + 32) / 2 = 16."""
    for lost in ("discarded", "left out"):
        found = store()
        deliver(found, "a/1", "b/1")
        deliver(found, "c/1", "d/1")
        weights = {"b/1": 0.2, "c/1": 0.4, "d/1": 0.4}
        if lost == "discarded":
            found.discard("a/1")
        found.commit(Commit(1, weights))
        np.testing.assert_allclose(found.model, vector(1 + 9, 2 + 16), rtol=1e-6)
        found.discard("a/1")
        assert found.pending == ()
    assert "b/1 is in a region's sum with one that does not count" in caplog.text


def test_a_server_that_comes_back_has_the_sums() -> None:
    before, found = store(), PlainAggregator(vector(0, 0))
    deliver(before, "a/1", "b/1")
    found.restore(before.state())
    assert found.pending == ("a/1", "b/1")
    found.commit(Commit(1, {"a/1": 0.25, "b/1": 0.75}))
    np.testing.assert_array_equal(found.model, vector(1 - 5, 2 + 5))


def test_what_is_no_sum_is_refused() -> None:
    found = store()
    mean = region("a/1", "b/1").sums(["a/1", "b/1"])[0].payload
    for ids, payload, check in (
        (("a/1", "z/1"), mean, "version"),
        (("z/1", "y/1"), mean, "was not ordered"),
        (("a/1", "a/1"), mean, "twice"),
        (("a/1", "b/1"), mean[:1], "shape"),
        (("a/1", "b/1"), vector(np.nan, 1), "finite"),
        (("a/1", "b/1"), vector(1e31, 1), "finite"),
    ):
        with pytest.raises(ProtocolError, match=check):
            found.put_sum("relay", ids, payload)
    found.put_sum("relay", ("a/1", "b/1"), mean)
    for ids in (("a/1", "c/1"), ("c/1", "b/1")):
        with pytest.raises(ProtocolError, match="is here already"):
            found.put_sum("relay", ids, mean)
    with pytest.raises(ProtocolError, match="is here already"):
        found.put("a", "a/1", vector(1, 2))


def test_updates_that_began_with_different_versions_are_in_different_sums() -> None:
    found = store()
    found.put("d", "d/1", vector(0, 0))
    found.commit(Commit(1, {"d/1": 1.0}))
    found.begin("a/2")
    mean = region("a/1", "b/1").sums(["a/1", "b/1"])[0].payload
    with pytest.raises(ProtocolError, match="different versions"):
        found.put_sum("relay", ("a/2", "b/1"), mean)
    mixed = region("b/1")
    mixed.put("a", "a/2", 1, 1.0, vector(1, 1))
    assert [each.update_ids for each in mixed.sums(["a/2", "b/1"])] == [("b/1",), ("a/2",)]


def test_a_relay_in_the_clear_refuses_what_the_server_would() -> None:
    one = region("a/1")
    bad = (("b/1", vector(1), "shape"), ("b/1", vector(np.inf, 0), "finite"), ("a/1", vector(1, 2), "is here already"))
    for update_id, payload, check in bad:
        with pytest.raises(ProtocolError, match=check):
            one.put("a", update_id, 0, 1.0, payload)
    one.discard("a/1")
    one.put("a", "a/1", 0, 1.0, vector(1, 2))


def test_a_share_is_what_a_commit_weighs_by() -> None:
    """By 30 examples, divided by tau = 5 steps where updates are normalised."""
    report = WorkReport(0, 5, 40, 1.0, 1.0)
    assert share_of(Weighting("examples"), 30, report) == 30
    assert share_of(Weighting("samples"), 30, report) == 40
    assert share_of(Weighting("examples", normalised=True), 30, report) == 6
