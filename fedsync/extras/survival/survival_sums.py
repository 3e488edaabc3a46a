"""Sums for survival curves, log-rank test and Cox regression, and the vector that transports them.

Times are rounded up to a public grid. The first round counts events and censored persons for each time. A person who is
followed beyond the grid is censored at the grid's end. Each further round is one Newton step of a Cox model. With the
coefficients b of the previous rounds, each silo sums exp(bz), z exp(bz) and zz' exp(bz) over the persons of each cell.
z are covariates in pooled standard deviations. Sums over persons at risk are sums over all cells from a time on
(`fedsync.extras.survival.survival_estimates`).

A *cell* is a span of consecutive times with enough persons: two cells that differ by one person would disclose that
person's covariates. Silos agree on cells without a message: cells follow from the counts of the first round. Cells of
events and cells of censored persons are formed separately, since Efron's treatment of ties needs both sums.

| tensor | content | round |
|---|---|---|
| ``silos`` | 255 from each silo at its own place, separately for each round; guard | all |
| ``counts`` | events and censored persons at each time: of each group (else of all), then of complete rows; guard | 1 |
| ``moments`` | complete rows; sum and sum of squares of each covariate; guard | 1 |
| ``cox N`` | sums of each cell of events, then of each cell of censored persons; guard | N + 1 |

The guard is 255 in each round, as in `fedsync.evaluation.survey.table_sums`. Sums of exp(bz) are in units of 2^-60.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.evaluation.survey.findings import scale_of
from fedsync.evaluation.survey.sum_limbs import FULL, NEAR, SHARE, LimbReader, limbs, sent, silos_of, spoiled
from fedsync.evaluation.survey.table_sums import MOMENT_LIMBS, NumberSums, whole_cells
from fedsync.model.layout import Layout, Vector

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

MOST_RISK = 36.0
"""Largest magnitude of a person's linear predictor, so that sums fit their limbs; beyond it exp(bz) is cut off."""

_UNIT_BITS = 60
_COUNT, _SUM, _SQUARES = MOMENT_LIMBS
_RISK = 20
_EVENTS = "events"


@dataclass(frozen=True, slots=True)
class SurvivalRows:
    """Rows of one silo; they stay at the silo.

    Args:
        times: time of the event, or until which a person was followed, float64 [rows].
        events: whether the event happened, bool [rows].
        groups: number of each person's group, int64 [rows]; -1 if unknown; 0 for all if no groups are compared.
        covariates: float64 [rows, covariates]; NaN if missing.
    """

    times: Floats
    events: NDArray[np.bool_]
    groups: Counts
    covariates: Floats


@dataclass(frozen=True, slots=True)
class SurvivalForm:
    """Form of the sums, equal at all silos: number of silo places, time grid, groups, covariates, Newton steps.

    ``least`` is the smallest number of persons in a cell.
    """

    places: int
    grid: tuple[float, ...]
    groups: tuple[str, ...]
    covariates: tuple[str, ...]
    steps: int
    least: int

    @property
    def rounds(self) -> int:
        return 1 + (self.steps if self.covariates else 0)

    @property
    def curves(self) -> int:
        return len(self.groups) or 1

    @property
    def width(self) -> int:
        """Number of sums in a cell: 1, the covariates, and the upper triangle of their products."""
        count = len(self.covariates)
        return 1 + count + count * (count + 1) // 2

    @property
    def layout(self) -> Layout:
        times, covariates = len(self.grid), len(self.covariates)
        sizes = {
            "silos": self.rounds * self.places,
            "counts": (1 + self.curves) * times * 2 * _COUNT,
            "moments": _COUNT + covariates * (_SUM + _SQUARES),
        }
        sizes |= {f"cox {step}": 2 * times * self.width * _RISK for step in range(1, self.rounds)}
        return Layout(tuple(sizes), tuple((size + 1,) for size in sizes.values()))


@dataclass(frozen=True, slots=True)
class CoxSums:
    """Sums of one Newton step, by cell: of events and of censored persons, float64 [times, form.width]."""

    events: Floats
    censored: Floats


