"""Formats of few bits: what they lose is bounded, spans agree with the whole, and hostile bytes are refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.common.errors import ProtocolError
from fedsync.model.chunked_arrays import LARGE_BYTES, ArrayKeeper, digest, file_part
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import BLOCK, FP32, MAX_MAGNITUDE, Bf16, Fp16, Int8, TopK, WireFormat, round_fixed
from tests.model.stores import no_space

FORMATS = [FP32, Bf16(), Fp16(), Int8(), TopK(0.1), TopK(0.3, Int8()), TopK(0.01, Bf16())]
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2**18 + 3]
NAMES = [f"{type(each).__name__}-{getattr(each, 'share', '')}" for each in FORMATS]


def values(size: int, seed: int = 3) -> Vector:
    """Over many powers of ten, as updates are."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(size) * np.exp(2 * rng.standard_normal(size)) * 1e-3).astype(np.float32)


def sent(wire: WireFormat, vector: Vector, seed: int | None = 1) -> Vector:
    payload = wire.encode(vector, None if seed is None else np.random.default_rng(seed)).view(np.uint8)
    wire.check(payload, vector.size, "a")
    return wire.decode(payload, 0, vector.size)


@pytest.mark.parametrize("wire", FORMATS, ids=NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_a_payload_has_the_bytes_that_it_should_and_its_spans_are_its_values(wire: WireFormat, size: int) -> None:
    vector = values(size)
    payload = wire.encode(vector, np.random.default_rng(1))
    assert payload.nbytes == wire.payload_bytes(size)
    data = payload.view(np.uint8)
    wire.check(data, size, "a")
    whole = wire.decode(data, 0, size)
    assert whole.dtype == np.float32
    assert whole.shape == (size,)
    for start in (0, 1, BLOCK - 1, BLOCK, 700):
        for stop in (BLOCK, 701, size):
            if start <= stop <= size:
                np.testing.assert_array_equal(wire.decode(data, start, stop), whole[start:stop])


class WorkedOut:
    """A vector of which nobody has more than a span."""

    def __init__(self, vector: Vector) -> None:
        self.size = vector.size
        self._vector = vector

    def __getitem__(self, span: slice) -> Vector:
        return self._vector[span].copy()


@pytest.mark.slow
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("wire", FORMATS[1:], ids=NAMES[1:])
def test_in_a_file_a_payload_has_the_same_bytes_and_in_memory_where_the_disk_is_full(
    wire: WireFormat, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector = values(3_000_001)
    payload = wire.encode(vector, np.random.default_rng(1))
    if full:
        monkeypatch.setattr("fedsync.model.chunked_arrays.map_file", no_space)
    filed = wire.encode(WorkedOut(vector), np.random.default_rng(1), ArrayKeeper(tmp_path / "kept", or_memory=True))
    np.testing.assert_array_equal(filed, payload)
    assert (file_part(filed) is None) == (full or payload.nbytes < LARGE_BYTES)


def test_payloads_have_the_bits_that_they_had_before_they_were_made_in_spans() -> None:
    """Of 700,001 values, more than two spans; hashes from when each was one array."""
    found = {type(wire).__name__: wire.encode(values(700_001), np.random.default_rng(1)) for wire in FORMATS[1:4]}
    assert {name: digest(payload).hex()[:16] for name, payload in found.items()} == {
        "Bf16": "d1bbce21573bed33",
        "Fp16": "f2c16cfeb4b3a82b",
        "Int8": "dd927b5c19731deb",
    }


@pytest.mark.parametrize("wire", FORMATS[1:], ids=NAMES[1:])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_sent(wire: WireFormat, bad: float) -> None:
    vector = values(600)
    vector[577] = bad
    with pytest.raises(ValueError, match="not finite"):
        wire.encode(vector)


def test_float32_travels_as_it_is() -> None:
    """Nothing is copied."""
    vector = values(8)
    payload = FP32.encode(vector)
    for sent in (payload, payload.view(np.uint8)):
        FP32.check(sent, 8, "a")
        span = FP32.decode(sent, 3, 5)
        np.testing.assert_array_equal(span, vector[3:5])
        assert np.shares_memory(span, vector)


def test_bfloat16_is_the_nearest_and_ties_go_to_even() -> None:
    """1 + 2^-7 is the next after 1: what lies at 1 + 2^-8 goes down, to the even one, at 1 + 3 x 2^-8 up."""
    vector = np.array([1, 1 + 2**-8, 1 + 2**-8 + 2**-20, 1 + 3 * 2**-8, -1 - 2**-8, 0, -0.0], np.float32)
    np.testing.assert_array_equal(sent(Bf16(), vector), np.array([1, 1, 1 + 2**-7, 1 + 2**-6, -1, 0, -0.0], np.float32))


def test_the_largest_float32_stays_finite_in_bfloat16() -> None:
    most = np.finfo(np.float32).max
    arrived = sent(Bf16(), np.array([most, -most, 1e38], np.float32))
    assert np.isfinite(arrived).all()
    np.testing.assert_allclose(arrived, [most, -most, 1e38], rtol=2**-8)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=20))
