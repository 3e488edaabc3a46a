"""Columns of a table: how their cells are read, and what must be the same at every silo.

A cell is text. It is a gap, a number, or a word; `ColumnRule` says which, alike at all silos. Where the rule leaves the
kind of a column open, the column's own cells decide, in `infer`. A cell that only looks like a number is an error: as a
word it would be hashed, and as a number it would be guessed.

No error of this module quotes a cell.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Literal

Kind = Literal["number", "category", "text"]

USUAL_GAPS = frozenset(
    ("", "?", "-", "--", ".", "na", "n/a", "nan", "-nan", "null", "none", "nil", "<na>", "#na", "#n/a", "#n/a n/a")
)
"""Markers of a gap in small letters, where a rule names no others; they are those of pandas and a few more."""

MOST_CELL = 2.0**42
"""No number of a table is larger: an overflow or a marker of "no data", such as -3.4e38, would hide all others."""

_MONTHS = (
    "jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?"
    "|dec(ember)?"
)
_LIKE_A_NUMBER = re.compile(
    rf"[-+\u2212±<>=~≈≤≥(€$£¥]*\s*[.,]?\s*\d|[-+]?inf(inity)?$|#[a-z0-9/]+[!?]$|.*\b({_MONTHS})\b.*\d",
    re.IGNORECASE,
)
"""Numbers in other ways of writing, dates, infinities, and a spreadsheet's errors."""

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class ColumnRule:
    """A run's description of a column.

    Args:
        kind: of its cells; None leaves it to the cells.
        unit: of a number; it may stand behind the number in a cell.
        categories: all words that there may be, in the order of features, or of classes where the column is the target.
        gaps: cells that hold no value, besides empty ones; None for `USUAL_GAPS`.
        decimal: mark before the decimals.
        thousands: mark between groups of three digits; empty for none.
    """

    kind: Kind | None = None
    unit: str = ""
    categories: tuple[str, ...] = ()
    gaps: tuple[str | float, ...] | None = None
    decimal: str = "."
    thousands: str = ""

    def number(self, cell: str) -> float | None:
        """The number in a cell; None where there is none, or a larger one than `MOST_CELL`."""
        value = self._parsed(cell)
        return value if value is not None and abs(value) <= MOST_CELL else None

    def is_gap(self, cell: str) -> bool:
        if self.gaps is None:
            return cell.casefold() in USUAL_GAPS and cell not in self.categories
        return cell == "" or any(
            cell == gap if isinstance(gap, str) else self._parsed(cell) == gap for gap in self.gaps
        )

    def _parsed(self, cell: str) -> float | None:
        if self.unit and cell.endswith(self.unit):
            cell = cell[: -len(self.unit)].rstrip()
        if not _numbers(self.decimal, self.thousands).fullmatch(cell):
            return None
        plain = cell.replace(self.thousands, "") if self.thousands else cell
        return float(plain.replace(self.decimal, "."))


PLAIN = ColumnRule()


@lru_cache(maxsize=32)
def _numbers(decimal: str, thousands: str) -> re.Pattern[str]:
    """Decimal numbers in ASCII; Python's own ``float`` takes 1_0 for ten."""
    whole, point = r"[0-9]+", re.escape(decimal)
    if thousands:
        whole = rf"(?:[0-9]{{1,3}}(?:{re.escape(thousands)}[0-9]{{3}})+|{whole})"
    return re.compile(rf"[-+]?(?:{whole}(?:{point}[0-9]*)?|{point}[0-9]+)(?:[eE][-+]?[0-9]+)?")


def infer(rule: ColumnRule, cells: Iterable[str]) -> tuple[Kind, dict[str, str]]:
    """The kind of a column, and which of its cells do not fit: each with what is wrong with it.

    Args:
        rule: for the column.
        cells: that the column has, each once; gaps are passed over.
    """
    known = [cell for cell in cells if not rule.is_gap(cell)]
    if rule.kind == "category" or (rule.kind is None and rule.categories):
        return "category", dict.fromkeys(set(known) - set(rule.categories), "the cell is none of the categories")
    if rule.kind == "text":
        return "text", {}
    words = [cell for cell in known if rule.number(cell) is None]
    alike = {cell: _wrong(rule, cell) for cell in words if rule.kind == "number" or _LIKE_A_NUMBER.match(cell)}
    if words and not alike and len(words) == len(known):
        return "text", {}
    return "number", alike or dict.fromkeys(words, "the column holds numbers, and a word here")


def _wrong(rule: ColumnRule, cell: str) -> str:
    value = rule._parsed(cell)
    if value is None:
        return (
            "the cell is no number" if rule.kind else "the cell looks like a number or a date, and is no plain number"
        )
    size = "no finite number" if math.isinf(value) else f"a number beyond {MOST_CELL:.4g}"
    return f"the cell is {size}"


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """One column as a silo has it.

    Args:
        name: in the header.
        meaning: its kind, and what the run says of it; the same at all silos.
        row: of its first known cell in the silo's file, the header being row 1, for people; 0 for none.
    """

    name: str
    meaning: str
    row: int = 0

    @classmethod
    def of(cls, name: str, kind: str, rule: ColumnRule, row: int = 0) -> ColumnForm:
        said = {key: value for key, value in asdict(rule).items() if key != "kind" and value != getattr(PLAIN, key)}
        return cls(name, f"{kind} {json.dumps(said, ensure_ascii=False)}" if said else kind, row)


TableForm = tuple[ColumnForm, ...]
"""All columns of a silo's table, by name: files may have them in any order."""


def digest_of(columns: TableForm) -> bytes:
    """SHA-256 of names and meanings: equal where two silos' tables mean the same."""
    return hashlib.sha256(json.dumps([(one.name, one.meaning) for one in columns]).encode()).digest()


def difference(mine: TableForm, theirs: TableForm, other: str) -> str:
    """Differences of a silo's columns from those of the silo ``other``, in words; no cell is quoted."""
    here, there = ({one.name: one for one in columns} for columns in (mine, theirs))
    found = [f"it has no column {name!r}, and {other} has" for name in there if name not in here]
    found += [f"it has a column {name!r}, and {other} has none" for name in here if name not in there]
    found += [
        f"column {name!r} (row {one.row}) is {one.meaning}, and {there[name].meaning} at {other}"
        for name, one in here.items()
        if name in there and there[name].meaning != one.meaning
    ]
    more = [f"{len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    return "; ".join([*found[:_MOST_NAMED], *more])


def described(columns: Mapping[ColumnForm, int]) -> str:
    """One line for people: what columns of which the run says nothing were taken for.

    Args:
        columns: of a table, and how many gaps each has.
    """
    told = [f"{one.name} {one.meaning}" + (f" ({gaps} gaps)" if gaps else "") for one, gaps in columns.items()]
    return f"columns, taken by their cells: {', '.join(told)}. Say it for certain in task.columns"
