"""Payloads on the wire, small and large, and models whose layout is the peer's say."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedsync.common.errors import ProtocolError
from fedsync.flower.payloads import SMALL_BYTES, pack, read_model, unpack
from fedsync.model.layout import Layout, as_vector


@pytest.mark.parametrize(("size", "small"), [(0, True), (SMALL_BYTES, True), (SMALL_BYTES + 1, False)])
def test_bytes_come_as_they_went_and_not_more(size: int, small: bool) -> None:
    sealed = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    packed = pack(sealed)
    assert isinstance(packed, bytes) is small
    np.testing.assert_array_equal(unpack(packed, size, "silo"), sealed)
    with pytest.raises(ProtocolError, match=f"{size} bytes, at most {size - 1}"):
        unpack(packed, size - 1, "silo")


@pytest.mark.parametrize("nbytes", [0, 7, 9, 16])
def test_bytes_of_another_length_are_no_vector(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"it has {nbytes} bytes, not 8"):
        as_vector(np.zeros(nbytes, np.uint8), Layout(("w",), ((2,),)), "silo")


RAW = Array("uint8", (8,), "raw", bytes(8))


@pytest.mark.parametrize("record", [{}, {"other": RAW}, {"flat": RAW, "more": RAW}, {"flat": Array(np.zeros(2))}])
def test_what_is_not_one_raw_array_is_no_payload(record: dict[str, Array]) -> None:
    """So that no loader of NumPy's sees a peer's header."""
    with pytest.raises(ProtocolError, match="instead of one array"):
        unpack(ArrayRecord(record), 100, "silo")


def test_what_an_array_claims_does_not_count() -> None:
    lying = Array("object", (2**50,), "raw", bytes(range(8)))
    np.testing.assert_array_equal(unpack(ArrayRecord({"flat": lying}), 8, "silo"), np.arange(8))


@pytest.mark.parametrize(
    ("names", "shapes", "values", "check"),
    [
        (("w",), ((2**42,),), [1.0], "shape"),
        (("w",), ((-5,),), [1.0], "shape"),
        (("w",), ((1,) * 33,), [1.0], "shape"),
        (("w",), ((30, 30),), [1.0] * 250, "length"),
        (("w",), ((0, 900, 900),), [1.0] * 1000, "length"),
        (("a", "b"), ((3,), (3,)), [1.0] * 5, "length"),
        (("a", "b"), ((0, *(4,) * 31), (1,)), [1.0], "length"),  # of as many bytes as there are
        (("w",), ((3,),), [1.0] * 4, "length"),
        (("w",), ((2,),), [1.0, np.nan], "finite"),
        (("w",), ((2,),), [1.0, -np.inf], "finite"),
        ((), (), [], "finite"),
        (("w",), ((0, 3),), [], "shape"),
        (("",), ((1,),), [1.0], "names"),
        (("x" * 257,), ((1,),), [1.0], "names"),
        (("w", "w"), ((1,), (1,)), [1.0, 1.0], "names"),
        (("w",), (), [1.0], "names"),
        (("w",), ((1,),), None, "message"),
    ],
)
def test_a_model_that_is_none_is_the_senders_problem(
    names: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], values: list[float] | None, check: str
) -> None:
    payload = None if values is None else np.array(values, np.float32).view(np.uint8)
    with pytest.raises(ProtocolError, match=f"silo 'silo' failed the check '{check}'"):
        read_model(Layout(names, shapes), payload, "silo")
