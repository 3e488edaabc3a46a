"""Table cells as features."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.evaluation.survey.findings import ColumnScale
from fedsync.model.table_columns import ColumnForm, ColumnRule, Kind, infer
from fedsync.tasks.readers.tabular import Table

BUCKETS = 8

_ROUNDING = 1e-12
"""A deviation within this share of the mean is the rounding of numbers that are all the same."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a silo's table, read by its rule.

    Args:
        name: in the header.
        kind: of its cells.
        values: float64 [rows], NaN for a gap: numbers; of categories and texts, which of the features is 1.
        width: features that it becomes.
        form: what must be the same at all silos.
    """

    name: str
    kind: Kind
    values: NDArray[np.float64]
    width: int
    form: ColumnForm

    @property
    def gaps(self) -> int:
        return int(np.isnan(self.values).sum())


def read_column(table: Table, name: str, rule: ColumnRule, *, named: bool) -> Column:
    """Read a column.

    Args:
        table: the silo's file.
        name: of the column.
        rule: what the run says of it.
        named: the run knows the name, so messages may have it.

    Raises:
        ConfigError: a cell does not fit; names column and line.
    """
    codes, cells = pd.factorize(table.cells[name])
    kind, wrong = infer(rule, cells)
    if wrong:
        row = int(np.argmax(table.cells[name].isin(wrong).to_numpy()))
        where = table.place(name, row, named=named)
        raise ConfigError(where, wrong[table.cells[name].iloc[row]], _remedy(name if named else "NAME", kind))
    values = np.array([_value(rule, kind, cell) for cell in cells], dtype=np.float64)[codes]
    known = np.flatnonzero(~np.isnan(values))
    row = int(table.cells.index[known[0]]) + 1 if known.size else 0
    width = {"number": 1, "category": len(rule.categories), "text": BUCKETS}[kind]
    return Column(name, kind, values, width, ColumnForm.of(name, kind, rule, row))


def encode(
    table: Table, columns: Sequence[Column], train: NDArray[np.int64], scales: Mapping[str, ColumnScale] | None = None
) -> NDArray[np.float32]:
    """All rows as features, float32 [rows, sum of widths].

    Args:
        table: the silo's file, for messages.
        columns: to encode, in this order.
        train: row numbers that medians, means and deviations are taken from; no other row leaks.
        scales: of the numeric columns, of all silos together; None takes them from ``train``.

    Raises:
        ConfigError: a row is so far from the others that no float32 holds its feature.
    """
    blocks = []
    for column in columns:
        if column.kind != "number":
            block = (column.values[:, None] == np.arange(column.width)).astype(np.float32)
        else:
            with np.errstate(over="ignore"):
                scaled = (
                    standardised(column.values, train)
                    if scales is None
                    else _scaled(column.values, scales[column.name])
                )
                block = scaled.astype(np.float32)[:, None]
            if not np.isfinite(block).all():
                place = table.place(column.name, int(np.argmin(np.isfinite(block[:, 0]))))
                problem = "the number is too far from those of the training rows to be standardised"
                raise ConfigError(place, problem, "Mend or remove the row, or ignore the column")
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def standardised(values: NDArray[np.float64], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Imputed and standardised by the rows ``train``, float64 [n].

    A column that is constant or wholly missing on the training rows is zero there, and elsewhere the plain
    difference from that constant.
    """
    known = values[train][~np.isnan(values[train])]
    values = np.where(np.isnan(values), np.median(known) if known.size else 0.0, values)
    mean, deviation = float(values[train].mean()), float(values[train].std())
    if deviation <= _ROUNDING * abs(mean):
        # The mean of many 0.1 is not quite 0.1, their median is: a test row that holds the constant is zero too.
        mean, deviation = float(np.median(values[train])), 1.0
        values[train] = mean
    return (values - mean) / deviation


def _scaled(values: NDArray[np.float64], scale: ColumnScale) -> NDArray[np.float64]:
    """Standardised alike at all silos, float64 [n]; a missing cell is the mean, 0."""
    return np.where(np.isnan(values), 0.0, (values - scale.mean) / scale.deviation)


def _value(rule: ColumnRule, kind: Kind, cell: str) -> float:
    """A text is hashed by CRC-32, the same on every machine, so that silos need no common vocabulary."""
    if rule.is_gap(cell):
        return np.nan
    if kind == "category":
        return rule.categories.index(cell)
    return zlib.crc32(cell.encode()) % BUCKETS if kind == "text" else rule.number(cell) or 0.0


def _remedy(called: str, kind: Kind) -> str:
    if kind == "category":
        return f"Mend the cell, or add it to task.columns: {{{called}: {{categories: [...]}}}}, or to gaps there"
    return (
        f"Mend the cell, or say in task.columns what it means: {{{called}: {{gaps: [...]}}}} for no value; decimal, "
        "thousands or unit for a number in another way of writing; kind: text for a column that has no numbers"
    )
