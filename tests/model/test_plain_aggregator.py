"""The model, the updates that wait, and what never gets in."""

import gc
import weakref

import numpy as np
import pytest

from fedsync.common.errors import PolicyError, ProtocolError
from fedsync.core.actions import Commit
from fedsync.model.broadcast_compression import HeldModel
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.plain_wire import MAX_MAGNITUDE, Bf16, Fp16, Int8, Wire
from tests.model.stores import delivered, vector


def test_a_commit_adds_the_weighted_updates() -> None:
    """1 + 0.25 x 4 - 0.75 x 8 = -4; 2 + 0.25 x 8 + 0.75 x 4 = 7."""
    store = PlainAggregator(vector(1, 2))
    store.put("a", "a/1", vector(4, 8))
    store.put("b", "b/1", vector(-8, 4))
    store.commit(Commit(1, {"a/1": 0.25, "b/1": 0.75}))
    np.testing.assert_array_equal(store.model, vector(-4, 7))
    assert store.model.dtype == np.float32
    assert store.pending == ()


def test_running_statistics_follow_a_mean_where_coefficients_sum_to_more_than_one() -> None:
    """The first value is a weight: 1 - 3 x 0.5 - 0.2 x 1. The second is 1 - (3 x 0.5 + 0.2 x 1) / 3.2."""
    store = PlainAggregator(vector(1, 1), statistics=((1, 2),))
    store.put("a", "a/1", vector(-0.5, -0.5))
    store.put("b", "b/1", vector(-1, -1))
    store.commit(Commit(1, {"a/1": 3.0, "b/1": 0.2}))
    np.testing.assert_allclose(store.model, [1 - 1.7, 1 - 1.7 / 3.2], rtol=1e-6)


def test_what_is_not_in_the_commit_waits_on() -> None:
    store = PlainAggregator(vector(0))
    for number in (1, 2, 3):
        store.put("a", f"a/{number}", vector(number))
    store.commit(Commit(1, {"a/2": 1.0}))
    assert store.pending == ("a/1", "a/3")
    store.commit(Commit(2, {"a/1": 0.5, "a/3": 0.5}))
    np.testing.assert_array_equal(store.model, vector(4))


def test_the_order_of_the_weights_decides_the_bits() -> None:
    """In float32, (1e8 - 1e8) + 1 is 1 and (1 + 1e8) - 1e8 is 0: drivers must add in the order given."""
    updates = {"a": 3e8, "b": -3e8, "c": 3.0}
    results = []
    for order in ("abc", "cab"):
        store = PlainAggregator(vector(0))
        for name, value in updates.items():
            store.put(name, name, vector(value))
        store.commit(Commit(1, dict.fromkeys(order, 1 / 3)))
        results.append(float(store.model[0]))
    assert results == [1.0, 0.0]


def test_a_commit_changes_neither_the_older_model_nor_a_silo_s_own_array() -> None:
    store = PlainAggregator(vector(1, 1))
    before, update = store.model, vector(4, 4)
    store.put("a", "a/1", update)
    store.commit(Commit(1, {"a/1": 0.5}))
    assert (before.tolist(), update.tolist()) == ([1, 1], [4, 4])
    assert not np.shares_memory(before, store.model)


def test_a_rollback_goes_back_to_what_was_remembered() -> None:
    store = PlainAggregator(vector(1))

    def add(value: float) -> float:
        store.put("a", "a/1", vector(value))
        store.commit(Commit(1, {"a/1": 1.0}))
        return float(store.model[0])

    assert add(2) == 3
    store.rollback()
    assert store.model[0] == 1, "version 0 is remembered from the beginning"
    assert add(3) == 4
    store.savepoint()
    assert add(5) == 9
    store.rollback()
    assert store.model[0] == 4
    assert add(1) == 5
    store.rollback()
    assert store.model[0] == 4, "it stays remembered"


