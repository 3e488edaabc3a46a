"""Sums of survival analysis: cells have enough persons, and means that no silos made are refused."""

import json
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2
from statsmodels.duration.hazard_regression import PHReg

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.config.tasks.survival_task import SurvivalConfig
from fedsync.extras.survival.survival_command import _tables
from fedsync.extras.survival.survival_estimates import (
    chi_squared_tail,
    cox_fit,
    kaplan_meier,
    log_rank,
    next_beta,
    told,
)
from fedsync.extras.survival.survival_sums import (
    SurvivalForm,
    SurvivalRows,
    SurvivalSums,
    cells_of,
    first_vector,
    read_survival,
    step_vector,
)
from fedsync.model.layout import Vector
from fedsync.observe.terminal import Terminal


def form_of(least: int = 1, steps: int = 3, places: int = 3) -> SurvivalForm:
    return SurvivalForm(places, tuple(map(float, range(1, 9))), ("x", "y"), ("age", "dose"), steps, least)


def rows_of(seed: int, count: int = 40) -> SurvivalRows:
    rng = np.random.default_rng(seed)
    times, events = rng.integers(1, 10, count).astype(float), rng.random(count) < 0.6
    return SurvivalRows(times, events, rng.integers(0, 2, count), rng.normal(size=(count, 2)))


def mean(parts: list[Vector]) -> Vector:
    return np.mean(parts, axis=0, dtype=np.float32)


def after(form: SurvivalForm, silos: list[SurvivalRows], rounds: int) -> Vector:
    vector = mean([first_vector(form, place, rows) for place, rows in enumerate(silos)])
    for _ in range(rounds - 1):
        sums = read(form, vector)
        beta = next_beta(form, sums)
        vector = vector + mean([step_vector(form, place, rows, sums, beta) for place, rows in enumerate(silos)])
    return vector


def read(form: SurvivalForm, vector: Vector) -> SurvivalSums:
    sums = read_survival(form, vector)
    assert sums is not None
    return sums


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=40), least=st.integers(1, 8))
def test_no_cell_has_fewer_persons_than_the_least(counts: list[int], least: int) -> None:
    table = np.array(counts)
    if 0 < table.sum() < least:
        with pytest.raises(ConfigError, match=r"fewer than .* End the grid later, add silos, or leave"):
            cells_of(table, least, "events")
        return
    cells = cells_of(table, least, "events")
    persons = np.bincount(cells.of, weights=table)
    assert (persons[: len(cells.ends)] >= least).all() and persons.sum() == table.sum()
    assert persons[len(cells.ends) :].sum() == 0 or not len(cells.ends)
    for at in np.flatnonzero(table):
        assert cells.ends[cells.of[at]] >= at, "times are rounded up, never down"
    if least == 1:
        assert cells.ends.tolist() == np.flatnonzero(table).tolist(), "nothing is rounded"


@pytest.mark.parametrize("least", [1, 6])
def test_the_sums_are_those_of_all_rows(least: int) -> None:
    form, silos = form_of(least), [rows_of(seed) for seed in range(3)]
    whole = SurvivalRows(*(np.concatenate(parts) for parts in zip(*(
        (rows.times, rows.events, rows.groups, rows.covariates) for rows in silos), strict=True)))  # fmt: skip
    apart = read(form, after(form, silos, form.rounds))
    alone = read(form_of(least, places=1), after(form_of(least, places=1), [whole], form.rounds))
    np.testing.assert_array_equal(apart.counts, alone.counts)
    beyond = whole.times > 8
    assert apart.counts[:, :, 0].sum() == (whole.events & ~beyond).sum(), "beyond the grid all are censored"
    np.testing.assert_allclose(cox_fit(form, apart).coefficients, cox_fit(form, alone).coefficients, atol=1e-7)
    for step in apart.steps:
        used = step.events[step.events[:, 0] > 0]
        assert len(used) == len(cells_of(apart.complete[:, 0], least, "events").ends)


@pytest.mark.parametrize(("every", "until", "last"), [(30.4, 91.2, 3), (0.3, 0.9, 3), (0.7, 4.3, 7), (30.0, 10.0, 1)])
def test_times_of_a_grid_are_multiples_as_people_write_them(every: float, until: float, last: int) -> None:
    """A person at 91.2 counts at 91.2, which is three months of 30.4 days, and not a month later."""
    times = SurvivalConfig.model_validate({"grid": {"every": every, "until": until}}).times
    assert [f"{time:g}" for time in times] == [f"{every * number:g}" for number in range(1, last + 1)]
    assert all(time == float(f"{time:.12g}") for time in times)


