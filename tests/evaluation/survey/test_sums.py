"""Sums of all silos: exact, the same in any order, and refused where no silos have such sums."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.evaluation.survey.findings import edges_of
from fedsync.evaluation.survey.table_sums import Columns, SurveyForm, SurveySums, first_vector, read_sums, second_vector
from fedsync.model.layout import Layout, Vector

FORM = SurveyForm(5, 3, (("a b.c", True), ("town", False), ("tiny", True)), bins=4)
UNIT = Fraction(1, 2**40)


def silo(seed: int, rows: int = 40) -> Columns:
    """Numbers of very different sizes, some missing, and one that no other silo comes near."""
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=rows) * 10.0 ** rng.integers(-6, 9, size=rows)
    wide[rng.random(rows) < 0.2] = np.nan
    counts = np.bincount(rng.integers(3, size=rows), minlength=3).tolist()
    tiny = np.where(rng.random(rows) < 0.5, np.nan, rng.normal(size=rows) * 1e-3)
    return Columns(
        f"{seed}.csv", counts, {"a b.c": wide, "tiny": tiny}, {"town": rows - seed}, ("a b.c", "town", "tiny")
    )


def mean_of(vectors: Sequence[Vector]) -> Vector:
    """As the server adds up in the clear: float32, one after the other."""
    total = np.zeros(FORM.layout.size, dtype=np.float32)
    for vector in vectors:
        total += vector * np.float32(1 / len(vectors))
    return total


def read(vector: Vector, form: SurveyForm = FORM) -> SurveySums:
    sums = read_sums(form, vector)
    assert sums is not None
    return sums


def summed(silos: Sequence[Columns], order: Sequence[int]) -> SurveySums:
    """The sums after both rounds, silos coming in this order."""
    first = mean_of([first_vector(FORM, place, silos[place]) for place in order])
    edges = edges_of(read(first), {}, FORM.bins)
    return read(first + mean_of([second_vector(FORM, place, silos[place], edges) for place in order]))


def exact(cells: NDArray[np.float64]) -> tuple[int, Fraction, Fraction]:
    """Count, sum and sum of squares of cells, each rounded to units first."""
    units = [round(Fraction(cell) / UNIT) * UNIT for cell in cells[~np.isnan(cells)].tolist()]
    return len(units), sum(units, Fraction()), sum((unit * unit for unit in units), Fraction())


def test_sums_are_those_of_all_cells_to_the_last_unit() -> None:
    silos = [silo(seed) for seed in range(1, 5)]
    sums = summed(silos, range(4))
    for name in ("a b.c", "tiny"):
        cells = np.concatenate([one.numbers[name] for one in silos])
        found = sums.numbers[name]
        assert (found.known, found.total * UNIT, found.squares * UNIT**2) == exact(cells)
    assert (sums.silos, sums.rows, sums.texts) == (4, 160, {"town": 160 - 1 - 2 - 3 - 4})
    assert sums.classes == tuple(map(sum, zip(*(one.classes for one in silos), strict=True)))


def test_the_order_of_silos_changes_no_bit() -> None:
    silos = [silo(seed) for seed in range(1, 5)]
    assert len({repr(summed(silos, order)) for order in permutations(range(4))}) == 1


def test_most_silos_give_whole_numbers_back() -> None:
    """128 of them, added up in float32, in a form that has a place for each."""
    form = SurveyForm(128, 2, (("x", True),))
    rng = np.random.default_rng(3)
    total, cells = np.zeros(form.layout.size, dtype=np.float32), []
    for place in range(128):
        cells.append(rng.normal(size=9) * 1e12)
        total += first_vector(form, place, Columns("", (4, 5), {"x": cells[-1]}, {}, ("x",))) * np.float32(1 / 128)
    sums = read(total, form)
    assert (sums.silos, sums.rows) == (128, 128 * 9)
    found = sums.numbers["x"]
    assert (found.known, found.total * UNIT, found.squares * UNIT**2) == exact(np.concatenate(cells))


def test_bins_are_those_of_common_edges_and_open_at_both_ends() -> None:
    silos = [silo(seed) for seed in range(1, 4)]
    sums = summed(silos, range(3))
    for name, edges in edges_of(sums, {"tiny": [-0.001, 0.001]}, FORM.bins).items():
        cells = np.concatenate([one.numbers[name] for one in silos])
        cells = cells[~np.isnan(cells)]
        inner = np.clip(cells, np.nextafter(edges[0], np.inf), np.nextafter(edges[-1], -np.inf))
        expected = np.histogram(inner, edges)[0]
        both = {**edges_of(sums, {}, FORM.bins), name: edges}
        vectors = [first_vector(FORM, at, one) + second_vector(FORM, at, one, both) for at, one in enumerate(silos)]
        found = read(mean_of(vectors)).numbers[name].bins
        assert found == tuple(expected)
        assert sum(found) == len(cells)


def test_silos_of_the_second_round_may_be_others() -> None:
    """One is lost between the rounds, another has come: moments are of those of the first, bins of the second."""
    silos = [silo(seed) for seed in range(1, 5)]
    first = mean_of([first_vector(FORM, place, silos[place]) for place in (0, 1, 2)])
    edges = edges_of(read(first), {}, FORM.bins)
    both = read(first + mean_of([second_vector(FORM, place, silos[place], edges) for place in (0, 3)]))
    assert (both.silos, both.rows) == (3, 120)
    known = sum(int((~np.isnan(silos[place].numbers["tiny"])).sum()) for place in (0, 3))
    assert sum(both.numbers["tiny"].bins) == known


def test_nothing_is_there_before_the_first_round() -> None:
    assert read_sums(FORM, np.zeros(FORM.layout.size, dtype=np.float32)) is None


def test_a_cell_that_is_too_large_is_refused_without_telling_it() -> None:
    columns = Columns("x.csv", (1, 0, 0), {"a b.c": np.array([2.0**43]), "tiny": np.array([0.0])}, {"town": 1}, ())
    with pytest.raises(ConfigError, match=r"x\.csv, column 'a b\.c': a cell is beyond 4\.398e\+12") as error:
        first_vector(FORM, 0, columns)
    assert "8.79" not in str(error.value)


def spoil(change: int, by: float) -> Vector:
    vector = mean_of([first_vector(FORM, place, silo(place + 1)) for place in range(3)])
    vector[change] += np.float32(by)
    return vector


@pytest.mark.parametrize(
    ("change", "by", "problem"),
    [
        (-1, -0.5, "guard"),  # what clipping does
        (2 * 5 + 1, 0.01, "whole"),
        (2 * 5 + 1, 1 / 16 / 3, "rows"),  # one row more than the classes have
        (0, -5.2, "142 silos, at most 128"),
        (2 * 5 + 1 + 17, -60.0, "more, or fewer"),  # known cells below none
        (2 * 5 + 1 + 17 + 4 + 15 + 24, -1 / 16 / 3, "no numbers have"),  # squares that add up to less than nothing
    ],
)
def test_sums_that_no_silos_have_are_refused(change: int, by: float, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        read_sums(FORM, spoil(change, by))


def test_a_form_follows_from_its_layout() -> None:
    assert SurveyForm.of(FORM.layout, FORM.bins) == FORM


@pytest.mark.parametrize(
    "layout",
    [
        Layout(("weight",), ((3,),)),
        Layout(("silos", "rows", "number x"), ((11,), (17,), (44,))),
        Layout(("silos", "rows", "colour x"), ((11,), (17,), (61,))),
        Layout(("silos", "rows"), ((10,), (17,))),
        Layout(("rows", "silos"), ((17,), (11,))),
    ],
)
def test_a_layout_of_something_else_is_refused(layout: Layout) -> None:
    with pytest.raises(ProtocolError, match="layout"):
        SurveyForm.of(layout, FORM.bins)
