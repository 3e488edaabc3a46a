"""Updates become integers without bias, and sums become the weighted mean."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding import tally
from fedsync.cipher.encoding.packing import BITS, MAX_CAP, SLOTS, Packing, Slots
from fedsync.cipher.encoding.quantization import QuantizationGrid, needed_exponents
from fedsync.common.errors import ProtocolError
from fedsync.model.layout import Layout, Vector

# Tensors across the end of chunk 0 and of the first group of chunks, one empty, one of one value.
LAYOUT = Layout(("a", "b", "none", "c", "d"), ((5, 700), (1,), (0, 3), (90_000,), (257,)))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def head_of(grid: QuantizationGrid) -> Slots:
    return tally.build(tally.Contribution(1, grid.exponents), grid.cap)


def slots_of(grid: QuantizationGrid, values: Vector, factor: float = 1.0, seed: int = 0) -> list[Slots]:
    return [slots for slots, _ in grid.encode(head_of(grid), values, factor, rng(seed))]


def clipped_of(grid: QuantizationGrid, values: Vector, factor: float = 1.0) -> int:
    return sum(clipped for _, clipped in grid.encode(head_of(grid), values, factor, rng()))


def decoded(grid: QuantizationGrid, slots: list[Slots], factor: float = 1.0, updates: int = 1) -> Vector:
    out = np.zeros(grid.layout.size, np.float32)
    grid.decode(slots, factor, out, updates)
    return out


def steps_of(grid: QuantizationGrid) -> np.ndarray:
    return np.repeat(np.array(grid.steps), grid.layout.sizes)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("slot_bits", [48, 64])
def test_every_value_comes_back_within_a_step(bits: int, slot_bits: int) -> None:
    values = rng(1).normal(size=LAYOUT.size).astype(np.float32) * 0.01
    values[:3500] *= 1000
    grid = QuantizationGrid(LAYOUT, Packing(bits, slot_bits), needed_exponents(values, LAYOUT, 1.0, bits), 1)
    slots = slots_of(grid, values)
    assert sum(map(len, slots)) == grid.chunks
    assert clipped_of(grid, values) == 0
    assert (np.abs(decoded(grid, slots) - values) < steps_of(grid) * (1 + 1e-6)).all()


def test_the_header_stands_at_the_beginning_and_disturbs_no_value() -> None:
    values = rng(1).normal(size=LAYOUT.size).astype(np.float32)
    grid = QuantizationGrid(LAYOUT, Packing(16), (3,) * 5, 1)
    with_header = np.concatenate(slots_of(grid, values))
    np.testing.assert_array_equal(with_header[0, : grid.head], head_of(grid))
    changed = with_header.copy()
    changed[0, : grid.head] = -(2**40)
    np.testing.assert_array_equal(decoded(grid, [changed]), decoded(grid, [with_header]))
    alone = next(grid.pack(head_of(grid), np.zeros(0, np.int32)))
    np.testing.assert_array_equal(alone[0, : grid.head], head_of(grid))
    assert alone.shape == (1, SLOTS) and not alone[0, grid.head :].any()


@pytest.mark.parametrize(
    "size", [0, 1, 8092, 8093, 2 * (SLOTS - 112), 2 * (SLOTS - 112) + 1, 2 * (SLOTS - 112) + 2 * SLOTS]
)
def test_chunks_are_as_many_as_values_and_header_need(size: int) -> None:
    """Five tensors: a header of 32 + 5 * 64 / 4 = 112 slots. Two lanes."""
    layout = Layout(("w", "x", "y", "z", "e"), ((size,), (0,), (0,), (0,), (0,)))
    grid = QuantizationGrid(layout, Packing(16), (0,) * 5, 1)
    assert grid.head == 112
    assert grid.chunks == max(1, math.ceil((112 * 2 + size) / (2 * SLOTS)))
    values = np.ones(size, np.float32) / 2
    np.testing.assert_array_equal(decoded(grid, slots_of(grid, values)), values)


@pytest.mark.parametrize("tensors", [253, 254, 300])
def test_a_header_may_fill_its_chunk(tensors: int) -> None:
    """From 254 tensors on, votes take 32 + 254 * 16 = 4096 slots, and no value shares the chunk."""
    layout = Layout(tuple(map(str, range(tensors))), ((40,),) * tensors)
    values = rng(1).normal(size=layout.size).astype(np.float32)
    grid = QuantizationGrid(layout, Packing(16), needed_exponents(values, layout, 1.0, 16), 1)
    assert grid.head == min(32 + 16 * tensors, SLOTS)
    slots = slots_of(grid, values)
    assert sum(map(len, slots)) == grid.chunks
    assert (np.abs(decoded(grid, slots) - values) < steps_of(grid)).all()
    assert tally.read(slots[0][0], 1, 1, tally.HeaderForm(tensors), "server").count == 1


def test_portions_of_any_size_decode_alike() -> None:
    values = rng(1).normal(size=LAYOUT.size).astype(np.float32)
    grid = QuantizationGrid(LAYOUT, Packing(16), (3,) * 5, 1)
    whole = np.concatenate(slots_of(grid, values))
    expected = decoded(grid, [whole])
    np.testing.assert_array_equal(decoded(grid, [whole[i : i + 1] for i in range(len(whole))]), expected)
    np.testing.assert_array_equal(decoded(grid, [whole[:3], whole[3:3], whole[3:]]), expected)


@pytest.mark.parametrize("bits", BITS)
def test_rounding_is_unbiased(bits: int) -> None:
    """The mean of n rounded values lies within five deviations sqrt(f (1 - f) / n) <= 1 / (2 sqrt(n)) of a step."""
    count = 40_000
    layout = Layout(("w",), ((count,),))
    grid = QuantizationGrid(layout, Packing(bits), (0,), 1)
    (step,) = grid.steps
    for place in (0.5, 0.25, -0.25, 0.1, -0.9, 2 ** (bits - 2) + 0.37, -(2 ** (bits - 2)) + 0.01):
        values = np.full(count, place * step, np.float32)
        exact = float(values[0]) / step  # float32 keeps 24 bits only
        mean = float(decoded(grid, slots_of(grid, values, seed=bits)).astype(np.float64).mean()) / step
        assert abs(mean - exact) < 5 * 0.5 / math.sqrt(count), place


def test_what_does_not_fit_is_clipped_and_counted() -> None:
    grid = QuantizationGrid(Layout(("w",), ((4,),)), Packing(8), (0,), 1)
    values = np.array([2.0, -2.0, 0.5, 127 / 128], np.float32)
    assert clipped_of(grid, values) == 2
    np.testing.assert_array_equal(decoded(grid, slots_of(grid, values)), np.array([127, -127, 64, 127]) / 128)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("slot_bits", [48, 64])
@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_is_within_what_its_updates_may_come_to(bits: int, slot_bits: int, chunk: int, sign: int) -> None:
    """Three updates of the largest value pass, one step more does not."""
    packing = Packing(bits, slot_bits)
    grid = QuantizationGrid(Layout(("w",), ((60_000,),)), packing, (0,), 1)
    whole = np.zeros((grid.chunks, packing.count, SLOTS), np.int32)
    whole[chunk, 0, -1] = sign * 3 * packing.peak
    decoded(grid, [packing.pack(whole.reshape(-1))], updates=3)
    whole[chunk, 0, -1] += sign
    with pytest.raises(ProtocolError, match="clipping"):
        decoded(grid, [packing.pack(whole.reshape(-1))], updates=3)


@pytest.mark.parametrize("slot_bits", [48, 64])
def test_there_is_nothing_behind_the_last_value(slot_bits: int) -> None:
    packing = Packing(16, slot_bits)
    grid = QuantizationGrid(Layout(("w",), ((9_500,),)), packing, (0,), 1)
    slots = np.zeros((grid.chunks, SLOTS), np.int64)
    slots[-1, -1] = 1 << packing.width * (packing.count - 1)
    with pytest.raises(ProtocolError, match="filling"):
        decoded(grid, [slots])


@settings(max_examples=40, deadline=None)
@given(st.floats(-60, 60), st.sampled_from(BITS))
def test_the_needed_exponent_is_the_smallest_that_clips_nothing(logarithm: float, bits: int) -> None:
    layout = Layout(("w",), ((1,),))
    values = np.array([2.0**logarithm], np.float32)
    (exponent,) = needed_exponents(values, layout, 1.0, bits)
    assert -40 <= exponent <= 23
    if exponent < 23:
        assert clipped_of(QuantizationGrid(layout, Packing(bits), (exponent,), 1), values) == 0
    if exponent > -40:
        assert clipped_of(QuantizationGrid(layout, Packing(bits), (exponent - 1,), 1), values) == 1


def test_the_factor_counts_for_needed_exponents() -> None:
    layout = Layout(("a", "none", "b"), ((2,), (0,), (2,)))
    values = np.array([1.0, -0.25, 0.0, 0.0], np.float32)
    # 1 does not fit +-127/128, so 2^1; nothing needs the least.
    assert needed_exponents(values, layout, 1.0, 8) == (1, -40, -40)
    assert needed_exponents(values, layout, 0.25, 8) == (-1, -40, -40)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32), st.sampled_from(BITS))
def test_the_weighted_mean_of_whoever_is_left_is_within_a_step(silos: int, seed: int, bits: int) -> None:
    """delta = step n_cap sum(q) / sum(n); each q is off by a step at most."""
    layout = Layout(("a", "b"), ((50,), (20,)))
    draw = rng(seed)
    cap = 1000
    weights = draw.integers(1, cap + 1, silos)
    updates = draw.normal(size=(silos, 70)).astype(np.float32)
    grid = QuantizationGrid(
        layout, Packing(bits), needed_exponents(np.abs(updates).max(axis=0), layout, 1.0, bits), cap
    )
    left = draw.permutation(silos)[: draw.integers(1, silos + 1)]
    total = sum(
        np.concatenate([s for s, _ in grid.encode(_own(grid, int(weights[i])), updates[i], weights[i] / cap, draw)])
        for i in left
    )
    added_up = tally.read(np.asarray(total)[0], len(left), cap, tally.HeaderForm(2), "server")
    assert (added_up.count, added_up.weight) == (len(left), weights[left].sum())
    mean = decoded(grid, [np.asarray(total)], added_up.mean_factor(cap), len(left))
    exact = (updates[left].astype(np.float64) * weights[left, np.newaxis]).sum(axis=0) / weights[left].sum()
    bound = steps_of(grid) * len(left) * cap / weights[left].sum()
    assert (np.abs(mean - exact) <= bound + 1e-5).all()


def _own(grid: QuantizationGrid, weight: int) -> Slots:
    return tally.build(tally.Contribution(weight, grid.exponents), grid.cap)


def test_grids_that_differ_in_anything_have_other_digests() -> None:
    layout = Layout(("a",), ((2, 3),))
    grids = [
        QuantizationGrid(layout, Packing(16), (0,), 1),
        QuantizationGrid(layout, Packing(16), (1,), 1),
        QuantizationGrid(layout, Packing(16), (0,), 2),
        QuantizationGrid(layout, Packing(8), (0,), 1),
        QuantizationGrid(layout, Packing(16, 64), (0,), 1),
        QuantizationGrid(Layout(("a",), ((3, 2),)), Packing(16), (0,), 1),
        QuantizationGrid(Layout(("b",), ((2, 3),)), Packing(16), (0,), 1),
    ]
    assert len({grid.digest for grid in grids}) == len(grids)
    assert QuantizationGrid(layout, Packing(16), (0,), 1).digest == grids[0].digest
    assert {len(grid.digest) for grid in grids} == {32}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    grid = QuantizationGrid(Layout(("w",), ((3,),)), Packing(16), (0,), 1)
    values = np.array([0, bad, 0], np.float32)
    with pytest.raises(ValueError, match="finite"):
        clipped_of(grid, values)
    with pytest.raises(ValueError, match="finite"):
        needed_exponents(values, grid.layout, 1.0, 16)


def test_wrong_shapes_and_numbers_are_refused() -> None:
    layout = Layout(("w",), ((3,),))
    grid = QuantizationGrid(layout, Packing(16), (0,), 1)
    with pytest.raises(ValueError, match="layout is float32"):
        clipped_of(grid, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match="factor"):
        clipped_of(grid, np.zeros(3, np.float32), math.nan)
    with pytest.raises(ValueError, match="layout takes 1"):
        decoded(grid, [])
    with pytest.raises(ValueError, match="more than the 1"):
        decoded(grid, [np.zeros((2, SLOTS), np.int64)])
    for exponents, cap in (((0, 0), 1), ((24,), 1), ((-41,), 1), ((0,), 0), ((0,), MAX_CAP + 1)):
        with pytest.raises(ValueError, match=r"exponents|cap"):
            QuantizationGrid(layout, Packing(16), exponents, cap)


@pytest.mark.parametrize(("times", "sent"), [(1, True), (16, True), (17, False), (2**30, False)])
def test_a_tensor_far_below_its_steps_is_sent_as_zeros(times: int, sent: bool) -> None:
    """A few values of a whole step each are right in the mean, and end the model where steps are 2^8."""
    grid = QuantizationGrid(LAYOUT, Packing(16), (0, 0, 0, 23, 0), 1)
    values = np.full(LAYOUT.size, 0.5, np.float32)
    values[3501:93_501] = grid.steps[3] / times
    found = decoded(grid, slots_of(grid, values))
    assert found[3501:93_501].any() == sent
    np.testing.assert_allclose(found[:3501], 0.5, atol=grid.steps[0])