@pytest.mark.parametrize(
    ("update", "check"),
    [
        (vector(0, np.nan, 0), "finite"),
        (vector(np.nan, np.nan, np.nan), "finite"),
        (vector(0, np.inf, 0), "finite"),
        (vector(0, 0, -np.inf), "finite"),
        (vector(3e38, 0, 0), "finite"),  # a float32, but two of them are none
        (vector(0, -3e38, 0), "finite"),
        (np.zeros(3, dtype=np.float64), "shape"),
        (np.zeros(3, dtype=np.int32), "shape"),
        (np.zeros(3, dtype=np.complex64), "shape"),
        (np.zeros(3, dtype=">f4" if np.little_endian else "<f4"), "shape"),
        (vector(0, 0), "shape"),
        (vector(0, 0, 0, 0), "shape"),
        (vector(), "shape"),
        (np.zeros((3, 1), dtype=np.float32), "shape"),
        (np.zeros((), dtype=np.float32), "shape"),
    ],
)
def test_a_harmful_update_is_refused_and_not_kept(update: Vector, check: str) -> None:
    store = PlainAggregator(vector(1, 2, 3))
    with pytest.raises(ProtocolError, match=f"silo 'a' failed the check '{check}'"):
        store.put("a", "a/1", update)
    assert store.pending == ()
    store.discard("a/1")
    np.testing.assert_array_equal(store.model, vector(1, 2, 3))


def test_the_largest_value_accepted_just_passes() -> None:
    store = PlainAggregator(vector(0, 0))
    limit = np.float32(MAX_MAGNITUDE)
    largest = limit if limit <= MAX_MAGNITUDE else np.nextafter(limit, np.float32(0))
    store.put("a", "a/1", vector(largest, -largest))
    assert store.pending == ("a/1",)


def test_a_second_update_of_the_same_name_does_not_replace_the_first() -> None:
    """A silo that sends twice, or under another's name, must not change what was checked and is pending."""
    store = PlainAggregator(vector(0))
    store.put("a", "a/1", vector(1))
    with pytest.raises(ProtocolError):
        store.put("b", "a/1", vector(1000))
    store.commit(Commit(1, {"a/1": 1.0}))
    np.testing.assert_array_equal(store.model, vector(1))


# Towards the silos' models.


def test_a_commit_toward_mixes_whole_models() -> None:
    """a began at 0 and is at 4; the model has moved to 10 since: 10 + 1/4 x (0 + 4 - 10) = 8.5 = 3/4 x 10 + 1/4 x 4."""
    store = PlainAggregator(vector(0))
    store.begin("a/1")
    store.begin("b/1")
    store.put("b", "b/1", vector(10))
    store.commit(Commit(1, {"b/1": 1.0}))
    store.put("a", "a/1", vector(4))
    store.commit(Commit(2, {"a/1": 0.25}, toward=True))
    np.testing.assert_array_equal(store.model, vector(8.5))


def test_several_updates_are_mixed_into_the_same_old_model() -> None:
    """Both silos are at 8 and 4, the model at 2: 2 + 0.5 x 6 + 0.25 x 2 = 5.5, in whatever order."""
    for names in ("ab", "ba"):
        store = PlainAggregator(vector(2))
        for name, value in zip("ab", (6, 2), strict=True):
            store.begin(name)
            store.put(name, name, vector(value))
        store.commit(Commit(1, {name: {"a": 0.5, "b": 0.25}[name] for name in names}, toward=True))
        np.testing.assert_array_equal(store.model, vector(5.5))


def test_a_base_is_kept_while_its_order_is_in_work_and_no_longer() -> None:
    store = PlainAggregator(vector(0))
    bases = []
    for number in range(3):
        name = f"a/{number}"
        bases.append(weakref.ref(store.model))
        store.begin(name)
        store.put("a", name, vector(1))
        if number == 1:
            store.discard(name)
        else:
            store.commit(Commit(number + 1, {name: 0.5}, toward=True))
    store.begin("slow/1")
    slow = weakref.ref(store.model)
    store.begin("b/1")
    store.put("b", "b/1", vector(1))
    store.commit(Commit(4, {"b/1": 0.5}, toward=True))
    store.savepoint()
    gc.collect()
    assert [base() is None for base in bases[1:]] == [True, True], "of version 0 the store remembered the model"
    assert slow() is not None
    store.discard("slow/1")
    gc.collect()
    assert slow() is None


