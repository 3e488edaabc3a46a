"""Pauses between tries, computed by hand."""

import pytest

from fedsync.common.backoff import Backoff


@pytest.mark.parametrize(
    ("backoff", "pauses"),
    [
        (Backoff(0.5, 60.0), [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]),
        (Backoff(0.1, 1.0, factor=3.0), [0.1, 0.3, 0.9, 1.0]),
        (Backoff(2.0, 1.0), [1.0, 1.0]),  # the longest binds at once
        (Backoff(3.0, 9.0, factor=1.0), [3.0, 3.0, 3.0]),
    ],
)
def test_pauses_grow_up_to_the_longest(backoff: Backoff, pauses: list[float]) -> None:
    assert [backoff.pause_s(tries) for tries in range(len(pauses))] == pytest.approx(pauses)
    assert backoff.pause_s(10**9) == pauses[-1]
