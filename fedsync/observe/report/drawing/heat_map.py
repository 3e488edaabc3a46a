"""Cross-site matrix as an HTML table with coloured cells.

Readers can copy and search the numbers of a table. A table also takes a tenth of a picture's bytes: 20 silos with two
own models each make 840 cells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsync.common.foreign import escape
from fedsync.observe.report.results import SUBJECTS, CrossSiteTable, Estimate, short
from fedsync.observe.report.style import thin

SHADES = 7
"""Number of colours from worst to best; the style sheet defines each colour."""
MOST_SILOS = 40
SPACIOUS = 8
"""Maximum number of silos with intervals inside the cells; with more silos, tooltips show the intervals."""


def heat_map(matrix: CrossSiteTable, metric: str, *, lower: bool) -> str:
    """Return one metric of all models at all silos as HTML; "" if metrics are sealed."""
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
        """Return the colour index, from 0 for the worst to ``SHADES - 1`` for the best."""
        if self._most <= self._least:
            return SHADES // 2
        share = (value - self._least) / (self._most - self._least)
        return min(int((1 - share if self._lower else share) * SHADES), SHADES - 1)

    @property
    def key(self) -> str:
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
    """Return head and rows of each silo's improvement over its own local model; positive is better."""
    subjects: Mapping[str, Mapping[str, Estimate | None]] = matrix.gain.get(metric, {})
    if not any(cell is not None for row in subjects.values() for cell in row.values()):
        return [], []
    kept: Sequence[str] = list(subjects)
    rows = [[silo, *(signed(subjects[subject].get(silo)) for subject in kept)] for silo in matrix.silos]
    return ["silo", *(SUBJECTS.get(each, each) for each in kept)], rows


def signed(cell: Estimate | None) -> str:
    if cell is None or cell.value is None:
        return "not estimable"
    ends = "[no interval]" if cell.low is None or cell.high is None else f"[{cell.low:+.3f}, {cell.high:+.3f}]"
    return f"{cell.value:+.3f} {ends}"
