"""Between which updates masks hide one."""

import pytest

from fedsync.cipher.masking.masked_work import WorkDone, comparable, most_comparable
from fedsync.common.errors import ProtocolError

EQUAL = WorkDone(10, 80, 10 * 2**20, 0)


def works(*steps: int) -> dict[str, list[WorkDone]]:
    return {name: [WorkDone(each, 8 * each, each * 2**20, 0)] for name, each in zip("abcdefgh", steps, strict=False)}


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        (WorkDone(40, 320, 40 * 2**20, 0), True),  # four times all of it
        (WorkDone(41, 80, 10 * 2**20, 0), False),
        (WorkDone(10, 321, 10 * 2**20, 0), False),
        (WorkDone(10, 19, 10 * 2**20, 0), False),
        (WorkDone(10, 80, 41 * 2**20, 0), False),
        (WorkDone(10, 80, 10 * 2**20, 1), False),  # a budget, where others have none
    ],
)
def test_no_figure_may_be_more_than_four_times_another(other: WorkDone, alike: bool) -> None:
    assert comparable([EQUAL, other], 4.0) == comparable([other, EQUAL, EQUAL], 4.0) == alike


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ((10, 20, 40), "abc"),
        ((10, 20, 41), "bc"),  # of two sets of two the one with more work
        ((1, 1, 1, 200), "abc"),
        ((1, 4, 16, 16, 17), "cde"),
        ((0, 0, 0), "abc"),  # orders that only score
    ],
)
def test_a_server_adds_up_the_most_that_are_comparable(steps: tuple[int, ...], chosen: str) -> None:
    assert most_comparable(works(*steps), 4.0) == set(chosen)


def test_what_is_in_a_region_s_sum_counts_as_a_whole() -> None:
    found = works(1, 10, 10)
    found["a"].append(EQUAL)
    assert most_comparable(found, 4.0) == {"b", "c"}


def test_other_bytes_are_no_work() -> None:
    assert WorkDone.unpack(EQUAL.pack(), "a") == EQUAL
    for data in (b"", EQUAL.pack()[:-1], b"\xff" * WorkDone.BYTES):
        with pytest.raises(ProtocolError, match="work"):
            WorkDone.unpack(data, "server")
