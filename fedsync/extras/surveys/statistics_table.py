"""Terminal table of a survey's statistics of columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from fedsync.observe.tables import cell, new_table

_BARS = " ▁▂▃▄▅▆▇█"


def statistics_table(found: Mapping[str, Any]) -> Table:
    """Return the output of `fedsync.evaluation.survey.findings.told` as a table, one row per data column."""
    classes = ", ".join(cell(count) for count in found["classes"])
    title = f"{found['silos']} silos, {cell(found['rows'])} training rows, of classes 0, 1 ...: {classes}"
    table = new_table(title, "column", "known", "missing", "mean", "deviation", "histogram")
    for column in found["columns"]:
        numbers = [cell(column.get(name), "{:.4g}") for name in ("mean", "deviation")]
        table.add_row(
            column["column"], cell(column["known"]), cell(column["missing"]), *numbers, _bars(column.get("counts"))
        )
    return table


def _bars(counts: list[int | str | None] | None) -> str:
    """Draw a histogram with one character per bin; a dot marks a withheld count."""
    if counts is None:
        return ""
    most = max((count for count in counts if isinstance(count, int)), default=0) or 1
    return "".join(_BARS[-(-8 * count // most)] if isinstance(count, int) else "·" for count in counts)