def test_bfloat16_is_wrong_by_the_256th_part_of_a_value_at_most(several: list[float]) -> None:
    vector = np.array(several, np.float32)
    tiny = np.finfo(np.float32).tiny  # below it steps do not shrink any more
    assert np.all(np.abs(sent(Bf16(), vector) - vector) <= np.maximum(np.abs(vector), tiny) * 2.0**-8)


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 6e4, 7e4, 1e20, 1e26])
def test_half_precision_has_no_value_that_is_too_large_or_too_small(size: float) -> None:
    """65504 is its largest number: the block's power of two takes what is larger, and much smaller."""
    vector = (values(1300) / 0.1 * size).astype(np.float32)
    arrived = sent(Fp16(), vector)
    assert np.isfinite(arrived).all()
    blocks = [slice(start, start + BLOCK) for start in range(0, 1300, BLOCK)]
    for block in blocks:
        most = np.abs(vector[block]).max()
        assert np.all(np.abs(arrived - vector)[block] <= np.abs(vector[block]) * 2.0**-11 + most * 2.0**-39)


def test_int8_is_wrong_by_less_than_a_step_of_its_block() -> None:
    vector = values(3000)
    arrived, nearest = sent(Int8(), vector), sent(Int8(), vector, None)
    for start in range(0, 3000, BLOCK):
        block = slice(start, start + BLOCK)
        step = np.abs(vector[block]).max() / 127
        assert np.all(np.abs(arrived - vector)[block] <= step * 1.0001)
        assert np.all(np.abs(nearest - vector)[block] <= step * 0.5001)


def test_int8_rounds_by_chance_so_that_the_mean_is_right() -> None:
    """A third of a step is sent as a step in a third of all cases, 10,000 of them: 0.33 +- 4 x 0.0047."""
    vector = np.full(BLOCK * 20, 1 / 3, np.float32)
    vector[::BLOCK] = 127
    arrived = np.delete(sent(Int8(), vector), slice(None, None, BLOCK))
    assert set(arrived.tolist()) == {0.0, 1.0}
    assert abs(arrived.mean() - 1 / 3) < 4 * np.sqrt(2 / 9 / arrived.size)


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-38, 1e-29, 1e-28, 1e29])
def test_int8_takes_values_of_any_size(size: float) -> None:
    vector = np.array([size, -size / 2, 0], np.float32)
    assert np.all(np.abs(sent(Int8(), vector) - vector) <= max(size / 127 * 1.001, 1e-28))


def test_the_largest_values_are_sent_and_of_equal_ones_the_first() -> None:
    vector = np.array([1, -5, 2, 3, -3, 0, 3, 0.5, 0, 0], np.float32)
    np.testing.assert_array_equal(sent(TopK(0.3), vector), np.array([0, -5, 0, 3, -3, 0, 0, 0, 0, 0], np.float32))


@pytest.mark.parametrize(("share", "count"), [(0.07, 7), (0.071, 8), (1e-9, 1), (0.001, 1), (0.5, 50)])
def test_a_share_is_rounded_up(share: float, count: int) -> None:
    assert TopK(share).count(100) == count


@pytest.mark.parametrize("wire", FORMATS, ids=NAMES)
def test_another_length_or_type_is_refused(wire: WireFormat) -> None:
    payload = wire.encode(values(600)).view(np.uint8)
    longer = np.append(payload, np.uint8(0))
    for each in (payload[:-1], longer, payload[:0], payload.view(np.int8), payload[None]):
        with pytest.raises(ProtocolError, match=r"'(length|shape)'"):
            wire.check(each, 600, "a")


@pytest.mark.parametrize("wire", [Fp16(), Int8(), TopK(0.5, Int8())], ids=["fp16", "int8", "top-k"])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1e-3, 1e38, MAX_MAGNITUDE])
def test_a_scale_that_makes_harmful_values_is_refused(wire: WireFormat, scale: float) -> None:
    payload = wire.encode(values(1200)).view(np.uint8).copy()
    first = 4 + 4 * 600 if isinstance(wire, TopK) else 0
    payload[first : first + 4] = np.array([scale], np.float32).view(np.uint8)
    with pytest.raises(ProtocolError, match="'finite': scales from"):
        wire.check(payload, 1200, "a")


@pytest.mark.parametrize(
    "indices", [[3, 2, 5], [2, 2, 5], [2, 5, 10], [2, 5, 2**32 - 1]], ids=["unsorted", "twice", "beyond", "far beyond"]
)
def test_indices_have_to_ascend_within_the_model(indices: list[int]) -> None:
    wire = TopK(0.3)
    payload = np.array([3, *indices, 0, 0, 0], np.uint32).view(np.uint8)
    with pytest.raises(ProtocolError, match="'indices': they do not ascend"):
        wire.check(payload, 10, "a")


@pytest.mark.parametrize("count", [0, 2, 4, 2**32 - 1])
def test_another_number_of_indices_is_refused_before_anything_is_made_of_it(count: int) -> None:
    payload = np.array([count, 1, 2, 3, 0, 0, 0], np.uint32).view(np.uint8)
    with pytest.raises(ProtocolError, match=f"it says that there are {count}, not 3"):
        TopK(0.3).check(payload, 10, "a")


@pytest.mark.parametrize("bits", [8, 12, 16])
def test_rounding_in_fixed_point_goes_to_the_nearest_or_by_the_fraction(bits: int) -> None:
    unit = 2.0 ** (32 - bits)
    peak = (1 << (bits - 1)) - 1
    numbers = np.array([0.4, 0.6, -0.4, -0.6, peak, -peak, peak + 3, 5], np.float32)
    rounded, clipped = round_fixed((numbers * unit).astype(np.float32), bits, None)
    assert (rounded.tolist(), clipped) == ([0, 1, 0, -1, peak, -peak, peak, 5], 1)
    by_chance, _ = round_fixed((numbers * unit).astype(np.float32), bits, np.random.default_rng(1))
    assert np.all(np.abs(by_chance - np.clip(numbers, -peak, peak)) < 1)
