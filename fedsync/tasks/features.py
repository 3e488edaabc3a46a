"""Conversion of table cells to features."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.evaluation.survey.findings import ColumnScale
from fedsync.model.table_columns import ColumnForm, ColumnRule, Kind, infer
from fedsync.tasks.readers.tabular import Table

BUCKETS = 8

_MOST_SCALED = 1e6
"""Largest scaled number, in deviations, of a table that is read by row."""

_ROUNDING = 1e-12
"""Relative deviation up to which a column counts as constant, because only rounding differs."""


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a silo's table, read by its rule.

    ``values`` are float64 [rows], NaN for a gap: numbers, or for categories and texts the index of the feature that is
    1. ``width`` is the number of features; ``form`` must be equal at all silos.
    """

    name: str
    kind: Kind
    values: NDArray[np.float64]
    width: int
    form: ColumnForm

    @property
    def gaps(self) -> int:
        return int(np.isnan(self.values).sum())


def read_column(table: Table, name: str, rule: ColumnRule, *, named: bool, by_row: bool = False) -> Column:
    """Read a column by its rule; `ConfigError` with column and line if a cell does not fit.

    With ``named``, the run knows the column's name, so errors may quote it. With ``by_row``, the rule alone decides the
    kind; a column without a rule is a number, and a misfit cell is a gap.
    """
    codes, cells = pd.factorize(table.cells[name])
    if by_row and rule.kind is None and not rule.categories:
        rule = replace(rule, kind="number")
    kind, wrong = infer(rule, cells)
    if wrong and not by_row:
        row = int(np.argmax(table.cells[name].isin(wrong).to_numpy()))
        where = table.place(name, row, named=named)
        raise ConfigError(where, wrong[table.cells[name].iloc[row]], _remedy(name if named else "NAME", kind))
    found = [np.nan if cell in wrong else _value(rule, kind, cell) for cell in cells]
    values = np.array(found, dtype=np.float64)[codes]
    known = np.flatnonzero(~np.isnan(values))
    line = int(table.cells.index[known[0]]) if known.size else 0
    width = {"number": 1, "category": len(rule.categories), "text": BUCKETS}[kind]
    return Column(name, kind, values, width, ColumnForm.of(name, kind, rule, line))


def encode(
    table: Table,
    columns: Sequence[Column],
    train: NDArray[np.int64],
    scales: Mapping[str, ColumnScale] | None = None,
    *,
    by_row: bool = False,
) -> NDArray[np.float32]:
    """All rows as features, float32 [rows, sum of widths], in the order of ``columns``.

    Rows ``train`` determine medians, means and deviations, unless all silos share ``scales``; other rows must not leak
    into them. A scaled number that is too large for float32 is a `ConfigError`, or with ``by_row`` is cut.
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
                scaled = np.clip(scaled, -_MOST_SCALED, _MOST_SCALED) if by_row else scaled
                block = scaled.astype(np.float32)[:, None]
            if not np.isfinite(block).all():
                place = table.place(column.name, int(np.argmin(np.isfinite(block[:, 0]))))
                problem = "the number is too far from those of the training rows to be standardised"
                raise ConfigError(place, problem, "Correct or remove the row, or ignore the column")
        blocks.append(block)
    return np.concatenate(blocks, axis=1)


def standardised(values: NDArray[np.float64], train: NDArray[np.int64]) -> NDArray[np.float64]:
    """Impute and standardise by the rows ``train``, float64 [n]. A column that is constant or all gaps in these rows
    becomes the difference from the constant (0 in these rows).
    """
    known = values[train][~np.isnan(values[train])]
    values = np.where(np.isnan(values), np.median(known) if known.size else 0.0, values)
    mean, deviation = float(values[train].mean()), float(values[train].std())
    if deviation <= _ROUNDING * abs(mean):
        # The mean of many 0.1 is not exactly 0.1, but their median is: the constant must become 0 in test rows too.
        mean, deviation = float(np.median(values[train])), 1.0
        values[train] = mean
    return (values - mean) / deviation


def _scaled(values: NDArray[np.float64], scale: ColumnScale) -> NDArray[np.float64]:
    return np.where(np.isnan(values), 0.0, (values - scale.mean) / scale.deviation)


def _value(rule: ColumnRule, kind: Kind, cell: str) -> float:
    """Value of a cell; a text is hashed by CRC-32, equal on every machine, so silos need no common vocabulary."""
    if rule.is_gap(cell):
        return np.nan
    if kind == "category":
        return rule.categories.index(cell)
    return zlib.crc32(cell.encode()) % BUCKETS if kind == "text" else rule.number(cell) or 0.0


def _remedy(called: str, kind: Kind) -> str:
    if kind == "category":
        return f"Correct the cell, or add it to task.columns: {{{called}: {{categories: [...]}}}}, or to gaps there"
    return (
        f"Correct the cell, or say in task.columns what it means: {{{called}: {{gaps: [...]}}}} for no value; decimal, "
        "thousands or unit for a number in another way of writing; kind: text for a column that has no numbers"
    )