def test_curves_and_test_by_hand() -> None:
    # Group x: events at 1 and 3, censored at 2. Group y: events at 2 and 3, one more followed to the end.
    counts = np.zeros((2, 3, 2), dtype=np.int64)
    counts[0] = [[1, 0], [0, 1], [1, 0]]
    counts[1] = [[0, 0], [1, 0], [1, 1]]
    assert kaplan_meier(counts[0]).survival.tolist() == pytest.approx([2 / 3, 2 / 3, 0.0])
    assert kaplan_meier(counts[1]).survival.tolist() == pytest.approx([1.0, 2 / 3, 1 / 3])
    # Expected events of x: 3/6 + 2/5 + 2 * 1/3. Variances: 1/4, 6/25, and 2 * (1/3)(2/3) * (3 - 2)/(3 - 1).
    expected, variance = 1 / 2 + 2 / 5 + 2 / 3, 1 / 4 + 6 / 25 + 2 / 9
    assert log_rank(counts).statistic == pytest.approx((2 - expected) ** 2 / variance)


@pytest.mark.parametrize("degrees", range(1, 8))
@pytest.mark.parametrize("value", [0.0, 0.3, 3.84, 40.0])
def test_the_tail_of_chi_squared(value: float, degrees: int) -> None:
    assert chi_squared_tail(value, degrees) == pytest.approx(chi2.sf(value, degrees), rel=1e-9)


def test_no_line_leaves_a_few_persons_behind() -> None:
    form = SurvivalForm(1, (1.0, 2.0, 8.0), (), (), 1, 5)
    times = np.array([1.0] * 6 + [2.0] * 6 + [8.0] * 3)
    rows = SurvivalRows(times, times < 8, np.zeros(15, dtype=np.int64), np.zeros((15, 0)))
    (curve,) = told(form, read(form, after(form, [rows], 1)))["curves"]
    assert (curve["times"], curve["left"]) == ([1.0], [9]), "three persons are left after the time 2"


@pytest.mark.parametrize(("gaps", "shown"), [(0, True), (2, False), (12, True)])
def test_a_few_persons_with_gaps_follow_from_no_numbers(gaps: int, shown: bool) -> None:
    form, silos = form_of(least=5), [rows_of(seed) for seed in range(3)]
    silos[0].covariates[np.flatnonzero(silos[0].events & (silos[0].times <= 8))[:gaps], 0] = np.nan
    found = told(form, read(form, after(form, silos, 2)))["cox"]
    assert found["persons"] == (120 - gaps if shown else None)
    assert (found["events"] is not None) == shown


def test_a_covariate_with_a_heavy_tail_has_the_coefficient_of_the_pooled_rows() -> None:
    """A first Newton step goes too far here: exp(bz) is beyond all floats, and the likelihood far below that at 0."""
    rng = np.random.default_rng(1)
    marker = np.exp(2 * rng.normal(size=150))
    ends = rng.exponential(100 / np.exp(np.clip(0.3 * (marker - np.median(marker)), -20, 20)))
    times, events = np.minimum(ends, 100.0), ends <= 100
    form = SurvivalForm(1, tuple(sorted(set(times.tolist()))), (), ("marker",), 16, 1)
    rows = SurvivalRows(times, events, np.zeros(150, dtype=np.int64), marker[:, None])
    fit = cox_fit(form, read(form, after(form, [rows], form.rounds)))
    scaled = (marker - marker.mean()) / marker.std()
    pooled = PHReg(times, scaled[:, None], events, ties="efron")
    assert fit.converged and fit.likelihood == pytest.approx(pooled.loglike(fit.coefficients * marker.std()), rel=1e-9)
    assert pooled.score(fit.coefficients * marker.std()) == pytest.approx(0.0, abs=1e-4)


def test_a_group_that_left_before_all_events_leaves_the_curves_without_a_test() -> None:
    form = SurvivalForm(1, (1.0, 2.0), ("a", "b", "c"), (), 0, 5)
    groups = np.repeat([0, 1, 2], 20)
    times = np.where(groups == 2, 1.0, 2.0)
    found = told(form, read(form, after(form, [SurvivalRows(times, times == 2, groups, np.empty((60, 0)))], 1)))
    assert found["no_log_rank"] == "a group has no person at risk at any event. Leave it out" and found["curves"]


@pytest.mark.parametrize(
    ("groups", "degrees", "problem", "persons"),
    [
        ([0] * 30 + [1] * 30 + [3] * 30, 2, "", [90, 30, 30, 0, 30]),
        (
            [0] * 40 + [1] * 30 + [3] * 4,
            None,
            "fewer than 5 persons are in d. Join groups, or add silos",
            [74, 40, None, 0, "<5"],
        ),
        ([0] * 30, None, "only one group has persons. Correct the categories", [30, 30, 0, 0, 0]),
    ],
)
def test_empty_groups_are_not_compared_and_small_groups_are_named(
    groups: list[int], degrees: int | None, problem: str, persons: list[int | str | None]
) -> None:
    """Of a small group, the number would follow from the numbers of all the others."""
    form = SurvivalForm(1, (1.0, 2.0, 3.0), ("a", "b", "c", "d"), (), 0, 5)
    rng, count = np.random.default_rng(0), len(groups)
    times, events = rng.integers(1, 4, count) * 1.0, rng.random(count) < 0.5
    rows = SurvivalRows(times, events, np.array(groups), np.empty((count, 0)))
    found = told(form, read(form, after(form, [rows], 1)))
    assert found.get("no_log_rank", "") == problem and found.get("log_rank", {}).get("degrees") == degrees
    assert [curve["persons"] for curve in found["curves"]] == persons
    shown, tables = StringIO(), _tables(found)
    assert ("b: persons of 1 silos" in str(tables[2].title)) == (None in persons)
    Terminal(file=shown, width=120).print(tables[-1])
    assert (problem or f"{found['log_rank']['p']:.3g}") in shown.getvalue()


