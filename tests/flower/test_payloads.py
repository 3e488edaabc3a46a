"""Payloads on the wire, small and large."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedsync.core.errors import ProtocolError
from fedsync.core.layout import Layout
from fedsync.flower import payloads
from fedsync.flower.payloads import SMALL_BYTES, pack, read_model, unpack, unpack_sealed

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


def header(text: str) -> bytes:
    """What NumPy puts before an array's data, with another text in it."""
    body = text.encode("latin1").ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body


@pytest.mark.parametrize(
    "text",
    [
        "{'descr': (",  # the tokenizer stumbles
        "-" * 5000 + "1",  # the parser recurses
        "(" * 9000,
        "'''",
        "{'descr': ['a'], 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",)}",
        "",
    ],
)
def test_a_header_that_pythons_parser_stumbles_over_is_the_senders_problem(text: str) -> None:
    array = Array("float32", (3,), "numpy.ndarray", header(text) + bytes(12))
    with pytest.raises(ProtocolError, match="array header"):
        unpack(ArrayRecord({"flat": array}), Layout(("w",), ((3,),)), "silo")


def named(**arrays: Array) -> ArrayRecord:
    return ArrayRecord(arrays)


def claimed(*shape: int, data: bytes = b"x") -> Array:
    """An array that says it has this shape."""
    return Array("float32", shape, "numpy.ndarray", data)


def test_a_model_comes_with_its_layout() -> None:
    weights, bias = np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7, np.float32)
    model, layout = read_model(named(w=Array(weights), b=Array(bias)), "silo")
    assert layout == Layout(("w", "b"), ((2, 3), ()))
    np.testing.assert_array_equal(model, np.arange(8, dtype=np.float32)[[0, 1, 2, 3, 4, 5, 7]])


@pytest.mark.parametrize(
    ("record", "check"),
    [
        (named(w=claimed(2**42)), "shape"),
        (named(w=claimed(-5)), "shape"),
        (named(w=claimed(True, data=bytes(100))), "shape"),
        (named(w=claimed(*[1] * 33, data=bytes(100))), "shape"),
        (named(w=claimed(30, 30, data=bytes(1000))), "length"),
        (named(w=claimed(0, 900, 900, data=bytes(1000))), "length"),
        (named(w=claimed(3, data=bytes(140))), "array header"),
        (named(w=Array(np.zeros(3))), "shape"),  # float64
        (named(w=Array(np.array([1, np.nan], np.float32))), "finite"),
        (named(w=Array(np.array([1, -np.inf], np.float32))), "finite"),
        (named(), "finite"),
        (named(w=Array(np.zeros((0, 3), np.float32))), "finite"),
        (ArrayRecord({"": Array(np.zeros(3, np.float32))}), "arrays"),
        (ArrayRecord({"x" * 257: Array(np.zeros(3, np.float32))}), "arrays"),
        (ArrayRecord({"\x1b[2J": Array(np.zeros(3, np.float32))}), "arrays"),
    ],
)
def test_a_model_that_is_none_is_the_senders_problem(record: ArrayRecord, check: str) -> None:
    with pytest.raises(ProtocolError, match=f"silo 'silo' failed the check '{check}'"):
        read_model(record, "silo")
