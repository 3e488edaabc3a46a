"""Reading one CSV file, with complaints that name the line."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from fedsync.core.errors import ConfigError

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
        near = get_close_matches(name, columns, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"The columns are {', '.join(columns)}"
        raise ConfigError(place, f"{file} has no column {name!r}", hint)


def _cells(file: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line number and stripped cells of each line that is not blank."""
    try:
        with Path(file).open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream)
            for row in reader:
                if row:
                    yield reader.line_num, tuple(cell.strip() for cell in row)
    except OSError as error:
        raise ConfigError(file, f"cannot read the file: {error.strerror}", "Mend the path in task.files") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(file, f"not a CSV file in UTF-8: {error}", "Export it as one") from error


def _header(file: str, cells: Iterator[tuple[int, tuple[str, ...]]]) -> tuple[str, ...]:
    line, columns = next(cells, (1, ()))
    twice = sorted({name for name in columns if columns.count(name) > 1})
    if not columns or twice:
        problem = f"the header names {', '.join(map(repr, twice))} twice" if twice else "the file is empty"
        raise ConfigError(f"{file}, line {line}", problem, "Give each column a name of its own, in the first line")
    return columns
