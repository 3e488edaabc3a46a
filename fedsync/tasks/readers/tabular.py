"""Tables: one reader of CSV for texts and numbers, with complaints that name the line, and of Parquet for numbers."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.fence import open_data
from fedsync.core.errors import ConfigError, not_installed
from fedsync.tasks.readers.files import check_cells, check_classes, check_finite
from fedsync.tasks.samples import DataShape, Samples

MISSING = frozenset({"", "?", "NA", "nan"})


@dataclass(frozen=True, slots=True)
class Table:
    """One file's cells as text, stripped of surrounding blanks.

    Args:
        file: its name, for messages.
        columns: the header.
        rows: one tuple of cells a row, each as long as the header.
        lines: line number in the file of each row.
    """

    file: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]

    def column(self, name: str) -> list[str]:
        index = self.columns.index(name)
        return [row[index] for row in self.rows]

    def numbers(self, columns: Sequence[str]) -> NDArray[np.float32]:
        """Cells of some columns, float32 [rows, columns]. Raises `ConfigError` where one is not a finite number."""
        places = [self.columns.index(name) for name in columns]
        check_cells(self.file, len(self.rows) * len(places))
        cells = np.empty((len(self.rows), len(places)), dtype=np.float32)
        for row, (line, texts) in enumerate(zip(self.lines, self.rows, strict=True)):
            for column, place in enumerate(places):
                value = number(texts[place])
                if value is None:
                    raise ConfigError(
                        f"{self.file}, line {line}, column {place + 1}",
                        "the cell is not a number",
                        "Mend or ignore the column, or use kind: csv, which takes texts and missing cells",
                    )
                cells[row, column] = value
        return cells


def read_table(file: str) -> Table:
    """Read a whole file. Blank lines are skipped.

    Raises:
        ConfigError: no such file, not text, no rows, a header with a name twice, or a row of another
            length than the header.
    """
    rows: list[tuple[str, ...]] = []
    lines: list[int] = []
    cells = _cells(file)
    columns = _header(file, cells)
    for line, row in cells:
        if len(row) != len(columns):
            raise ConfigError(
                f"{file}, line {line}", f"{len(row)} cells, the header has {len(columns)}", "Mend or remove the row"
            )
        rows.append(row)
        lines.append(line)
    if not rows:
        raise ConfigError(file, "the file has a header but no rows", "Give the silo data, or leave it out")
    return Table(file, columns, tuple(rows), tuple(lines))


def read_header(file: str) -> tuple[str, ...]:
    """The names of a file's columns, reading its first line only. Raises as `read_table` does."""
    return _header(file, _cells(file))


def number(cell: str) -> float | None:
    """The finite number that a cell holds, or None."""
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def check_column(place: str, name: str, columns: Sequence[str], file: str) -> None:
    """Raise `ConfigError` at ``place`` unless ``name`` is one of the columns of ``file``."""
    if name not in columns:
        remedy = f"Write one of the {len(columns)} names in its header, as it stands there"
        raise ConfigError(place, f"{file} has no column {name!r}", remedy)


def _cells(file: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line number and stripped cells of each line that is not blank."""
    try:
        with open_data(file) as content, io.TextIOWrapper(content, encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            for row in reader:
                if row:
                    yield reader.line_num, tuple(cell.strip() for cell in row)
    except OSError as error:
        raise ConfigError(file, f"cannot read the file: {error.strerror}", "Mend the path in task.files") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(file, "not a CSV file in UTF-8", "Export it as one") from error


def _header(file: str, cells: Iterator[tuple[int, tuple[str, ...]]]) -> tuple[str, ...]:
    line, columns = next(cells, (1, ()))
    twice = [place for place, name in enumerate(columns, start=1) if columns.index(name) != place - 1]
    if not columns or twice:
        problem = f"column {twice[0]} has the name of an earlier one" if twice else "the file is empty"
        raise ConfigError(f"{file}, line {line}", problem, "Give each column a name of its own, in the first line")
    return columns


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
        cells = _parquet(self.file, columns) if _is_parquet(self.file) else read_table(self.file).numbers(columns)
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


def _parquet_names(file: str) -> list[str]:
    parquet, invalid = _pyarrow()
    try:
        with open_data(file) as stream:
            return list(map(str, parquet.read_schema(stream).names))
    except (invalid, OSError) as error:
        raise ConfigError(file, "cannot read the file as Parquet", "Mend the path or the file") from error


def _parquet(file: str, columns: Sequence[str]) -> NDArray[np.float32]:
    """Cells, float32 [rows, columns]."""
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
    """The module pyarrow.parquet, which has no types, and its error."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise not_installed("task.data.file", "pyarrow, which reads Parquet,", "sim") from error
    return parquet, pyarrow.ArrowException
