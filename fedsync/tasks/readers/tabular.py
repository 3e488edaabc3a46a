"""Tables of numbers, as CSV or Parquet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.core.errors import ConfigError, not_installed
from fedsync.tasks.readers.files import check_cells, check_classes, check_finite
from fedsync.tasks.samples import DataShape, Samples
from fedsync.tasks.table import check_column, number, read_header, read_table


@dataclass(frozen=True, slots=True)
class TableSource:
    """The rows of a table, all of numbers, as they are: standardise them first if they want it.

    Args:
        file: its name; ``.parquet`` or ``.pq`` is read as Parquet, all others as CSV.
        target: column to predict, or None where nothing is (clusters, mixtures): targets are then 0.
        classes: how many, or 0 if the target is a number.
        ignore: columns to leave out.
    """

    file: str
    target: str | None = None
    classes: int = 2
    ignore: tuple[str, ...] = ()

    def shape(self) -> DataShape:
        names = _parquet_names(self.file) if _is_parquet(self.file) else read_header(self.file)
        return DataShape((len(self._features(names)),), self.classes if self.target is not None else 1)

    def read(self) -> tuple[Samples, Samples | None]:
        names = _parquet_names(self.file) if _is_parquet(self.file) else read_header(self.file)
        wanted = self._features(names)
        columns = [*wanted] if self.target is None else [*wanted, self.target]
        cells = _parquet(self.file, columns) if _is_parquet(self.file) else _csv(self.file, columns)
        check_finite(self.file, cells)
        inputs = np.ascontiguousarray(cells[:, : len(wanted)])
        if self.target is None:
            return Samples(inputs, np.zeros(len(cells), dtype=np.int64)), None
        if not self.classes:
            return Samples(inputs, cells[:, -1].copy()), None
        labels = cells[:, -1].astype(np.int64)
        # A half is no class.
        check_classes(self.file, np.where(labels == cells[:, -1], labels, -1), self.classes)
        return Samples(inputs, labels), None

    def _features(self, names: Sequence[str]) -> list[str]:
        """The columns that are neither target nor ignored, in the file's order."""
        if self.target is not None:
            check_column("task.data.target", self.target, names, self.file)
        for name in self.ignore:
            check_column("task.data.ignore", name, names, self.file)
        left = [name for name in names if name != self.target and name not in self.ignore]
        if not left:
            raise ConfigError("task.data.ignore", f"{self.file} has no column left to learn from", "Ignore fewer")
        return left


def _is_parquet(file: str) -> bool:
    return Path(file).suffix in (".parquet", ".pq")


def _csv(file: str, columns: Sequence[str]) -> NDArray[np.float32]:
    """Cells, float32 [rows, columns]."""
    table = read_table(file)
    places = [table.columns.index(name) for name in columns]
    check_cells(file, len(table.rows) * len(places))
    cells = np.empty((len(table.rows), len(places)), dtype=np.float32)
    for row, (line, texts) in enumerate(zip(table.lines, table.rows, strict=True)):
        for column, place in enumerate(places):
            value = number(texts[place])
            if value is None:
                raise ConfigError(
                    f"{file}, line {line}, column {columns[column]!r}",
                    f"{texts[place][:40]!r} is not a number",
                    "Mend or ignore the column, or use kind: csv, which takes texts and missing cells",
                )
            cells[row, column] = value
    return cells


def _parquet_names(file: str) -> list[str]:
    parquet, invalid = _pyarrow()
    try:
        return list(map(str, parquet.read_schema(file).names))
    except (invalid, OSError) as error:
        raise ConfigError(file, f"cannot read the file as Parquet: {error}", "Mend the path or the file") from error


def _parquet(file: str, columns: Sequence[str]) -> NDArray[np.float32]:
    """Cells, float32 [rows, columns]."""
    parquet, invalid = _pyarrow()
    try:
        check_cells(file, parquet.read_metadata(file).num_rows * len(columns))
        table = parquet.read_table(file, columns=list(columns))
    except (invalid, OSError, MemoryError) as error:
        raise ConfigError(file, f"cannot read the file as Parquet: {error}", "Mend the file") from error
    if table.num_rows == 0:
        raise ConfigError(file, "the file has no rows", "Give the silo data, or leave it out")
    cells = np.empty((table.num_rows, len(columns)), dtype=np.float32)
    for index, name in enumerate(columns):
        try:
            cells[:, index] = table.column(name).to_numpy()
        except (ValueError, TypeError, invalid) as error:
            raise ConfigError(f"{file}, column {name!r}", "the column is not one of numbers", "Ignore it") from error
    return cells


def _pyarrow() -> tuple[Any, type[Exception]]:
    """The module pyarrow.parquet, which has no types, and its error."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise not_installed("task.data.file", "pyarrow, which reads Parquet,", "sim") from error
    return parquet, pyarrow.ArrowException
