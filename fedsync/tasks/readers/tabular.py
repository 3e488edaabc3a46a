"""Readers of tables: CSV for texts and numbers, with errors that name the line, and Parquet for numbers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, not_installed
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.model.table_columns import PLAIN, ColumnForm, TableForm
from fedsync.policies.schema import Count, register
from fedsync.tasks.readers.user_files import check_cells, check_classes, check_finite, reading
from fedsync.tasks.samples import DataShape, Samples, Source

csv.field_size_limit(2**31 - 1)

_SEPARATORS = (",", ";", "\t", "|")
_UNNAMED = ("", "Unnamed: 0")
"""Names of a first column with row numbers, as pandas writes them."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of one file as text, without surrounding blanks.

    Args:
        columns: names in the header, in the file's order.
        cells: a pandas frame with these columns; the index is the line number in the file, from 1.
        first: position of the first column in the file, from 1; 2 if row numbers precede it.
    """

    file: str
    columns: tuple[str, ...]
    cells: Any
    first: int

    def __len__(self) -> int:
        return len(self.cells)

    def place(self, name: str, row: int, *, named: bool = False) -> str:
        """Place of a cell for messages; quotes nothing of the file, except a name that the run has ``named``."""
        return f"{self.file}, line {self.cells.index[row]}, {self.column(name, named=named)}"

    def column(self, name: str, *, named: bool = False) -> str:
        number = self.columns.index(name) + self.first
        return f"column {number} ({name!r})" if named else f"column {number}"

    def numbers(self, columns: Sequence[str]) -> NDArray[np.float32]:
        """Cells of some columns, float32 [rows, columns]; raises `ConfigError` if a cell is not a finite number."""
        check_cells(self.file, len(self) * len(columns))
        found = np.empty((len(self), len(columns)), dtype=np.float32)
        for at, name in enumerate(columns):
            values = [PLAIN.number(cell) for cell in self.cells[name]]
            if None in values:
                raise ConfigError(
                    self.place(name, values.index(None)),
                    "the cell is not a number",
                    "Mend or ignore the column, or use kind: csv, which takes texts and missing cells",
                )
            found[:, at] = values
        return found


def read_table(file: str, *, header: bool = False) -> Table:
    """Read a whole file, or only its ``header``. Empty rows are skipped.

    The delimiter is the most frequent candidate in the header. A first column without a name holds row numbers and is
    left out. Raises `ConfigError` if the file is missing, not text, or has no rows; a column name is missing or
    repeated; or a row's length differs from the header's.
    """
    import pandas as pd

    lines, rows = list[int](), list[list[str]]()
    for line, row in _records(file):
        if rows and len(row) != len(rows[0]):
            problem = f"{len(row)} cells, the header has {len(rows[0])}"
            raise ConfigError(f"{file}, line {line}", problem, "Mend or remove the row")
        lines.append(line)
        rows.append(row)
        if header:
            break
    if not rows:
        raise ConfigError(f"{file}, line 1", "the file is empty", "Give the silo data, or leave it out")
    first = 1 + (rows[0][0] in _UNNAMED)
    columns = _header(f"{file}, line {lines[0]}", tuple(rows[0][first - 1 :]), first)
    if not header and len(rows) == 1:
        raise ConfigError(file, "the file has a header but no rows", "Give the silo data, or leave it out")
    cells = pd.DataFrame(rows[1:], index=lines[1:], columns=range(len(rows[0])), dtype=object).iloc[:, first - 1 :]
    return Table(file, columns, cells.set_axis(columns, axis=1), first)


def check_column(place: str, name: str, columns: Sequence[str], file: str) -> None:
    """Raise `ConfigError` at ``place`` unless ``name`` is a column of ``file``."""
    if name not in columns:
        remedy = f"Write one of the {len(columns)} names in its header, as it stands there"
        raise ConfigError(place, f"{file} has no column {name!r}", remedy)


def _records(file: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, each with the number of its first line, from 1; raises `ConfigError`."""
    line = 1
    try:
        with (
            reading(file, "task.files"),
            open_data(file) as content,
            io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as stream,
        ):
            head = next((text for text in iter(stream.readline, "") if text.strip()), "")
            separator = max(_SEPARATORS, key=re.sub(r'"[^"]*"', "", head).count)
            stream.seek(0)
            reader = csv.reader(stream, delimiter=separator, strict=True)
            for row in reader:
                cells = [cell.strip() for cell in row]
                if any(cells):
                    yield line, cells
                line = reader.line_num + 1
    except csv.Error as error:
        problem, remedy = "quotation marks do not enclose a whole cell", "Double a mark within a cell"
        if "unexpected end" in str(error):
            problem, remedy = "a quotation mark opens a cell that never ends", "Close it, or remove it"
        raise ConfigError(f"{file}, line {line}", problem, remedy) from None
    except ValueError as error:  # includes UnicodeError
        raise ConfigError(file, "not a CSV file in UTF-8", "Export it as one") from error


def _header(place: str, columns: tuple[str, ...], first: int) -> tuple[str, ...]:
    for number, name in enumerate(columns, start=first):
        problem = "has the name of an earlier one" if columns.index(name) != number - first else "has no name"
        if problem == "has the name of an earlier one" or not name:
            remedy = "Give each column a name of its own, in the first line"
            raise ConfigError(place, f"column {number} {problem}", remedy)
    return columns


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
        cells = _parquet(self.file, columns) if _is_parquet(self.file) else read_table(self.file).numbers(columns)
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


def _is_parquet(file: str) -> bool:
    return Path(file).suffix in (".parquet", ".pq")


def _parquet_names(file: str) -> list[str]:
    parquet, invalid = _pyarrow()
    try:
        with open_data(file) as stream:
            return list(map(str, parquet.read_schema(stream).names))
    except (invalid, OSError) as error:
        raise ConfigError(file, "cannot read the file as Parquet", "Mend the path or the file") from error


def _parquet(file: str, columns: Sequence[str]) -> NDArray[np.float32]:
    parquet, invalid = _pyarrow()
    try:
        with open_data(file) as stream:
            check_cells(file, parquet.read_metadata(stream).num_rows * len(columns))
            table = parquet.read_table(stream, columns=list(columns))
    except (invalid, OSError, MemoryError) as error:
        raise ConfigError(file, "cannot read the file as Parquet", "Mend the file") from error
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
