"""Table cells as features."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsync.core.survey.findings import ColumnScale
from fedsync.tasks.readers.tabular import MISSING, Table, number

BUCKETS = 8

_ROUNDING = 1e-12
"""A deviation within this share of the mean is the rounding of numbers that are all the same."""


def is_text(cells: Sequence[str]) -> bool:
    """Whether some cell is neither missing nor a finite number."""
    return any(cell not in MISSING and number(cell) is None for cell in cells)


def width(columns: Sequence[str], text: frozenset[str]) -> int:
    """Number of features that the columns become: 8 for a text, 1 for a number."""
    return sum(BUCKETS if column in text else 1 for column in columns)


def encode(
    table: Table,
    columns: Sequence[str],
    text: frozenset[str],
    train: NDArray[np.int64],
    scales: Mapping[str, ColumnScale] | None = None,
) -> NDArray[np.float32]:
    """All rows as features, float32 [rows, width(columns, text)].

    Args:
        table: the silo's file.
        columns: those to encode, in this order.
        text: which of them are text.
        train: row numbers that medians, means and deviations are taken from; no other row leaks.
        scales: of the numeric columns, of all silos together; None takes them from ``train``.
    """
    blocks = []
    for column in columns:
        cells = table.column(column)
        if column in text:
            blocks.append(_hashed(cells))
        elif scales is None:
            blocks.append(_standardised(numbers_of(cells), train))
        else:
            blocks.append(_scaled(numbers_of(cells), scales[column]))
    return np.concatenate(blocks, axis=1).astype(np.float32)


def numbers_of(cells: Sequence[str]) -> NDArray[np.float64]:
    """The cells of a numeric column, float64 [n], NaN where one is missing."""
    return np.array([np.nan if cell in MISSING else float(cell) for cell in cells])


def _scaled(values: NDArray[np.float64], scale: ColumnScale) -> NDArray[np.float64]:
    """Standardised alike at all silos, float64 [n, 1]; a missing cell is the mean, 0."""
    return np.where(np.isnan(values), 0.0, (values - scale.mean) / scale.deviation).reshape(-1, 1)


def _hashed(cells: Sequence[str]) -> NDArray[np.float64]:
    """One-hot by CRC-32, float64 [n, 8]; a missing cell is all zeros. The same on every machine."""
    block = np.zeros((len(cells), BUCKETS))
    for row, cell in enumerate(cells):
        if cell not in MISSING:
            block[row, zlib.crc32(cell.encode()) % BUCKETS] = 1.0
    return block


def _standardised(values: NDArray[np.float64], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Imputed and standardised, float64 [n, 1].

    A column that is constant or wholly missing on the training rows is zero there, and elsewhere the plain
    difference from that constant.
    """
    known = values[train][~np.isnan(values[train])]
    values[np.isnan(values)] = np.median(known) if known.size else 0.0
    mean, deviation = float(values[train].mean()), float(values[train].std())
    if deviation <= _ROUNDING * abs(mean):
        # The mean of many 0.1 is not quite 0.1, their median is: a test row that holds the constant is zero too.
        mean, deviation = float(np.median(values[train])), 1.0
        values[train] = mean
    return ((values - mean) / deviation).reshape(-1, 1)
