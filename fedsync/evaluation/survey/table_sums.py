"""Exact sums over all silos' table rows, and the vector that transports these sums.

A survey is a run before the main run, and its model is this vector. Silos add their own sums to the vector, under the
run's encryption, and all silos receive the total. All values are integers. A cell is counted in units of 2^-40 (9e-13)
and lies within +-2^42 (4e12); its square is the square of that integer. So sums are exact for any order of silos, and
all results have the same bits everywhere.

The transported values are limbs of these integers (`fedsync.evaluation.survey.sum_limbs`). The number of silos follows
from the vector: each silo puts 255 at its own place, so the mean over n silos is 255 / n there.

| tensor | content | round |
|---|---|---|
| ``silos`` | 255 from each silo at its own place, separately for the first and second round; guard | 1, 2 |
| ``rows`` | rows, rows of each class; guard | 1 |
| ``number NAME`` | known cells, their sum, the sum of their squares; | 1 |
| | cells in each bin; guard | 2 |
| ``text NAME`` | known cells; guard | 1 |

The *guard* detects clipping: every silo puts 255 there in each round, the largest value of a tensor's range. If
encryption clips a tensor at any silo, the mean of the guard is no longer 255.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.evaluation.survey.sum_limbs import FULL, NEAR, SHARE, LimbReader, limbs, sent, silos_of, spoiled
from fedsync.model.layout import Layout, Vector
from fedsync.model.table_columns import MOST_CELL

UNIT_BITS = 40

MOMENT_LIMBS = 4, 15, 25
"""Limbs of a count, of a sum of cells and of a sum of their squares."""

_COUNT, _SUM, _SQUARES = MOMENT_LIMBS
_MOMENTS = _COUNT + _SUM + _SQUARES
_NUMBER, _TEXT, _SILOS, _ROWS = "number ", "text ", "silos", "rows"


@dataclass(frozen=True, slots=True)
class Columns:
    """Contents of a silo's training rows; stays at the silo.

    ``classes`` counts the rows of each class, ``numbers`` holds numeric cells, float64 [rows], NaN if missing,
    ``texts`` counts the known cells of other columns. ``names`` is the survey order.
    """

    file: str
    classes: Sequence[int]
    numbers: Mapping[str, NDArray[np.float64]]
    texts: Mapping[str, int]
    names: Sequence[str]

    @property
    def rows(self) -> int:
        return sum(self.classes)


@dataclass(frozen=True, slots=True)
class SurveyForm:
    """Form of the survey vector, equal at all silos: number of silo places, classes, columns (numeric or not), bins."""

    places: int
    classes: int
    columns: tuple[tuple[str, bool], ...]
    bins: int = 0

    @property
    def layout(self) -> Layout:
        number = _MOMENTS + self.bins * _COUNT + 1
        names = (_SILOS, _ROWS, *((_NUMBER if numeric else _TEXT) + name for name, numeric in self.columns))
        sizes = [number if numeric else _COUNT + 1 for _, numeric in self.columns]
        head = [2 * self.places + 1, (1 + self.classes) * _COUNT + 1]
        return Layout(names, tuple((size,) for size in (*head, *sizes)))

    @classmethod
    def of(cls, layout: Layout, bins: int) -> SurveyForm:
        """Return the form of a survey with this layout; raises `ProtocolError` if the layout is not a survey's."""
        try:
            (silos, rows), names = layout.sizes[:2], layout.names[2:]
            columns = tuple((name.partition(" ")[2], name.startswith(_NUMBER)) for name in names)
            form = cls((silos - 1) // 2, (rows - 1) // _COUNT - 1, columns, bins)
        except ValueError:
            form = None
        if form is None or form.layout != layout:
            raise ProtocolError("a silo", "survey", "the layout is not a survey's")
        return form


@dataclass(frozen=True, slots=True)
class NumberSums:
    """Sums of one numeric column: known cells, their sum [2^-40], the sum of squares [2^-80], and cells in each bin."""

    known: int
    total: int
    squares: int
    bins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SurveySums:
    """Sums over all silos: silos of the first round, rows, rows of each class, numeric columns, known text cells."""

    silos: int
    rows: int
    classes: tuple[int, ...]
    numbers: Mapping[str, NumberSums]
    texts: Mapping[str, int]


def first_vector(form: SurveyForm, place: int, columns: Columns) -> Vector:
    """Return a silo's vector of the first round, float32 [form.layout.size]; `ConfigError` if a cell is too large."""
    parts: list[int] = [*_present(form, place, 0), *limbs(columns.rows, _COUNT)]
    for count in columns.classes:
        parts += limbs(count, _COUNT)
    parts.append(FULL)
    for name, numeric in form.columns:
        if numeric:
            cells = whole_cells(columns.numbers[name], f"{columns.file}, column {name!r}")
            sums = limbs(sum(cells), _SUM) + limbs(sum(cell * cell for cell in cells), _SQUARES)
            parts += [*limbs(len(cells), _COUNT), *sums, *[0] * (form.bins * _COUNT), FULL]
        else:
            parts += [*limbs(columns.texts[name], _COUNT), FULL]
    return sent(parts)


def second_vector(form: SurveyForm, place: int, columns: Columns, edges: Mapping[str, NDArray[np.float64]]) -> Vector:
    """Return a silo's vector of the second round: cells in each bin of common ``edges``, float64 [bins + 1] a column.
    The first and last bins are open, so nobody learns a smallest or largest cell.
    """
    parts = [*_present(form, place, 1), *[0] * ((1 + form.classes) * _COUNT), FULL]
    for name, numeric in form.columns:
        if numeric:
            cells = columns.numbers[name]
            at = np.searchsorted(edges[name][1:-1], cells[~np.isnan(cells)], side="right")
            counts = np.bincount(at, minlength=form.bins).tolist()
            parts += [*[0] * _MOMENTS, *[limb for count in counts for limb in limbs(count, _COUNT)], FULL]
        else:
            parts += [*[0] * _COUNT, FULL]
    return sent(parts)


def read_sums(form: SurveyForm, vector: Vector) -> SurveySums | None:
    """Read sums from the mean of silos' vectors; None before the first round, `ProtocolError` for an invalid mean."""
    parts = {name: part.reshape(-1).astype(np.float64) for name, part in form.layout.split(vector).items()}
    silos = parts[_SILOS][:-1].reshape(2, form.places)
    first, second = (silos_of(place) for place in silos)
    if not first:
        return None
    # The expected guard is the sum of two means of 255, or one before the second round, for any set of silos.
    guard = FULL / SHARE * (1 + bool(second))
    if any(abs(part[-1] - guard) > NEAR / SHARE for part in parts.values()):
        raise spoiled("a guard is not what all silos send")
    rows = LimbReader(parts[_ROWS][:-1], first)
    whole, classes = rows.take(_COUNT), tuple(rows.take(_COUNT) for _ in range(form.classes))
    numbers, texts = {}, {}
    for name, numeric in form.columns:
        part = parts[(_NUMBER if numeric else _TEXT) + name][:-1]
        if not numeric:
            texts[name] = LimbReader(part, first).take(_COUNT)
            continue
        reader = LimbReader(part[:_MOMENTS], first)
        binned = LimbReader(part[_MOMENTS:], second)
        bins = tuple(binned.take(_COUNT) for _ in range(form.bins)) if second else ()
        numbers[name] = NumberSums(reader.take(_COUNT), reader.take(_SUM), reader.take(_SQUARES), bins)
    sums = SurveySums(first, whole, classes, numbers, texts)
    _check(sums)
    return sums


def _check(sums: SurveySums) -> None:
    known = [*(column.known for column in sums.numbers.values()), *sums.texts.values()]
    counts = [*sums.classes, *(count for column in sums.numbers.values() for count in column.bins)]
    if sums.rows < sums.silos or sum(sums.classes) != sums.rows or any(count < 0 for count in counts):
        raise spoiled(f"{sums.silos} silos have {sums.rows} rows, and classes of {sums.classes}")
    if not all(0 <= count <= sums.rows for count in known):
        raise spoiled(f"of {sums.rows} rows a column has more, or fewer than none")
    for name, column in sums.numbers.items():
        if column.known * column.squares < column.total**2:
            raise spoiled(f"no numbers have the sums of {name!r}")


def _present(form: SurveyForm, place: int, round_: int) -> Iterator[int]:
    mine = round_ * form.places + place
    return (FULL if at in (mine, 2 * form.places) else 0 for at in range(2 * form.places + 1))


def whole_cells(cells: NDArray[np.float64], place: str) -> list[int]:
    """Return known cells in units of 2^-40; scaling by a power of two is exact, only the rounding loses anything."""
    known = cells[~np.isnan(cells)]
    if np.abs(known).max(initial=0.0) > MOST_CELL:
        raise ConfigError(place, f"a cell is beyond {MOST_CELL:.4g}", "Use a larger unit, or ignore the column")
    return [int(cell) for cell in np.rint(np.ldexp(known, UNIT_BITS)).tolist()]