def test_the_best_is_the_model_that_an_order_began_though_others_came_since() -> None:
    """a starts from version 0 and b from version 1; when a is back, version 2 is the newest."""
    store = PlainAggregator(vector(5))
    store.begin("a/1")
    store.put("x", "x/1", vector(1))
    store.commit(Commit(1, {"x/1": 1.0}))
    store.begin("b/1")
    store.put("x", "x/2", vector(1))
    store.commit(Commit(2, {"x/2": 1.0}))
    found = []
    for version in (0, 2, 1):
        store.keep_best(version)
        found.append(store.best.tolist())
    assert found == [[5.0], [7.0], [6.0]]
    store.discard("b/1")
    with pytest.raises(PolicyError, match="version 1 is the best, and its model is gone"):
        store.keep_best(1)
    assert store.best.tolist() == [6.0]


# Fewer than 32 bits.


INT8 = Wire(Int8(), Int8())


def test_updates_are_added_to_the_exact_model_and_silos_have_the_public_one() -> None:
    """Each round the model moves by (1, 1/300): a 300th is half a step of int8, and never lost for good."""
    store, silo = PlainAggregator(vector(0, 0), wire=INT8), HeldModel(2, Int8())
    store.greet("a", -1, None)
    for version in range(1, 31):
        delivered(store, silo, "a", version - 1)
        store.put("a", f"a/{version}", Int8().encode(vector(1, 1)))
        store.put("b", f"b/{version}", Int8().encode(vector(0, 1 / 300 - 1)))
        store.commit(Commit(version, {f"a/{version}": 1.0, f"b/{version}": 1.0}))
    np.testing.assert_array_equal(delivered(store, silo, "a", 30), store.model)
    np.testing.assert_allclose(store.model, vector(30, 0.1), atol=0.02)
    assert store.outgoing("a").nbytes == 16


def test_who_is_behind_is_sent_what_is_new_and_who_is_gone_the_whole() -> None:
    size = 2000
    store = PlainAggregator(np.zeros(size, np.float32), wire=INT8)
    one, whole = Int8().payload_bytes(size), 4 * size
    for name in "abc":
        store.greet(name, -1, None)
        assert store.outgoing(name).nbytes == 16 + whole
        store.holds(name, 0)
    store.leave("c")
    store.put("a", "a/1", Int8().encode(np.ones(size, np.float32)))
    store.commit(Commit(1, {"a/1": 1.0}))
    store.holds("a", 1)
    assert [store.outgoing(name).nbytes for name in "abc"] == [16, 16 + one, 16 + whole]


def test_a_commit_toward_starts_from_the_model_that_the_silo_had() -> None:
    """It had the public one, which has not moved by a 300th: a whole step of the way there is the silo's own model."""
    store = PlainAggregator(vector(0, 0), wire=Wire(down=Int8()))
    store.put("b", "b/1", vector(1, 1 / 300))
    store.commit(Commit(1, {"b/1": 1.0}))
    np.testing.assert_array_equal(store.model, vector(1, 0))
    store.begin("a/1")
    store.put("a", "a/1", vector(127, 0))
    store.commit(Commit(2, {"a/1": 1.0}, toward=True))
    np.testing.assert_array_equal(store.state()["model"], vector(128, 0))


