"""ZipLine and its rivals: examples by hand, agreement on random tables, the published claims that do not hold.

The paper's figures give no times, so the examples are our own; one follows the step counts of figure 8b.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsync.policies.barrier.kinds.elastic import METHODS, SyncPoint, find_sync_point

EXACT = [name for name, exact in METHODS.items() if exact]
LARGE = [name for name in EXACT if name != "naive"]
WRONG_SIDE = [[0, 0], [3, 3], [-2, 3], [0, 5]]  # the nearest end lies on the wrong side of every designated one


def outcome(point: SyncPoint) -> tuple[float, float, list[int]]:
    return point.time, point.waiting, point.steps.tolist()


def tables(
    values: st.SearchStrategy[Any], silos: int = 4, steps: int = 4, min_silos: int = 1
) -> st.SearchStrategy[NDArray[Any]]:
    """Tables of ascending rows, shape [min_silos..silos, 1..steps]."""

    def of_shape(shape: tuple[int, int]) -> st.SearchStrategy[NDArray[Any]]:
        n, r = shape
        row = st.lists(values, min_size=r, max_size=r).map(sorted)
        return st.lists(row, min_size=n, max_size=n).map(np.array)

    return st.tuples(st.integers(min_silos, silos), st.integers(1, steps)).flatmap(of_shape)


crowded = st.integers(0, 7)  # ties between silos and within a row
wide = st.integers(-(2**62), 2**62 - 1)  # the widest span that int64 differences hold
rounded = st.sampled_from([0.1, 0.2, 0.3, 0.4, 0.7, 0.1 + 0.2, 1e16, 1e16 + 2])  # spreads that tie only once rounded
finite = st.floats(-8e307, 8e307)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.parametrize(
    ("ends", "time", "waiting", "steps"),
    [
        ([[2, 4, 6], [3, 6, 9]], 6, 0, [3, 2]),  # periods 2 and 3 meet at 6
        ([[2, 4, 6, 8, 10, 12], [3, 6, 9, 12, 15, 18], [4, 8, 12, 16, 20, 24]], 12, 0, [6, 4, 3]),
        ([[1.0, 2.5], [2.25, 4.0], [2.0, 3.0]], 2.5, 0.5, [2, 1, 1]),
        ([[1, 5], [2, 6]], 2, 1, [1, 1]),  # {1, 2} and {5, 6} tie: the earlier
        ([[0, 3], [2, 9]], 3, 1, [2, 1]),  # {3, 2} beats {0, 2}
        ([[1, 2], [10, 11]], 10, 8, [2, 1]),  # silo 0 has no end near silo 1's: its last
        ([[1, 2], [3, 4]], 3, 1, [2, 1]),
        ([[5, 8], [7, 8], [7, 9]], 8, 1, [2, 2, 1]),  # {8, 7, 7} and {8, 8, 7} tie: the latest steps
        ([[1, 1], [1, 2]], 1, 0, [2, 1]),  # a step of no duration is taken
        ([[4, 4, 4], [1, 4, 4]], 4, 0, [3, 3]),
        ([[3], [1], [2]], 3, 2, [1, 1, 1]),  # one step ahead is plain BSP
        ([[4, 5]], 4, 0, [1]),  # one silo waits for nobody
        (WRONG_SIDE, 3, 3, [2, 2, 2, 1]),
    ],
)
def test_point_matches_hand_computed(
    method: str, ends: list[list[float]], time: float, waiting: float, steps: list[int]
) -> None:
    point = find_sync_point(ends, method)
    assert outcome(point) == (time, waiting, steps)
    assert point.steps.dtype == np.int64


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=300)
@given(tables(crowded) | tables(wide, silos=3, steps=3) | tables(rounded) | tables(finite))
def test_exact_methods_agree_with_naive(ends: NDArray[Any]) -> None:
    expected = outcome(find_sync_point(ends, "naive"))
    for method in LARGE:
        assert outcome(find_sync_point(ends, method)) == expected, method


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(1, 30),
    r=st.integers(1, 30),
    top=st.sampled_from([None, 10, 100, 10**6]),
)
def test_exact_methods_agree_on_larger_tables(seed: int, n: int, r: int, top: int | None) -> None:
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.random((n, r)) if top is None else rng.integers(0, top, (n, r)))
    expected = outcome(find_sync_point(ends, "zipline"))
    for method in LARGE:
        assert outcome(find_sync_point(ends, method)) == expected, method


@settings(deadline=None, derandomize=True, max_examples=200)
@given(ends=tables(crowded) | tables(rounded) | tables(finite), method=st.sampled_from(list(METHODS)))
def test_point_is_a_window_of_one_end_a_silo(ends: NDArray[Any], method: str) -> None:
    before = ends.copy()
    point = find_sync_point(ends, method)
    assert point.steps.shape == (len(ends),)
    chosen = [row[step - 1] for row, step in zip(ends.tolist(), point.steps.tolist(), strict=True)]
    assert point.time == max(chosen)
    assert point.waiting == max(chosen) - min(chosen)
    assert all(0 <= point.time - end <= point.waiting for end in chosen)
    assert point.waiting >= find_sync_point(ends).waiting
    np.testing.assert_array_equal(ends, before)


@settings(deadline=None, derandomize=True)
@given(ends=tables(crowded), data=st.data())
def test_point_depends_neither_on_the_order_of_silos_nor_on_the_origin(ends: NDArray[Any], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(ends))))
    shift = data.draw(st.integers(-100, 100))
    point = find_sync_point(ends)
    moved = find_sync_point(ends[order] + shift)
    assert outcome(moved) == (point.time + shift, point.waiting, point.steps[order].tolist())


@settings(deadline=None, derandomize=True, max_examples=200)
@given(tables(crowded, silos=3, steps=5))
def test_full_grid_scan_finds_the_least_spread_up_to_three_silos(ends: NDArray[Any]) -> None:
    assert find_sync_point(ends, "full_grid_scan").waiting == find_sync_point(ends).waiting


def test_grid_scan_misses_the_least_spread() -> None:
    """By hand: silo 0 ends first. Around 0: {0, 6, 1}, spread 6. Around 10: {10, 6, 14}, spread 8."""
    ends = [[0, 10], [6, 15], [1, 14]]
    assert outcome(find_sync_point(ends, "grid_scan")) == (6, 6, [1, 1, 1])
    assert outcome(find_sync_point(ends, "full_grid_scan")) == (15, 5, [2, 2, 2])  # around 14 or 15
