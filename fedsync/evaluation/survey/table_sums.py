"""Sums over a silo's rows that add up exactly over silos, and the vector in which they travel.

A survey is a run before the run, and its model is this vector: silos add to it what they found, under whatever
encryption the run has, and all of them have the sum. Everything in it is a whole number. A cell is counted in units of
2^-40 (9e-13) and lies within +-2^42 (4e12); its square is the square of that whole number. So sums are exact, whatever
the order in which silos come, and all that follows from them has the same bits everywhere.

What travels are means over silos, float32, on a grid of at most 16 bits. So each number is cut to limbs of 8 bits,
lowest first, of which the highest has the sign, and a limb is sent as a sixteenth of itself: silos agree on ranges up
to 16 before anything was sent. The mean of limbs times the number of silos is a whole number again. How many silos it
was, is in the vector: each has a place of its own, where it puts 255, and the rest of the mean follows.

| tensor | holds | round |
|---|---|---|
| ``silos`` | 255 of each silo, at its own place: of the first round, of the second; guard | 1, 2 |
| ``rows`` | rows, rows of each class; guard | 1 |
| ``number NAME`` | cells that are known, their sum, the sum of their squares; | 1 |
| | cells in each bin; guard | 2 |
| ``text NAME`` | cells that are known; guard | 1 |

The guard is 255 in each round, from every silo. So all silos need the same range for a tensor, and where one was
clipped, the guard is not what it should be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.model.layout import Layout, Vector

UNIT_BITS = 40
"""A cell is rounded to a multiple of 2^-40."""

MOST_CELL = 2.0**42
"""No cell is larger."""

MOST_SILOS = 128
"""Of so many silos the means of float32 give whole numbers back."""

_LIMB, _FULL = 8, 255
_SHARE = 16
_COUNT, _SUM, _SQUARES = 4, 15, 25
_MOMENTS = _COUNT + _SUM + _SQUARES
_NUMBER, _TEXT, _SILOS, _ROWS = "number ", "text ", "silos", "rows"
_NEAR = 0.25


@dataclass(frozen=True, slots=True)
class Columns:
    """What a silo's training rows hold; it stays at the silo.

    Args:
        file: for errors.
        classes: rows of each class.
        numbers: cells of each numeric column, float64 [rows], NaN where one is missing.
        texts: number of known cells of each other column.
        names: of all columns, in the order in which they are surveyed.
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
    """What is summed: the same at all silos.

    Args:
        places: silos that there may be.
        classes: of the target.
        columns: names, and whether each is numeric.
        bins: of each histogram; 0 for none.
    """

    places: int
    classes: int
    columns: tuple[tuple[str, bool], ...]
    bins: int = 0

    @property
    def layout(self) -> Layout:
        """Of the vector."""
        number = _MOMENTS + self.bins * _COUNT + 1
        names = (_SILOS, _ROWS, *((_NUMBER if numeric else _TEXT) + name for name, numeric in self.columns))
        sizes = [number if numeric else _COUNT + 1 for _, numeric in self.columns]
        head = [2 * self.places + 1, (1 + self.classes) * _COUNT + 1]
        return Layout(names, tuple((size,) for size in (*head, *sizes)))

    @classmethod
    def of(cls, layout: Layout, bins: int) -> SurveyForm:
        """The form of a survey with this layout.

        Raises:
            ProtocolError: it is none.
        """
        try:
            (silos, rows), names = layout.sizes[:2], layout.names[2:]
            columns = tuple((name.partition(" ")[2], name.startswith(_NUMBER)) for name in names)
            form = cls((silos - 1) // 2, (rows - 1) // _COUNT - 1, columns, bins)
        except ValueError:
            form = None
        if form is None or form.layout != layout:
            raise ProtocolError("a silo", "survey", "what it calls a survey's layout is none")
        return form


@dataclass(frozen=True, slots=True)
class NumberSums:
    """Of one numeric column.

    Args:
        known: cells that are not missing.
        total: their sum, in units of 2^-40.
        squares: sum of their squares, in units of 2^-80.
        bins: cells in each bin; empty before the second round.
    """

    known: int
    total: int
    squares: int
    bins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SurveySums:
    """What silos found together.

    Args:
        silos: in the first round.
        rows: training rows.
        classes: rows of each class.
        numbers: by column.
        texts: known cells, by column.
    """

    silos: int
    rows: int
    classes: tuple[int, ...]
    numbers: Mapping[str, NumberSums]
    texts: Mapping[str, int]


def first_vector(form: SurveyForm, place: int, columns: Columns) -> Vector:
    """What a silo adds in the first round, float32 [form.layout.size].

    Args:
        form: of the survey.
        place: the silo's own.
        columns: the silo's.

    Raises:
        ConfigError: a cell is too large.
    """
    parts: list[int] = [*_present(form, place, 0), *_limbs(columns.rows, _COUNT)]
    for count in columns.classes:
        parts += _limbs(count, _COUNT)
    parts.append(_FULL)
    for name, numeric in form.columns:
        if numeric:
            cells = _whole(columns.numbers[name], f"{columns.file}, column {name!r}")
            sums = _limbs(sum(cells), _SUM) + _limbs(sum(cell * cell for cell in cells), _SQUARES)
            parts += [*_limbs(len(cells), _COUNT), *sums, *[0] * (form.bins * _COUNT), _FULL]
        else:
            parts += [*_limbs(columns.texts[name], _COUNT), _FULL]
    return _sent(parts)


def second_vector(form: SurveyForm, place: int, columns: Columns, edges: Mapping[str, NDArray[np.float64]]) -> Vector:
    """What a silo adds in the second round: cells in each bin of common ``edges``, float64 [bins + 1] a column.

    The first and the last bin are open: nobody learns a smallest or largest cell.
    """
    parts = [*_present(form, place, 1), *[0] * ((1 + form.classes) * _COUNT), _FULL]
    for name, numeric in form.columns:
        if numeric:
            cells = columns.numbers[name]
            at = np.searchsorted(edges[name][1:-1], cells[~np.isnan(cells)], side="right")
            counts = np.bincount(at, minlength=form.bins).tolist()
            parts += [*[0] * _MOMENTS, *[limb for count in counts for limb in _limbs(count, _COUNT)], _FULL]
        else:
            parts += [*[0] * _COUNT, _FULL]
    return _sent(parts)


def read_sums(form: SurveyForm, vector: Vector) -> SurveySums | None:
    """What silos found together, of a mean of their vectors; None before the first round.

    Raises:
        ProtocolError: no such vectors have this mean.
    """
    parts = {name: part.reshape(-1).astype(np.float64) for name, part in form.layout.split(vector).items()}
    silos = parts[_SILOS][:-1].reshape(2, form.places)
    first, second = (_count(place) for place in silos)
    if not first:
        return None
    # Two means of one guard, whoever was in the rounds.
    guard = _FULL / _SHARE * (1 + bool(second))
    if any(abs(part[-1] - guard) > _NEAR / _SHARE for part in parts.values()):
        raise _spoiled("a guard is not what all silos send")
    rows = _LimbReader(parts[_ROWS][:-1], first)
    whole, classes = rows.take(_COUNT), tuple(rows.take(_COUNT) for _ in range(form.classes))
    numbers, texts = {}, {}
    for name, numeric in form.columns:
        part = parts[(_NUMBER if numeric else _TEXT) + name][:-1]
        if not numeric:
            texts[name] = _LimbReader(part, first).take(_COUNT)
            continue
        reader = _LimbReader(part[:_MOMENTS], first)
        binned = _LimbReader(part[_MOMENTS:], second)
        bins = tuple(binned.take(_COUNT) for _ in range(form.bins)) if second else ()
        numbers[name] = NumberSums(reader.take(_COUNT), reader.take(_SUM), reader.take(_SQUARES), bins)
    sums = SurveySums(first, whole, classes, numbers, texts)
    _check(sums)
    return sums


def _check(sums: SurveySums) -> None:
    """See that sums of rows can be these."""
    known = [*(column.known for column in sums.numbers.values()), *sums.texts.values()]
    counts = [*sums.classes, *(count for column in sums.numbers.values() for count in column.bins)]
    if sums.rows < sums.silos or sum(sums.classes) != sums.rows or any(count < 0 for count in counts):
        raise _spoiled(f"{sums.silos} silos have {sums.rows} rows, and classes of {sums.classes}")
    if not all(0 <= count <= sums.rows for count in known):
        raise _spoiled(f"of {sums.rows} rows a column has more, or fewer than none")
    for name, column in sums.numbers.items():
        if column.known * column.squares < column.total**2:
            raise _spoiled(f"no numbers have the sums of {name!r}")


class _LimbReader:
    """Takes whole numbers off a mean of ``silos`` vectors, float64 [values]."""

    def __init__(self, part: NDArray[np.float64], silos: int) -> None:
        sums = part * (_SHARE * silos)
        whole = np.rint(sums)
        if silos and np.abs(sums - whole).max(initial=0.0) > _NEAR:
            raise _spoiled("it is not of whole numbers")
        self._limbs = iter(whole.astype(np.int64).tolist())

    def take(self, limbs: int) -> int:
        return sum(next(self._limbs) << (_LIMB * at) for at in range(limbs))


def _count(places: NDArray[np.float64]) -> int:
    """Silos whose mark is in a mean: each is 255 sixteenths over their number."""
    marks = places[places > 0]
    if not marks.size:
        return 0
    silos = round(_FULL / _SHARE / float(marks.min()))
    if silos > MOST_SILOS:
        raise _spoiled(f"it is said to be of {silos} silos, at most {MOST_SILOS}")
    return silos


def _present(form: SurveyForm, place: int, round_: int) -> Iterator[int]:
    mine = round_ * form.places + place
    return (_FULL if at in (mine, 2 * form.places) else 0 for at in range(2 * form.places + 1))


def _whole(cells: NDArray[np.float64], place: str) -> list[int]:
    """Known cells in units of 2^-40; a power of two, so nothing but the rounding to units is lost."""
    known = cells[~np.isnan(cells)]
    if np.abs(known).max(initial=0.0) > MOST_CELL:
        raise ConfigError(place, f"a cell is beyond {MOST_CELL:.4g}", "Use a larger unit, or ignore the column")
    return [int(cell) for cell in np.rint(np.ldexp(known, UNIT_BITS)).tolist()]


def _limbs(number: int, count: int) -> list[int]:
    """A whole number, lowest limb first; the highest has the sign."""
    low = [(number >> (_LIMB * at)) & _FULL for at in range(count - 1)]
    high = number >> (_LIMB * (count - 1))
    if not -(_FULL + 1) // 2 <= high <= _FULL // 2:
        raise ConfigError("task", "the silo has more rows than a survey can count", "Leave the survey out")
    return [*low, high]


def _sent(parts: Sequence[int]) -> Vector:
    return np.array(parts, dtype=np.float32) / np.float32(_SHARE)


def _spoiled(detail: str) -> ProtocolError:
    return ProtocolError("sum of silos", "survey", detail)