def test_a_rollback_brings_back_both_models() -> None:
    store, silo = PlainAggregator(vector(0, 0), wire=INT8), HeldModel(2, Int8())
    store.put("a", "a/1", Int8().encode(vector(1, 0.3)))
    store.commit(Commit(1, {"a/1": 1.0}))
    delivered(store, silo, "a", 1)
    store.savepoint()
    exact, public = store.state()["model"], store.model
    store.put("a", "a/2", Int8().encode(vector(5, 5)))
    store.commit(Commit(2, {"a/2": 1.0}))
    delivered(store, silo, "a", 2)
    store.rollback()
    np.testing.assert_array_equal(delivered(store, silo, "a", 3), public)
    np.testing.assert_array_equal(store.state()["model"], exact)


def test_another_process_goes_on_with_both_models() -> None:
    """Differences are gone: who has the newest version needs none, and the others get the whole."""
    store, silo = PlainAggregator(vector(0, 0), wire=INT8), HeldModel(2, Int8())
    for version in (1, 2):
        store.put("a", f"a/{version}", Int8().encode(vector(1, 0.3)))
        store.commit(Commit(version, {f"a/{version}": 1.0}))
    delivered(store, silo, "a", 2)
    other = PlainAggregator(vector(9, 9), wire=INT8)
    other.restore(store.state())
    for name, version in (("a", silo.version), ("b", 1)):
        other.greet(name, version, None)
    assert [other.outgoing(name).nbytes for name in "ab"] == [16, 24]
    for each in (store, other):
        each.put("a", "a/3", Int8().encode(vector(0.1, 0.7)))
        each.commit(Commit(3, {"a/3": 1.0}))
    np.testing.assert_array_equal(store.model, other.model)
    np.testing.assert_array_equal(delivered(other, silo, "a", 3), store.model)


def test_a_silo_with_a_version_that_was_lost_and_made_again_is_sent_the_whole() -> None:
    """The server's machine died before version 2 was on its disk, and silo a comes back after another version 2."""
    store, silo = PlainAggregator(vector(0, 0), wire=INT8), HeldModel(2, Int8())
    other = PlainAggregator(vector(9, 9), wire=INT8)
    other.restore(store.state())
    for made, change in ((store, 1), (other, 5)):
        made.put("b", "b/1", Int8().encode(vector(change, 0.3)))
        made.commit(Commit(1, {"b/1": 1.0}))
    delivered(store, silo, "a", 1)
    other.greet("a", silo.version, None)
    other.outgoing("a")  # it never arrives
    other.leave("a")
    for nbytes in (24, 16):
        other.greet("a", silo.version, None)
        assert other.outgoing("a").nbytes == nbytes
        np.testing.assert_array_equal(delivered(other, silo, "a", 1), other.model)
        other.leave("a")


def test_a_silo_that_did_not_receive_its_last_model_continues_with_the_one_before() -> None:
    store, silo = PlainAggregator(vector(*[0] * 1000), wire=INT8), HeldModel(1000, Int8())
    for version in (1, 2, 3):
        store.put("b", f"b/{version}", Int8().encode(vector(*[1] * 1000)))
        store.commit(Commit(version, {f"b/{version}": 1.0}))
        if version == 1:
            delivered(store, silo, "a", 1)
        else:
            store.outgoing("a")
    store.leave("a")
    store.greet("a", silo.version, None)
    assert store.outgoing("a").nbytes < 2500
    np.testing.assert_array_equal(delivered(store, silo, "a", 3), store.model)


@pytest.mark.parametrize("code", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
def test_a_half_that_is_not_finite_is_refused(code: int) -> None:
    store = PlainAggregator(vector(1, 2, 3), wire=Wire(Fp16()))
    payload = Fp16().encode(vector(1, 2, 3)).copy()
    payload[4:6] = np.array([code], np.uint16).view(np.uint8)
    with pytest.raises(ProtocolError, match="silo 'a' failed the check 'finite'"):
        store.put("a", "a/1", payload)
    bf16 = PlainAggregator(vector(1, 2, 3), wire=Wire(Bf16()))
    with pytest.raises(ProtocolError, match="silo 'a' failed the check 'finite'"):
        bf16.put("a", "a/1", np.array([0x7F80, 0, 0], np.uint16).view(np.uint8))
