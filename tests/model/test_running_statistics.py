"""Running statistics of norm layers travel exactly, and move as the silos' mean does."""

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.core.actions import Commit
from fedsync.model.layout import Layout
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.plain_wire import FP32, Bf16, Int8, TopK, Wire, WireFormat
from fedsync.model.running_statistics import fitted, statistics_of
from fedsync.model.server_optimizer import ServerOptimizer
from tests.model.stores import vector
from tests.model.test_server_optimizer import KINDS, walk

NAMES = ("a.weight", "n.running_mean", "n.running_var", "n.num_batches_tracked", "b.weight")
LAYOUT = Layout(NAMES, ((700,), (3,), (3,), (), (90,)))
PLACES = slice(700, 707)


@pytest.mark.parametrize("inner", [Int8(), TopK(0.05, Bf16()), TopK(0.05)])
def test_statistics_arrive_as_they_are_and_do_not_blur_their_neighbours(inner: WireFormat) -> None:
    wire = fitted(Wire(up=inner), LAYOUT).up
    update = 1e-3 * np.random.default_rng(1).standard_normal(LAYOUT.size).astype(np.float32)
    update[PLACES] = [0.5, -0.5, 0.1, 1e-6, -0.2, 0.3, 20.0]
    payload = wire.encode(update, np.random.default_rng(2)).view(np.uint8)
    wire.check(payload, LAYOUT.size, "a")
    assert payload.nbytes == wire.payload_bytes(LAYOUT.size) and wire.feedback
    got = wire.decode(payload, 0, LAYOUT.size)
    np.testing.assert_array_equal(got[PLACES], update[PLACES])
    bare = update.copy()
    bare[PLACES] = 0
    alone = inner.decode(inner.encode(bare, np.random.default_rng(2)).view(np.uint8), 0, LAYOUT.size)
    np.testing.assert_array_equal(np.delete(got, PLACES), np.delete(alone, PLACES))
    for start, stop in ((0, 701), (699, 703), (702, 705), (706, 797), (707, 797)):
        np.testing.assert_array_equal(wire.decode(payload, start, stop), got[start:stop])


def test_formats_that_round_each_value_by_its_size_stay_as_they_are() -> None:
    wire, small = Wire(up=Bf16(), down=FP32), Wire(up=Int8())
    assert fitted(wire, LAYOUT) == wire and fitted(small, Layout(("a",), ((9,),))) == small


def one_by_one(silos: str, weight: float, change: float, *, toward: bool = False) -> PlainAggregator:
    store = PlainAggregator(vector(5, 1), statistics=((1, 2),))
    for silo in silos:
        store.begin(f"{silo}/1")
    for version, silo in enumerate(silos, 1):
        store.put(silo, f"{silo}/1", vector(change, -0.8))
        store.commit(Commit(version, {f"{silo}/1": weight}, toward=toward))
    return store


def test_stale_statistics_are_averaged_and_their_changes_are_not_added() -> None:
    """Three silos find a variance of 0.2 instead of 1, one after the other, each from the first model."""
    store = one_by_one("abc", weight=0.8, change=1)
    np.testing.assert_allclose(store.model, [5 + 3 * 0.8, 0.2 + 0.8 * 0.2**3], rtol=1e-6)


def test_whole_models_bring_stale_statistics_once() -> None:
    """FedAsync moves towards a silo's model: half the way from 1 to 0.2, then to a silo's 0.2 that began at 1."""
    store = one_by_one("ab", weight=0.5, change=0, toward=True)
    np.testing.assert_allclose(store.model, [5, 0.4], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e31])
def test_statistics_that_are_no_numbers_are_neither_sent_nor_taken(bad: float) -> None:
    wire = fitted(Wire(up=Int8()), LAYOUT).up
    payload = wire.encode(np.zeros(LAYOUT.size, np.float32)).view(np.uint8).copy()
    payload[4:8] = np.array([bad], np.float32).view(np.uint8)
    with pytest.raises(ProtocolError, match="finite"):
        wire.check(payload, LAYOUT.size, "a")
    with pytest.raises(ProtocolError, match="length"):
        wire.check(payload[4:], LAYOUT.size, "a")
    update = np.zeros(LAYOUT.size, np.float32)
    update[703] = bad
    if not np.isfinite(bad):
        with pytest.raises(ValueError, match="not finite"):
            wire.encode(update)


@pytest.mark.parametrize(("name", "buffers"), [("n.running_var", ()), ("n.mine", ("n.mine",))])
@pytest.mark.parametrize("kind", ["fedavgm", "fedadam", "fedyogi", "fedadagrad", "cautious-adam"])
def test_no_optimizer_steps_statistics(kind: str, name: str, buffers: tuple[str, ...]) -> None:
    """Each moves by the silos' mean change, also where momentum would have it move on; so do own buffers."""
    layout = Layout(("w", name, "v"), ((2,), (1,), (2,)), buffers)
    assert statistics_of(layout) == ((2, 3),)
    optimizer: ServerOptimizer = KINDS[kind]
    _, steps = walk(optimizer.fitted(layout), [vector(1, -2, 0.25, 3, 4), vector(1, -2, -0.125, 3, 4)])
    assert [float(step[2]) for step in steps] == [0.25, -0.125]
    if not kind.startswith("cautious"):  # its scales go by the layout
        _, plain = walk(optimizer, [vector(1, -2, 0.25, 3, 4), vector(1, -2, -0.125, 3, 4)])
        np.testing.assert_array_equal(np.delete(steps[1], 2), np.delete(plain[1], 2))
