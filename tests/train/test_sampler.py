import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.core.orders import Cursor
from fedsync.train.batches import Sampler


@given(
    examples=st.integers(1, 50),
    counts=st.lists(st.integers(1, 120), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_no_sample_twice_before_all_once(examples: int, counts: list[int], seed: int) -> None:
    sampler, cursor = Sampler(examples, seed, "a"), Cursor()
    taken = []
    for count in counts:
        rows, cursor = sampler.take(cursor, count)
        assert len(rows) == count
        taken.extend(rows.tolist())
    for start in range(0, len(taken), examples):
        epoch = taken[start : start + examples]
        assert len(set(epoch)) == len(epoch)
        assert set(epoch) <= set(range(examples))
    assert cursor == sampler.after(Cursor(), len(taken)) == Cursor(*divmod(len(taken), examples))


@given(examples=st.integers(1, 30), first=st.integers(1, 70), second=st.integers(1, 70))
def test_a_new_process_goes_on_where_the_old_one_stopped(examples: int, first: int, second: int) -> None:
    whole, _ = Sampler(examples, 5, "a").take(Cursor(), first + second)
    head, cursor = Sampler(examples, 5, "a").take(Cursor(), first)
    tail, _ = Sampler(examples, 5, "a").take(cursor, second)
    np.testing.assert_array_equal(np.concatenate([head, tail]), whole)


def test_silos_seeds_and_epochs_have_their_own_order() -> None:
    orders = {
        tuple(Sampler(20, seed, silo).take(Cursor(epoch), 20)[0].tolist())
        for seed in (1, 2)
        for silo in ("a", "b")
        for epoch in (0, 1)
    }
    assert len(orders) == 8


def test_a_cursor_beyond_the_data_starts_the_next_epoch() -> None:
    sampler = Sampler(10, 1, "a")
    rows, cursor = sampler.take(Cursor(2, 15), 4)
    np.testing.assert_array_equal(rows, sampler.take(Cursor(3, 0), 4)[0])
    assert cursor == Cursor(3, 4)


def test_nothing_to_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Sampler(3, 1, "a").take(Cursor(), 0)