@dataclass(frozen=True, slots=True)
class SurvivalSums:
    """Sums over all silos.

    Args:
        counts: events and censored persons of each group (without groups: of all rows), int64 [curves, times, 2].
        complete: the same counts of all rows without a missing covariate, int64 [times, 2].
        scales: mean and deviation of each covariate in complete rows, float64 [covariates, 2].
        steps: sums of the Newton steps so far.
    """

    silos: int
    counts: Counts
    complete: Counts
    scales: Floats
    steps: tuple[CoxSums, ...]


@dataclass(frozen=True, slots=True)
class Cells:
    """Division of times into cells: the cell of each time, int64 [times], and the last time of each cell."""

    of: Counts
    ends: Counts


def cells_of_sums(complete: Counts, least: int) -> tuple[Cells, Cells]:
    """Return the cells of events and of censored persons, from counts [times, 2]; raises as `cells_of`."""
    return cells_of(complete[:, 0], least, _EVENTS), cells_of(complete[:, 1], least, "censored persons")


def cells_of(counts: Counts, least: int, what: str) -> Cells:
    """Divide times into cells of at least ``least`` persons; a rest at the end joins the last cell.

    Raises `ConfigError` if there are persons, and too few for a cell.
    """
    at, persons = np.zeros(len(counts), dtype=np.int64), 0
    ends: list[int] = []
    for time, count in enumerate(counts.tolist()):
        at[time], persons = len(ends), persons + count
        if persons >= least:
            ends, persons = [*ends, time], 0
    if persons and not ends:
        problem = f"all silos together have fewer than {least} {what}, so their sums would disclose single persons"
        remedy = "End the grid later, add silos" if what == _EVENTS else "End the grid earlier"
        raise ConfigError("task.survival", problem, f"{remedy}, or leave the covariates out")
    if persons:
        ends[-1] = int(np.flatnonzero(counts)[-1])
    return Cells(np.minimum(at, max(len(ends) - 1, 0)), np.array(ends, dtype=np.int64))


def first_vector(form: SurvivalForm, place: int, rows: SurvivalRows) -> Vector:
    """Return a silo's counts and moments, float32 [form.layout.size]; ``place`` is the silo's own place."""
    complete = _complete(rows)
    chosen = [*(rows.groups == group for group in range(form.curves)), complete]
    moments = limbs(int(complete.sum()), _COUNT)
    for name, column in zip(form.covariates, rows.covariates[complete].T, strict=True):
        cells = whole_cells(column, f"the covariate {name!r}")
        moments += limbs(sum(cells), _SUM) + limbs(sum(cell * cell for cell in cells), _SQUARES)
    counts = [limb for each in chosen for limb in _counted(form, rows, each)]
    return _vector(form, place, 0, {"counts": counts, "moments": moments})


def step_vector(form: SurvivalForm, place: int, rows: SurvivalRows, sums: SurvivalSums, beta: Floats) -> Vector:
    """Return a silo's sums for the next Newton step at ``beta``, float64 [covariates], in pooled deviations."""
    complete, (at, happened) = _complete(rows), _on_grid(form, rows)
    weighed = _weighed((rows.covariates[complete] - sums.scales[:, 0]) / sums.scales[:, 1], beta)
    table = np.zeros((2, len(form.grid), form.width))
    for kind, cells in enumerate(cells_of_sums(sums.complete, form.least)):
        chosen = happened[complete] if kind == 0 else ~happened[complete]
        np.add.at(table[kind], cells.of[at[complete][chosen]], weighed[chosen])
    whole = np.rint(np.ldexp(table, _UNIT_BITS)).ravel().tolist()
    step = len(sums.steps) + 1
    return _vector(form, place, step, {f"cox {step}": [limb for value in whole for limb in limbs(int(value), _RISK)]})


