"""A model as one flat vector, and back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.model.layout import Layout

ARRAYS = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scale": np.float32(7).reshape(()),
    "nothing": np.zeros((0, 4), dtype=np.float32),
    "bias": np.array([8, 9], dtype=np.float32),
}


def test_a_layout_is_in_order_and_a_vector_row_by_row() -> None:
    layout = Layout.of(ARRAYS)
    assert (layout.names, layout.shapes) == (("weight", "scale", "nothing", "bias"), ((2, 3), (), (0, 4), (2,)))
    assert (layout.sizes, layout.size, layout.nbytes) == ((6, 1, 0, 2), 9, 36)
    assert layout.join(ARRAYS).tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]


def test_join_goes_by_name_and_makes_float32() -> None:
    layout, shuffled = Layout.of(ARRAYS), {name: ARRAYS[name].astype(np.int64) for name in reversed(ARRAYS)}
    assert layout.join(shuffled).dtype == np.float32
    np.testing.assert_array_equal(layout.join(shuffled), layout.join(ARRAYS))
    with pytest.raises(KeyError):
        layout.join({"weight": ARRAYS["weight"]})


def test_split_gives_views() -> None:
    vector = np.zeros(9, dtype=np.float32)
    parts = Layout.of(ARRAYS).split(vector)
    parts["bias"][1] = 5
    assert vector[8] == 5


@given(st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=5))
def test_split_undoes_join(shapes: list[tuple[int, ...]]) -> None:
    random = np.random.default_rng(1)
    arrays = {str(i): random.random(shape).astype(np.float32) for i, shape in enumerate(shapes)}
    layout = Layout.of(arrays)
    parts = layout.split(layout.join(arrays))
    assert list(parts) == list(arrays)
    for name, array in arrays.items():
        assert parts[name].shape == array.shape
        np.testing.assert_array_equal(parts[name], array)


@pytest.mark.parametrize("place", [0, 300_000, 599_999])
def test_a_value_that_is_no_number_is_found_wherever_it_is(place: int) -> None:
    layout = Layout(("x",), ((600_000,),))
    vector = np.zeros(layout.size, dtype=np.float32)
    layout.check(vector)
    vector[place] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        layout.check(vector)
