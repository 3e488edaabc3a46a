"""Reader of tables of numbers, CSV or Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, not_installed
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.extras.readers.samples import DataShape, Samples, Source
from fedsync.model.table_columns import PLAIN, ColumnForm, TableForm
from fedsync.policies.schema import Count, register
from fedsync.tasks.readers.tabular import Table, check_column, read_table
from fedsync.tasks.readers.user_files import check_cells, check_classes, check_finite


@register("table")
@dataclass(frozen=True, slots=True)
class TableSource(Source):
    """A table of numbers, CSV or Parquet.

    Rows are not scaled: standardise the columns first if necessary. Without a target, targets are 0.
    """

    file: str
    """File with the table: Parquet if its name ends in ``.parquet`` or ``.pq``, otherwise CSV."""

    target: str | None = None
    """Column to predict; null for tasks without a target (clusters, mixtures)."""

    classes: Count = 2
    """Number of classes; 0 for numeric targets."""

    ignore: list[str] = field(default_factory=list, hash=False)
    """Names of columns to leave out."""

    def shape(self) -> DataShape:
        return DataShape((len(self._features()),), self.classes if self.target is not None else 1)

    def table(self) -> TableForm:
        return tuple(ColumnForm(name, "number") for name in self._features())

    def read(self) -> tuple[Samples, Samples | None]:
        wanted = self._features()
        columns = [*wanted] if self.target is None else [*wanted, self.target]
        cells = _parquet(self.file, columns) if _is_parquet(self.file) else _numbers(read_table(self.file), columns)
        check_finite(self.file, cells)
        inputs = np.ascontiguousarray(cells[:, : len(wanted)])
        if self.target is None:
            return Samples(inputs, np.zeros(len(cells), dtype=np.int64)), None
        if not self.classes:
            return Samples(inputs, cells[:, -1].copy()), None
        labels = cells[:, -1].astype(np.int64)
        # A fraction is not a class; it is marked as -1.
        check_classes(self.file, np.where(labels == cells[:, -1], labels, -1), self.classes)
        return Samples(inputs, labels), None

    def _features(self) -> list[str]:
        """Sorted feature columns: neither target nor ignored. Silos' files may order columns differently."""
        names = _parquet_names(self.file) if _is_parquet(self.file) else read_table(self.file, header=True).columns
        if self.target is not None:
            check_column("task.data.target", self.target, names, self.file)
        for name in self.ignore:
            check_column("task.data.ignore", name, names, self.file)
        left = sorted(name for name in names if name != self.target and name not in self.ignore)
        if not left:
            raise ConfigError("task.data.ignore", f"{self.file} has no column left to learn from", "Ignore fewer")
        return left


def _numbers(table: Table, columns: Sequence[str]) -> NDArray[np.float32]:
    """Cells of some columns, float32 [rows, columns]; raises `ConfigError` if a cell is not a finite number."""
    check_cells(table.file, len(table) * len(columns))
    found = np.empty((len(table), len(columns)), dtype=np.float32)
    for at, name in enumerate(columns):
        values = [PLAIN.number(cell) for cell in table.cells[name]]
        if None in values:
            problem = "the cell is not a number"
            remedy = "Correct or ignore the column, or use kind: csv, which accepts texts and missing cells"
            raise ConfigError(table.place(name, values.index(None)), problem, remedy)
        found[:, at] = values
    return found


def _is_parquet(file: str) -> bool:
    return Path(file).suffix in (".parquet", ".pq")


def _parquet_names(file: str) -> list[str]:
    parquet, invalid = _pyarrow()
    try:
        with open_data(file) as stream:
            return list(map(str, parquet.read_schema(stream).names))
    except (invalid, OSError) as error:
        raise ConfigError(file, "cannot read the file as Parquet", "Correct the path or the file") from error


def _parquet(file: str, columns: Sequence[str]) -> NDArray[np.float32]:
    parquet, invalid = _pyarrow()
    try:
        with open_data(file) as stream:
            check_cells(file, parquet.read_metadata(stream).num_rows * len(columns))
            table = parquet.read_table(stream, columns=list(columns))
    except (invalid, OSError, MemoryError) as error:
        raise ConfigError(file, "cannot read the file as Parquet", "Correct the file") from error
    if table.num_rows == 0:
        raise ConfigError(file, "the file has no rows", "Give the silo data, or leave it out")
    cells = np.empty((table.num_rows, len(columns)), dtype=np.float32)
    for index, name in enumerate(columns):
        try:
            cells[:, index] = table.column(name).to_numpy()
        except (ValueError, TypeError, invalid) as error:
            place = f"{file}, column {_parquet_names(file).index(name) + 1}"
            raise ConfigError(place, "the column is not one of numbers", "Ignore it") from error
    return cells


def _pyarrow() -> tuple[Any, type[Exception]]:
    """Import pyarrow.parquet, which has no types, and pyarrow's error class."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise not_installed("task.data.file", "pyarrow, which reads Parquet,", "sim") from error
    return parquet, pyarrow.ArrowException
