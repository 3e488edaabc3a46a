"""Models and updates that lie in files: the same bits, next to no memory, and nothing left behind."""

import gc
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.core.actions import Commit
from fedsync.model.chunked_arrays import SPAN_BYTES, ArrayKeeper, file_part, map_file
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.plain_wire import Bf16, Wire
from fedsync.model.server_optimizer import Adaptive
from tests.memory import resident, traced

VALUES = 3 * SPAN_BYTES // 4 + 7
"""A little more than three spans of float32."""


def vector(seed: int) -> Vector:
    return np.random.default_rng(seed).standard_normal(VALUES).astype(np.float32)


def by_hand(model: Vector, updates: dict[str, Vector], weights: dict[str, float], bases: Vector | None) -> Vector:
    """The whole vectors, one after the other: what a commit came to before there were spans."""
    result = model.copy()
    for update_id, weight in weights.items():
        moved = updates[update_id] if bases is None else bases - model + updates[update_id]
        result += moved * np.float32(weight)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("toward", [False, True])
@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("arrive", ["abc", "cba", "bca"])
def test_a_commit_has_the_bits_of_whole_vectors_whoever_came_first(
    tmp_path: Path, toward: bool, in_files: bool, arrive: str
) -> None:
    first, moved = vector(0), {"0": vector(9)}
    updates = {name: vector(ord(name)) for name in "abc"}
    store = PlainAggregator(first, keeper=ArrayKeeper(tmp_path / "arrays" if in_files else None))
    for name in updates:
        store.begin(name)
    store.put("s", "0", moved["0"])
    store.commit(Commit(1, {"0": 1.0}))
    second = by_hand(first, moved, {"0": 1.0}, None)
    for name in arrive:
        store.put(name, name, updates[name])
    weights = {"b": 0.3, "a": 0.9, "c": -0.1}
    store.commit(Commit(2, weights, toward=toward))
    np.testing.assert_array_equal(store.model, by_hand(second, updates, weights, first if toward else None))
    assert (file_part(store.model) is not None) == in_files


@pytest.mark.parametrize("place", [0, SPAN_BYTES // 4, VALUES - 1], ids=["first span", "second span", "last value"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -2e30])
def test_harm_is_found_wherever_it_is(tmp_path: Path, place: int, value: float) -> None:
    store = PlainAggregator(vector(0), keeper=ArrayKeeper(tmp_path / "arrays"))
    update = vector(1)
    update[place] = value
    path = tmp_path / "received"
    path.write_bytes(update.tobytes())
    for received in (update, map_file(path)):
        with pytest.raises(ProtocolError, match="finite"):
            store.put("a", "a/1", received)
    assert store.pending == ()


@pytest.mark.slow
def test_sixteen_updates_take_no_more_memory_than_their_spans(tmp_path: Path) -> None:
    keeper = ArrayKeeper(tmp_path / "arrays")
    updates, commit = {}, Commit(1, {f"s{each}": 1 / 16 for each in range(16)})
    for name in commit.weights:
        path = tmp_path / name
        path.write_bytes(vector(1).tobytes())
        updates[name] = map_file(path)
    with traced() as taken:
        model = keeper.make(np.float32, VALUES, lambda start, stop: np.zeros(stop - start, np.float32))
        store = PlainAggregator(model, keeper=keeper)
        before = resident()
        for name, update in updates.items():
            store.put(name, name, update)
        store.commit(commit)
        store.savepoint()
    assert resident() - before < 8 * SPAN_BYTES, "the pages that were read are given back: they are 48 spans"
    assert taken.peak < 4 * SPAN_BYTES, "a span of the old model, one of the new, and what is added"
    assert taken.left < SPAN_BYTES // 4


@pytest.mark.slow
def test_an_optimizer_has_the_same_bits_in_files_and_takes_spans_of_memory(tmp_path: Path) -> None:
    adam = Adaptive("adam", 0.1, 0.9, 0.99, 1e-3)
    models: list[Vector] = []
    for folder in (None, tmp_path / "arrays"):
        store = PlainAggregator(vector(0), keeper=ArrayKeeper(folder), optimizer=adam)
        gc.collect()
        with traced() as taken:
            for version in (1, 2, 3):
                update = tmp_path / "update"
                update.write_bytes(vector(version).tobytes())
                store.put("a", "a/1", map_file(update, np.float32))
                store.commit(Commit(version, {"a/1": 0.5}))
        models.append(store.model)
    np.testing.assert_array_equal(*models)
    assert taken.peak < 12 * SPAN_BYTES, "of a file each: the model and both moments have three spans"
    assert len([*(tmp_path / "arrays").iterdir()]) == 3 + 2, "the model, two moments; version 0, and zeros"


def test_the_public_model_lies_in_a_file_of_its_own(tmp_path: Path) -> None:
    wire = Wire(down=Bf16())
    store = PlainAggregator(vector(0), wire=wire, keeper=ArrayKeeper(tmp_path / "arrays"))
    in_memory = PlainAggregator(vector(0), wire=wire)
    for version in (1, 2):
        for each in (store, in_memory):
            each.put("a", f"a/{version}", vector(version))
            each.commit(Commit(version, {f"a/{version}": 0.5}))
        np.testing.assert_array_equal(store.model, in_memory.model)
    state = store.state()
    exact, public = file_part(state["model"]), file_part(state["public"])
    assert exact is not None and public is not None and exact.path != public.path


def test_an_update_that_came_in_memory_waits_in_a_file(tmp_path: Path) -> None:
    store = PlainAggregator(vector(0), keeper=ArrayKeeper(tmp_path / "arrays"))
    update = vector(1)
    with traced() as taken:
        store.put("a", "a/1", update)
    assert taken.peak < SPAN_BYTES
    kept = store.state()["pending"]["a/1"]
    assert file_part(kept) is not None
    update[:] = 0
    np.testing.assert_array_equal(kept, vector(1))


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("size", [3, VALUES])
def test_nobody_may_write_to_a_model(tmp_path: Path, folder: bool, size: int) -> None:
    store = PlainAggregator(np.zeros(size, np.float32), keeper=ArrayKeeper(tmp_path / "arrays" if folder else None))
    store.put("a", "a/1", np.ones(size, np.float32))
    for version in (0, 1):
        with pytest.raises(ValueError, match="read-only"):
            store.model[0] = 1
        if not version:
            store.commit(Commit(1, {"a/1": 1.0}))


def test_files_go_with_what_they_hold(tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    (folder / "left").write_bytes(b"by a process that was killed")
    keeper = ArrayKeeper(folder)
    assert not folder.exists()
    store = PlainAggregator(vector(0), keeper=keeper)
    store.put("a", "a/1", vector(1))
    store.put("b", "b/1", vector(2))
    assert len([*folder.iterdir()]) == 3
    store.commit(Commit(1, {"a/1": 1.0}))
    store.discard("b/1")
    store.savepoint()
    store.keep_best(1)
    gc.collect()
    assert [each.stat().st_mode & 0o777 for each in folder.iterdir()] == [0o600] * 2, "the first model, and the last"
    assert folder.stat().st_mode & 0o777 == 0o700
    model = store.model.copy()
    keeper.close()
    assert not folder.exists()
    np.testing.assert_array_equal(store.model, model)