def read_survival(form: SurvivalForm, vector: Vector) -> SurvivalSums | None:
    """Read sums from the mean of silos' vectors; None before the first round. Raises `ProtocolError` for an invalid
    mean, and `ConfigError` if a round has other silos than the first.
    """
    parts = {name: part.reshape(-1).astype(np.float64) for name, part in form.layout.split(vector).items()}
    marks = parts["silos"][:-1].reshape(form.rounds, form.places)
    counted = [silos_of(each) for each in marks]
    done = next((at for at, silos in enumerate(counted) if not silos), form.rounds)
    if not done:
        return None
    if any(((each > 0) != (marks[0] > 0)).any() for each in marks[:done]) or any(counted[done:]):
        problem = "not all silos of the first round were in a later round, so their sums do not fit together"
        raise ConfigError("task.survival", problem, "Run again, with all silos present")
    if any(abs(part[-1] - done * FULL / SHARE) > NEAR / SHARE for part in parts.values()):
        raise spoiled("a guard is not what all silos send")
    silos, times = counted[0], len(form.grid)
    reader = LimbReader(parts["counts"][:-1], silos)
    told = [reader.take(_COUNT) for _ in range((1 + form.curves) * times * 2)]
    counts = np.array(told, dtype=np.int64).reshape(1 + form.curves, times, 2)
    if (counts < 0).any() or (not form.groups and (counts[-1] > counts[0]).any()):
        raise spoiled("these counts are impossible")
    scales = _scales(form, LimbReader(parts["moments"][:-1], silos), int(counts[-1].sum()))
    steps = []
    for step in range(1, done):
        risk = LimbReader(parts[f"cox {step}"][:-1], silos)
        whole = np.array([risk.take(_RISK) for _ in range(2 * times * form.width)], dtype=np.float64)
        steps.append(CoxSums(*np.ldexp(whole, -_UNIT_BITS).reshape(2, times, form.width)))
    return SurvivalSums(silos, counts[:-1], counts[-1], scales, tuple(steps))


def _scales(form: SurvivalForm, reader: LimbReader, rows: int) -> Floats:
    known = reader.take(_COUNT)
    scales = []
    for name in form.covariates:
        column = NumberSums(known, reader.take(_SUM), reader.take(_SQUARES))
        if known != rows or known * column.squares < column.total**2:
            raise spoiled(f"no column can have the sums of {name!r}")
        if known < form.least or known * column.squares == column.total**2:
            problem = f"the covariate {name!r} is known of too few persons, or equal for all of them"
            raise ConfigError("task.survival.covariates", problem, "Leave it out")
        scale = scale_of(column)
        scales.append((scale.mean, scale.deviation))
    return np.array(scales, dtype=np.float64).reshape(-1, 2)


def _complete(rows: SurvivalRows) -> NDArray[np.bool_]:
    return np.asarray(~np.isnan(rows.covariates).any(axis=1))


def _on_grid(form: SurvivalForm, rows: SurvivalRows) -> tuple[Counts, NDArray[np.bool_]]:
    """Place of each row's time in the grid, int64 [rows], and whether its event is within the grid."""
    at = np.searchsorted(np.array(form.grid), rows.times, side="left")
    return np.minimum(at, len(form.grid) - 1), rows.events & (at < len(form.grid))


def _counted(form: SurvivalForm, rows: SurvivalRows, chosen: NDArray[np.bool_]) -> Sequence[int]:
    at, happened = _on_grid(form, rows)
    counts = np.zeros((len(form.grid), 2), dtype=np.int64)
    np.add.at(counts, (at[chosen], (~happened[chosen]).astype(np.int64)), 1)
    return [limb for count in counts.ravel().tolist() for limb in limbs(count, _COUNT)]


def _weighed(scaled: Floats, beta: Floats) -> Floats:
    """exp(bz) times 1, z and the upper triangle of zz', float64 [rows, form.width]."""
    weight = np.exp(np.clip(scaled @ beta, -MOST_RISK, MOST_RISK))[:, None]
    row, column = np.triu_indices(scaled.shape[1])
    table: Floats = weight * np.concatenate([np.ones_like(weight), scaled, scaled[:, row] * scaled[:, column]], axis=1)
    return table


def _vector(form: SurvivalForm, place: int, round_: int, filled: Mapping[str, Sequence[int]]) -> Vector:
    """Return the vector of a round: the silo's mark, the ``filled`` tensors, zeros elsewhere, and all guards."""
    marks = [0] * (form.rounds * form.places)
    marks[round_ * form.places + place] = FULL
    parts: list[int] = []
    for name, size in zip(form.layout.names, form.layout.sizes, strict=True):
        parts += [*{"silos": marks, **filled}.get(name, [0] * (size - 1)), FULL]
    return sent(parts)
