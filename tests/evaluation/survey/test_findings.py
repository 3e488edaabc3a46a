"""What follows from sums, and what people are told of it."""

import itertools
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedsync.common.errors import ConfigError
from fedsync.evaluation.survey.findings import ColumnScale, hide_small, scale_of, scales_of, told
from fedsync.evaluation.survey.table_sums import Columns, NumberSums, SurveyForm, SurveySums, first_vector, read_sums

LEAST = 5


def sums_of(cells: list[float], silos: int = 2) -> SurveySums:
    """Of one column, dealt to silos in turn."""
    form = SurveyForm(silos, 2, (("x", True),))
    total = np.zeros(form.layout.size, dtype=np.float32)
    for place in range(silos):
        own = np.array(cells[place::silos])
        total += first_vector(form, place, Columns("", (len(own), 0), {"x": own}, {}, ("x",))) / np.float32(silos)
    found = read_sums(form, total)
    assert found is not None
    return found


def test_mean_and_deviation_are_those_of_pandas_on_all_rows() -> None:
    rng = np.random.default_rng(1)
    cells = np.round(rng.normal(120, 17, size=301), 1)
    cells[rng.random(301) < 0.1] = np.nan
    pooled = pd.Series(cells)
    scale = scale_of(sums_of(cells.tolist(), 3).numbers["x"])
    # A cell is rounded by half a unit at most.
    assert scale.mean == pytest.approx(pooled.mean(), abs=2.0**-41 + 1e-12)
    assert scale.deviation == pytest.approx(pooled.std(ddof=0), rel=1e-12)
    assert abs(scale.deviation - pooled.std(ddof=1)) > 1e-3, "it divides by n, as each silo's own does"


def test_columns_of_one_value_are_told_apart_by_nothing() -> None:
    assert scales_of(sums_of([0.1] * 7), LEAST) == {"x": ColumnScale(pytest.approx(0.1, abs=1e-12), 1.0)}
    found = told(sums_of([0.1] * 7), LEAST, {}, 0)["columns"]
    assert (found[0]["mean"], found[0]["deviation"]) == (0.1, 0.0)


@pytest.mark.parametrize("known", [0, 1, 4])
def test_a_mean_of_too_few_is_not_used(known: int) -> None:
    cells = [1.5] * known + [float("nan")] * (20 - known)
    with pytest.raises(ConfigError, match=r"column 'x': fewer than 5 cells are known"):
        scales_of(sums_of(cells), LEAST)
    column = told(sums_of(cells), LEAST, {}, 0)["columns"][0]
    assert "mean" not in column and column["known"] in (0, None)


def test_a_mean_of_just_enough_is_told_in_four_digits() -> None:
    sums = sums_of([123.45678, 130.1, 99.9, 101.01, 117.3])
    assert scales_of(sums, LEAST)["x"].mean == pytest.approx(114.353356)
    assert told(sums, LEAST, {}, 0)["columns"][0]["mean"] == 114.4


def possible(shown: list[int | str | None], total: int) -> list[tuple[int, ...]]:
    """All tables that look like this, with this sum."""
    choices = [
        [one] if isinstance(one, int) else range(1, LEAST) if isinstance(one, str) else range(total + 1)
        for one in shown
    ]
    return [table for table in itertools.product(*choices) if sum(table) == total]


@pytest.mark.slow
def test_no_count_that_is_too_small_follows_from_the_others() -> None:
    """All tables of four cells up to 12: each hidden one may be anything that is too small, as far as one can see."""
    seen = 0
    for counts in itertools.product((0, 1, 2, 4, 5, 6, 9, 12), repeat=4):
        shown = hide_small(counts, LEAST)
        assert all(one == count for one, count in zip(shown, counts, strict=True) if isinstance(one, int))
        assert not any(one == count and 0 < count < LEAST for one, count in zip(shown, counts, strict=True))
        tables = possible(shown, sum(counts))
        for at, one in enumerate(shown):
            if isinstance(one, str):
                seen += 1
                assert {table[at] for table in tables} == set(range(1, LEAST)), (counts, shown)
    assert seen > 1000


@pytest.mark.parametrize(
    ("bins", "shown"),
    [
        ((40, 30, 28), [40, 30, None]),  # cells in bins and missing ones add up to the rows
        ((40, 30, 3), [40, None, "<5"]),  # of other silos than the moments: one was lost between the rounds
    ],
)
def test_what_is_known_of_a_column_does_not_tell_what_is_missing(bins: tuple[int, ...], shown: list[Any]) -> None:
    sums = SurveySums(2, 100, (50, 50), {"x": NumberSums(98, 0, 98 << 80, bins)}, {"town": 97})
    number, text = told(sums, LEAST, {}, 3)["columns"]
    assert (number["known"], number["missing"], number["counts"]) == (None, "<5", shown)
    assert (text["known"], text["missing"]) == (None, "<5")
