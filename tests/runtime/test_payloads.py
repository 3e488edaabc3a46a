"""Payloads on the wire, small and large."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedsync.core.errors import ProtocolError
from fedsync.core.layout import Layout
from fedsync.runtime import payloads
from fedsync.runtime.payloads import SMALL_BYTES, pack, unpack, unpack_sealed

LARGEST_SMALL = SMALL_BYTES // 4


@pytest.mark.parametrize(("size", "small"), [(1, True), (LARGEST_SMALL, True), (LARGEST_SMALL + 1, False)])
def test_a_vector_comes_as_it_went(size: int, small: bool) -> None:
    vector = np.random.default_rng(1).normal(size=size).astype(np.float32)
    packed = pack(vector)
    assert isinstance(packed, bytes) is small
    np.testing.assert_array_equal(unpack(packed, Layout(("w",), ((size,),)), "silo"), vector)


@pytest.mark.parametrize(("size", "small"), [(0, True), (SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
def test_sealed_bytes_come_as_they_went(size: int, small: bool) -> None:
    sealed = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    packed = pack(sealed)
    assert isinstance(packed, bytes) is small
    np.testing.assert_array_equal(unpack_sealed(packed, size, "silo"), sealed)
    with pytest.raises(ProtocolError, match=f"{size} sealed bytes, at most {size - 1}"):
        unpack_sealed(packed, size - 1, "silo")


@pytest.mark.parametrize("nbytes", [0, 7, 9, 16])
def test_bytes_of_another_length_are_no_vector(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"it has {nbytes} bytes, not 8"):
        unpack(bytes(nbytes), Layout(("w",), ((2,),)), "silo")


def test_a_vector_is_no_sealed_array_and_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "SMALL_BYTES", -1)
    with pytest.raises(ProtocolError, match="instead of one sealed array"):
        unpack_sealed(pack(np.zeros(2, dtype=np.float32)), 100, "silo")
    with pytest.raises(ProtocolError, match="array header"):
        unpack(pack(np.zeros(8, dtype=np.uint8)), Layout(("w",), ((2,),)), "silo")
    with pytest.raises(ProtocolError, match="instead of one array"):
        unpack(ArrayRecord({"other": Array(np.zeros(2, dtype=np.float32))}), Layout(("w",), ((2,),)), "silo")