@pytest.mark.parametrize(("apart", "steps"), [(True, 3), (True, 8), (True, 20), (False, 2)])
def test_a_covariate_that_separates_the_events_is_named_and_has_no_hazard_ratio(apart: bool, steps: int) -> None:
    """Only persons of the second group have events, so the likelihood grows with that coefficient for ever."""
    rng = np.random.default_rng(2)
    group, age = np.arange(100) % 2, rng.normal(size=100)
    events = (rng.random(100) < 0.6) & ((group == 1) | (not apart))
    form = SurvivalForm(1, tuple(map(float, range(1, 9))), (), ("age", "group"), steps, 1)
    rows = SurvivalRows(rng.integers(1, 9, 100) * 1.0, events, np.zeros(100, np.int64), np.stack([age, group], axis=1))
    found = told(form, read(form, after(form, [rows], form.rounds)))["cox"]
    assert found["separated"] == (["group"] if apart else []) and not found["converged"]
    shown = StringIO()
    Terminal(file=shown, width=150).print(_tables({"curves": [], "cox": found})[0])
    remedy = "group (nearly) separates events from others. Leave it out" if apart else "raise survival.steps"
    assert f"not converged: {remedy}" in shown.getvalue()
    for each in found["covariates"]:
        assert each["coefficient"] is not None and {each[name] for name in ("ratio", "low", "high", "p")} == {None}


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_coefficients_per_unit_of_tiny_or_huge_numbers_are_shown(unit: float) -> None:
    """Also where a hazard ratio per unit is beyond all floats: the file is JSON, which has no infinity."""
    form, (rows, scaled) = form_of(steps=6), (rows_of(0), rows_of(0))
    scaled.covariates[:] *= unit
    plain, found = (told(form, read(form, after(form, [each], form.rounds)))["cox"] for each in (rows, scaled))
    for one, other in zip(plain["covariates"], found["covariates"], strict=True):
        assert (other["coefficient"] * unit, other["p"]) == pytest.approx((one["coefficient"], one["p"]), rel=1e-3)
    (table,), shown = _tables({"curves": [], "cox": found}), StringIO()
    Terminal(file=shown, width=120).print(table)
    assert all(f"{each['coefficient']:.4g}" in shown.getvalue() for each in found["covariates"])
    json.dumps(found, allow_nan=False)


def test_before_the_first_round_there_are_no_sums() -> None:
    assert read_survival(form_of(), np.zeros(form_of().layout.size, dtype=np.float32)) is None


def test_a_round_with_other_silos_is_refused() -> None:
    form, silos = form_of(), [rows_of(seed) for seed in range(3)]
    vector = after(form, silos, 1)
    sums = read(form, vector)
    parts = [step_vector(form, place, silos[place], sums, next_beta(form, sums)) for place in (0, 1)]
    with pytest.raises(ConfigError, match="not all silos of the first round"):
        read_survival(form, vector + mean(parts))


@pytest.mark.slow
@given(at=st.integers(0, 10**6), change=st.sampled_from([0.03, -1.0, 500.0]))
def test_no_changed_mean_gives_an_error_of_python(at: int, change: float) -> None:
    form = form_of(steps=2)
    vector = after(form, [rows_of(seed) for seed in range(3)], 3)
    vector[at % form.layout.size] += change
    try:
        sums = read_survival(form, vector)
        if sums is not None:
            told(form, sums)
    except (ProtocolError, ConfigError):
        pass


def test_a_covariate_that_says_nothing_is_refused() -> None:
    form, rows = form_of(), [rows_of(seed) for seed in range(3)]
    flat = [SurvivalRows(each.times, each.events, each.groups, each.covariates * [1.0, 0.0]) for each in rows]
    with pytest.raises(ConfigError, match="'dose' is known of too few persons, or equal"):
        read(form, after(form, flat, 1))
    twice = [SurvivalRows(each.times, each.events, each.groups, each.covariates[:, [0, 0]]) for each in rows]
    with pytest.raises(ConfigError, match="follows from the others"):
        cox_fit(form, read(form, after(form, twice, 2)))
