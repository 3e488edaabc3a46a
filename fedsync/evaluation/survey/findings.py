"""Results of a survey (joint statistics of the silos' tables): means, deviations, bin edges, publishable statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.metric_types import published
from fedsync.evaluation.survey.table_sums import UNIT_BITS, NumberSums, SurveySums

STATISTICS = "statistics.json"
"""File with the result of `told`, in the folder of a run or of a silo's trainer."""

SPREAD = 4.0
"""Distance from the mean to the outer edges of a histogram without a declared range [deviations]."""


@dataclass(frozen=True, slots=True)
class ColumnScale:
    """Standardisation of a numeric column: ``(cell - mean) / deviation``; a missing cell becomes 0. Mean and population
    standard deviation are over all silos' training rows; the deviation is 1 if all cells are equal.
    """

    mean: float
    deviation: float


def scale_of(column: NumberSums) -> ColumnScale:
    """Return the scale of a non-empty column; exact integers up to the last division, so the bits agree everywhere."""
    unit = 1 << UNIT_BITS
    mean = Fraction(column.total, column.known * unit)
    variance = Fraction(column.known * column.squares - column.total**2, (column.known * unit) ** 2)
    return ColumnScale(float(mean), math.sqrt(variance) or 1.0)


def scales_of(sums: SurveySums, least: int) -> dict[str, ColumnScale]:
    """Return all numeric columns' scales; raises `ConfigError` if a column has fewer than ``least`` cells."""
    for name, column in sums.numbers.items():
        if column.known < least:
            problem = f"fewer than {least} cells are known in all silos together: a mean of them would tell of people"
            raise ConfigError(f"task, column {name!r}", problem, "Ignore the column")
    return {name: scale_of(column) for name, column in sums.numbers.items()}


def edges_of(sums: SurveySums, ranges: Mapping[str, Sequence[float]], bins: int) -> dict[str, NDArray[np.float64]]:
    """Return common bin edges of each column, float64 [bins + 1], over the declared range or around the mean."""
    edges = {}
    for name, column in sums.numbers.items():
        scale = scale_of(column) if column.known else ColumnScale(0.0, 1.0)
        around = (scale.mean - SPREAD * scale.deviation, scale.mean + SPREAD * scale.deviation)
        low, high = ranges.get(name, around)
        edges[name] = np.array([low + (high - low) * (at / bins) for at in range(bins + 1)])
    return edges


def told(sums: SurveySums, least: int, ranges: Mapping[str, Sequence[float]], bins: int) -> dict[str, Any]:
    """Return publishable statistics: no count from 1 to ``least`` - 1, and none that implies another; 4-digit means.

    Small counts become the text ``"<5"``; counts that would reveal a small count become None. A count of 0 is shown,
    because it describes nobody. Binned cells and missing cells add up to the rows, so they are hidden together.
    """
    columns: list[dict[str, Any]] = []
    edges = edges_of(sums, ranges, bins) if bins else {}
    for name, column in sums.numbers.items():
        entry, counts = _entry(name, "number", column.bins or (column.known,), sums.rows - column.known, sums, least)
        if column.known >= least:
            entry |= {"mean": published(scale_of(column).mean), "deviation": published(_spread(column))}
            if column.bins:
                entry |= {"edges": [published(edge) for edge in edges[name].tolist()], "counts": counts}
        columns.append(entry)
    columns += [_entry(name, "text", (known,), sums.rows - known, sums, least)[0] for name, known in sums.texts.items()]
    rows = hide_small((sums.rows,), least)[0] if sums.rows < least else sums.rows
    return {
        "silos": sums.silos,
        "rows": rows,
        "classes": hide_small(sums.classes, least),
        "least": least,
        "columns": columns,
    }


_Told = int | str | None


def _entry(
    name: str, kind: str, cells: Sequence[int], missing: int, sums: SurveySums, least: int
) -> tuple[dict[str, Any], list[_Told]]:
    if sum(cells) + missing == sums.rows:
        *counts, gaps = hide_small((*cells, missing), least)
    else:  # a silo joined or left between the rounds, so the bins cover other rows
        counts, (_, gaps) = hide_small(cells, least), hide_small((sums.rows - missing, missing), least)
    known = sums.rows - gaps if isinstance(gaps, int) else None
    if isinstance(known, int) and 0 < known < least:
        known = None
    return {"column": name, "kind": kind, "known": known, "missing": gaps}, counts


def _spread(column: NumberSums) -> float:
    return 0.0 if column.known * column.squares == column.total**2 else scale_of(column).deviation


def hide_small(counts: Sequence[int], least: int) -> list[_Told]:
    """Hide small counts of a list with a known sum, and the counts from which a small count would follow.

    For k small counts and m other counts hidden with them, the sum H is known. Each of the k may be anything from 1 to
    ``least`` - 1 if H >= (``least`` - 1) + (k - 1) + ``least`` m, and m is 1 or more.
    """
    small = [at for at, count in enumerate(counts) if 0 < count < least]
    others = sorted((at for at, count in enumerate(counts) if count >= least), key=lambda at: counts[at])
    shown: list[_Told] = [f"<{least}" if 0 < count < least else count for count in counts]
    hidden, behind = sum(counts[at] for at in small), 0
    while small and (not behind or hidden < least - 1 + len(small) - 1 + least * behind):
        if not others:
            return [None] * len(counts)
        shown[at := others.pop(0)] = None
        hidden, behind = hidden + counts[at], behind + 1
    return shown
