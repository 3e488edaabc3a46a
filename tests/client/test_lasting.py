"""Workers that stay from order to order bring what each order asks for, and nothing that another asked for."""

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fedsync.client.lasting import LastingLoader, Piece
from fedsync.common.errors import UserCodeError
from fedsync.core.orders import Cursor
from fedsync.train.batches import Sampler
from fedsync.train.guests.guest_code import guarded

EXAMPLES = 40


class Numbers(Dataset[Any]):
    """A sample is its number, what torch draws meanwhile, and the process that read it; ``bad`` cannot be read."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, row: int) -> tuple[int, torch.Tensor, int]:
        if row == self.bad:
            raise KeyError(f"no sample {row}")
        return row, torch.rand(()), os.getpid()


def loader(dataset: Dataset[Any] | None = None, workers: int = 2, **options: Any) -> LastingLoader[Any]:
    return LastingLoader(dataset or Numbers(), {"num_workers": workers, **options})


def walk(cursor: Cursor, size: int, piece: int = 99) -> Iterator[Piece]:
    return Sampler(EXAMPLES, 7, "silo-0").walk(cursor, size, piece)


def rows(cursor: Cursor, size: int, steps: int) -> list[list[int]]:
    return [piece.rows for piece in islice(walk(cursor, size), steps)]


def test_orders_of_any_size_get_their_samples_from_the_same_workers() -> None:
    subject = loader()
    cursor, sampler, processes = Cursor(), Sampler(EXAMPLES, 7, "silo-0"), set()
    # As before, larger, smaller, cut off in the middle, repeated, and longer than the data.
    for size, steps, taken in (
        (4, 3, 3),
        (4, 3, 3),
        (9, 2, 2),
        (3, 7, 7),
        (3, 7, 2),
        (3, 7, 7),
        (3, 1, 1),
        (5, 12, 12),
    ):
        batches = list(islice(subject.order(walk(cursor, size), steps), taken))
        assert [batch[0].tolist() for batch in batches] == rows(cursor, size, taken)
        processes |= {number for batch in batches for number in batch[2].tolist()}
        cursor = sampler.after(cursor, size * taken)
    assert len(processes) == 2
    assert os.getpid() not in processes


@pytest.mark.parametrize("workers", [1, 3])
def test_what_is_drawn_goes_by_the_place_in_the_data_alone(workers: int) -> None:
    fresh = loader(workers=1)
    expected = [batch[1] for batch in fresh.order(walk(Cursor(), 4), 6)]
    used = loader(workers=workers)
    list(islice(used.order(walk(Cursor(3, 1), 5), 4), 1))
    state = torch.get_rng_state()
    for found, wanted in zip(used.order(walk(Cursor(), 4), 6), expected, strict=True):
        assert torch.equal(found[1], wanted)
    assert torch.equal(torch.get_rng_state(), state)
    later = [batch[1] for batch in used.order(walk(Cursor(1), 4), 6)]
    assert not any(torch.equal(one, other) for one, other in zip(later, expected, strict=True))


def test_the_next_order_is_fetched_while_nobody_asks() -> None:
    subject = loader()
    list(subject.order(walk(Cursor(), 4), 3))
    waiting = [request.piece for request in subject._feed._asked if request.piece]
    assert [piece.rows for piece in waiting] == rows(Cursor(0, 12), 4, 2), "a piece each worker"
    list(subject.order(walk(Cursor(0, 12), 5), 3))
    assert not [request for request in subject._feed._asked if request.piece], "sizes change: nobody can know"


def test_an_error_counts_where_its_piece_is_wanted_and_the_next_order_goes_on() -> None:
    bad = rows(Cursor(), 4, 5)[4][0]
    subject = loader(Numbers(bad))
    list(subject.order(walk(Cursor(), 4), 4))  # the fifth was fetched, and failed, but nobody has asked for it
    assert len(list(subject.order(walk(Cursor(0, 20), 3), 2))) == 2
    with pytest.raises(KeyError, match=f"no sample {bad}"):
        list(subject.order(walk(Cursor(), 4), 5))
    assert [batch[0].tolist() for batch in subject.order(walk(Cursor(), 4), 4)] == rows(Cursor(), 4, 4)


def test_an_error_of_a_worker_is_told_by_its_own_line_and_words() -> None:
    with pytest.raises(UserCodeError, match=r"test_lasting.py, line 32: KeyError: 'no sample 7'$"), guarded():
        list(loader(Numbers(bad=7)).order(walk(Cursor(), 4), 10))


def test_a_worker_that_dies_ends_the_order_and_the_next_has_new_ones() -> None:
    class Deadly(Numbers):
        def __getitem__(self, row: int) -> Any:
            return super().__getitem__(row) if row != self.bad else os._exit(1)

    subject = loader(Deadly(rows(Cursor(), 4, 1)[0][2]), workers=1)
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(subject.order(walk(Cursor(), 4), 1))
    assert len(list(subject.order(walk(Cursor(0, 4), 4), 2))) == 2


def test_pieces_of_a_batch_have_their_own_seeds() -> None:
    pieces = list(islice(walk(Cursor(), 5, 2), 6))
    assert [len(piece.rows) for piece in pieces] == [2, 2, 1] * 2
    assert [row for piece in pieces for row in piece.rows] == Sampler(EXAMPLES, 7, "silo-0").take(Cursor(), 10)[
        0
    ].tolist()
    assert len({piece.seed for piece in pieces}) == 6
