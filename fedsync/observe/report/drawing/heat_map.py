"""The cross-site matrix as a table with coloured cells: numbers that can be read, copied and searched.

A table and not a picture: 20 silos with two models of their own each have 840 cells, of which a table is a tenth of
the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsync.common.foreign import escape
from fedsync.observe.report.results import SUBJECTS, CrossSiteTable, Estimate, short
from fedsync.observe.report.style import thin

SHADES = 7
"""From the worst to the best of a matrix; the style sheet has a colour for each."""
MOST_SILOS = 40
"""Columns of a matrix; of more silos, as many evenly spaced."""
SPACIOUS = 8
"""Silos up to which intervals stand in the cells; with more, they show when a cell is pointed at."""


def heat_map(matrix: CrossSiteTable, metric: str, *, lower: bool) -> str:
    """One metric of all models at all silos, as HTML; "" where single silos are sealed.

    Args:
        matrix: of the run.
        metric: its name.
        lower: less is better.
    """
    if not matrix.silos:
        return ""
    columns = thin(range(len(matrix.silos)), MOST_SILOS)
    shown = {matrix.silos[column] for column in columns}
    rows = [
        (name, [row[column] if column < len(row) else None for column in columns])
        for name, row in zip(matrix.models, matrix.matrix[metric], strict=False)
        if not any(name.startswith(f"{silo}, ") for silo in matrix.silos if silo not in shown)
    ]
    values = [cell.value for _, cells in rows for cell in cells if cell is not None and cell.value is not None]
    scale = _Scale(min(values, default=0.0), max(values, default=0.0), lower)
    head = "".join(f'<th scope="col">{escape(matrix.silos[column])}</th>' for column in columns)
    spacious = len(columns) <= SPACIOUS
    body = "\n".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(_cell(cell, scale, spacious) for cell in cells)}</tr>'
        for name, cells in rows
    )
    caption = f"{metric} of each model (rows) on the test samples of each silo (columns)"
    caption += "; less is better" if lower else ""
    caption += (
        f". {len(columns)} of {len(matrix.silos)} silos, evenly spaced" if len(columns) < len(matrix.silos) else ""
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}">'
        f'<table class="heat{"" if spacious else " many"}">'
        f"<caption>{escape(caption)}. {scale.key}</caption><thead><tr><td></td>{head}</tr></thead>"
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


class _Scale:
    def __init__(self, least: float, most: float, lower: bool) -> None:
        self._least, self._most, self._lower = least, most, lower

    def shade(self, value: float) -> int:
        """0 for the worst, ``SHADES - 1`` for the best."""
        if self._most <= self._least:
            return SHADES // 2
        share = (value - self._least) / (self._most - self._least)
        return min(int((1 - share if self._lower else share) * SHADES), SHADES - 1)

    @property
    def key(self) -> str:
        """What the colours mean, worst to best."""
        worst, best = (self._most, self._least) if self._lower else (self._least, self._most)
        shades = "".join(f'<span class="h{shade}">&nbsp;</span>' for shade in range(SHADES))
        scale = f'{short(worst)} <span aria-hidden="true">{shades}</span> {short(best)}'
        return f'<span class="key">{scale}</span>. A dot: nobody evaluated that.'


def _cell(cell: Estimate | None, scale: _Scale, spacious: bool) -> str:
    if cell is None:
        return '<td class="none" title="nobody evaluated this">·</td>'
    if cell.value is None:
        return f'<td class="none" title="not estimable">{"not estimable" if spacious else "n.e."}</td>'
    interval = "" if cell.low is None or cell.high is None else f"{short(cell.low)}-{short(cell.high)}"
    inside = f"<small>{interval or 'no interval'}</small>" if spacious else ""
    number = short(cell.value) if spacious else f"{cell.value:.2f}" if abs(cell.value) < 10 else short(cell.value)
    return f'<td class="h{scale.shade(cell.value)}" title="{escape(cell.words)}">{number}{inside}</td>'


def gains(matrix: CrossSiteTable, metric: str) -> tuple[list[str], list[list[str]]]:
    """What federation brought each silo over its own local model: head and rows of a table, positive is better."""
    subjects: Mapping[str, Mapping[str, Estimate | None]] = matrix.gain.get(metric, {})
    if not any(cell is not None for row in subjects.values() for cell in row.values()):
        return [], []
    kept: Sequence[str] = list(subjects)
    rows = [[silo, *(signed(subjects[subject].get(silo)) for subject in kept)] for silo in matrix.silos]
    return ["silo", *(SUBJECTS.get(each, each) for each in kept)], rows


def signed(cell: Estimate | None) -> str:
    """A gain in words."""
    if cell is None or cell.value is None:
        return "not estimable"
    ends = "[no interval]" if cell.low is None or cell.high is None else f"[{cell.low:+.3f}, {cell.high:+.3f}]"
    return f"{cell.value:+.3f} {ends}"
