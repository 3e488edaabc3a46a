"""Reader of CSV files, with errors that name the line."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.tasks.readers.user_files import reading

csv.field_size_limit(2**31 - 1)

_SEPARATORS = (",", ";", "\t", "|")
_UNNAMED = ("", "Unnamed: 0")
"""Names of a first column with row numbers, as pandas writes them."""


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of one file as text, without surrounding blanks.

    ``cells`` is a pandas frame with the ``columns`` of the header; its index is the line number in the file, from 1.
    ``first`` is the position of the first column in the file, from 1; 2 if row numbers precede it.
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
            raise ConfigError(f"{file}, line {line}", problem, "Correct or remove the row")
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
    if name not in columns:
        remedy = f"Write one of the {len(columns)} names in its header, as it stands there"
        raise ConfigError(place, f"{file} has no column {name!r}", remedy)


def _records(file: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not blank, each with the number of its first line, from 1; raises `ConfigError`."""
    line = 1
    try:
        with (
            reading(file, "task"),
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
