"""How vectors travel: sizes, spans, and what is refused before anything is made of it."""

import numpy as np
import pytest

from fedsync.common.errors import ProtocolError
from fedsync.model.plain_wire import FP32

VECTOR = np.arange(-4, 4, dtype=np.float32) / 3


def test_float32_travels_as_it_is() -> None:
    payload = FP32.encode(VECTOR)
    assert np.shares_memory(payload, VECTOR), "nothing is copied"
    assert FP32.payload_bytes(8) == payload.nbytes
    for sent in (payload, payload.view(np.uint8)):
        FP32.check(sent, 8, "a")
        np.testing.assert_array_equal(FP32.decode(sent, 0, 8), VECTOR)
        span = FP32.decode(sent, 3, 5)
        np.testing.assert_array_equal(span, VECTOR[3:5])
        assert np.shares_memory(span, VECTOR), "nothing is copied"


@pytest.mark.parametrize("nbytes", [0, 31, 33, 64])
def test_bytes_of_another_length_are_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolError, match=f"'length': it has {nbytes} bytes, not 32"):
        FP32.check(np.zeros(nbytes, np.uint8), 8, "a")
