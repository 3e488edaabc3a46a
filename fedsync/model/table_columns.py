"""Rules for the columns of a table: cell parsing, and the properties that must agree at all silos.

A cell is text and holds a missing value, a number or a word; `ColumnRule` decides which, alike at all silos. If the
rule leaves a column's kind open, `infer` decides by the cells. A cell that only resembles a number is an error: read as
a word, it would be hashed; read as a number, its value would be a guess. No error of this module quotes a cell.
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
"""Gap markers in lower case, used if a rule names none: those of pandas and a few more."""

MOST_CELL = 2.0**42
"""Largest number of a table. Overflows and "no data" markers such as -3.4e38 would dominate all other values."""

_MONTHS = (
    "jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|nov(ember)?"
    "|dec(ember)?"
)
_LIKE_A_NUMBER = re.compile(
    rf"[-+\u2212±<>=~≈≤≥(€$£¥]*\s*[.,]?\s*\d|[-+]?inf(inity)?$|#[a-z0-9/]+[!?]$|.*\b({_MONTHS})\b.*\d",
    re.IGNORECASE,
)
"""Other number formats, dates, infinities, and errors of spreadsheets."""

_MOST_NAMED = 4


@dataclass(frozen=True, slots=True)
class ColumnRule:
    """Description of a column in the run's configuration.

    Args:
        kind: kind of its cells; None leaves it to the cells.
        unit: unit of a number; a cell may hold it after the number.
        categories: all allowed words, in the order of features, or of classes in the target column.
        gaps: cells without a value, besides empty cells; None for `USUAL_GAPS`.
        thousands: mark between groups of three digits; empty for none.
    """

    kind: Kind | None = None
    unit: str = ""
    categories: tuple[str, ...] = ()
    gaps: tuple[str | float, ...] | None = None
    decimal: str = "."
    thousands: str = ""

    def number(self, cell: str) -> float | None:
        """Return the number in a cell; None if there is none or it exceeds `MOST_CELL`."""
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
    """Match decimal numbers in ASCII; Python's ``float`` would accept 1_0 as ten."""
    whole, point = r"[0-9]+", re.escape(decimal)
    if thousands:
        whole = rf"(?:[0-9]{{1,3}}(?:{re.escape(thousands)}[0-9]{{3}})+|{whole})"
    return re.compile(rf"[-+]?(?:{whole}(?:{point}[0-9]*)?|{point}[0-9]+)(?:[eE][-+]?[0-9]+)?")


def infer(rule: ColumnRule, cells: Iterable[str]) -> tuple[Kind, dict[str, str]]:
    """Return the kind of a column, and its wrong cells with the problem of each. ``cells`` are distinct."""
    known = [cell for cell in cells if not rule.is_gap(cell)]
    if rule.kind == "category" or (rule.kind is None and rule.categories):
        return "category", dict.fromkeys(set(known) - set(rule.categories), "the cell is none of the categories")
    if rule.kind == "text":
        return "text", {}
    words = [cell for cell in known if rule.number(cell) is None]
    alike = {cell: _wrong(rule, cell) for cell in words if rule.kind == "number" or _LIKE_A_NUMBER.match(cell)}
    if words and not alike and len(words) == len(known):
        return "text", {}
    return "number", alike or dict.fromkeys(words, "the column holds numbers, but this cell is a word")


def _wrong(rule: ColumnRule, cell: str) -> str:
    value = rule._parsed(cell)
    if value is None:
        alike = "the cell looks like a number or a date, but is no plain number"
        return "the cell is no number" if rule.kind else alike
    size = "no finite number" if math.isinf(value) else f"a number beyond {MOST_CELL:.4g}"
    return f"the cell is {size}"


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """Column as one silo has it. ``meaning`` is its kind and the run's rule for it, equal at all silos. ``row`` is that
    of the first known cell in the silo's file, the header being row 1, for messages; 0 for none.
    """

    name: str
    meaning: str
    row: int = 0

    @classmethod
    def of(cls, name: str, kind: str, rule: ColumnRule, row: int = 0) -> ColumnForm:
        said = {key: value for key, value in asdict(rule).items() if key != "kind" and value != getattr(PLAIN, key)}
        return cls(name, f"{kind} {json.dumps(said, ensure_ascii=False)}" if said else kind, row)


TableForm = tuple[ColumnForm, ...]
"""All columns of a silo's table, compared by name: the order in files may differ."""


def digest_of(columns: TableForm) -> bytes:
    return hashlib.sha256(json.dumps([(one.name, one.meaning) for one in columns]).encode()).digest()


def difference(mine: TableForm, theirs: TableForm, other: str) -> str:
    """Describe how a silo's columns differ from those of the silo ``other``, without quoting cells."""
    here, there = ({one.name: one for one in columns} for columns in (mine, theirs))
    found = [f"it has no column {name!r}, and {other} has" for name in there if name not in here]
    found += [f"it has a column {name!r}, and {other} has none" for name in here if name not in there]
    found += [
        f"column {name!r} ({f'row {one.row}' if one.row else 'no known cell'}) is {one.meaning}, and "
        f"{there[name].meaning}{'' if there[name].row else ' (no known cell)'} at {other}"
        for name, one in here.items()
        if name in there and there[name].meaning != one.meaning
    ]
    more = [f"{len(found) - _MOST_NAMED} more"] if len(found) > _MOST_NAMED else []
    return "; ".join([*found[:_MOST_NAMED], *more])


def described(columns: Mapping[ColumnForm, int]) -> str:
    """Return one line for users: the inferred kinds of columns without a rule, with their numbers of gaps."""
    told = [f"{one.name} {one.meaning}" + (f" ({gaps} gaps)" if gaps else "") for one, gaps in columns.items()]
    return f"kinds of columns, guessed from their cells: {', '.join(told)}. State them in task.columns"
