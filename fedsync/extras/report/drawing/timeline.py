"""Timeline figure of a run: work and idle times of each silo, with reasons, one row per silo."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsync.extras.report.data import OrderSpan, RunData
from fedsync.extras.report.style import COLOURS, GRID, INK, PAPER, Picture, canvas, name_of, thin
from fedsync.extras.watch.absences import AWAY, DROPPED, GONE, PAUSED, WAITING, pieces

if TYPE_CHECKING:
    from matplotlib.patches import PathPatch

MOST_SILOS = 32
MOST_COMMITS = 400

Box = tuple[float, float, int]


@dataclass(frozen=True, slots=True)
class _Kind:
    label: str
    colour: str
    hatch: str = ""
    edge: str = PAPER

    def look(self) -> dict[str, Any]:
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": self.edge}


_COMPUTE, _OVERHEAD, _FAILED = "compute", "overhead", "no update"
_KINDS = {
    _COMPUTE: _Kind(_COMPUTE, COLOURS[0]),
    _OVERHEAD: _Kind(_OVERHEAD, COLOURS[4], "////"),
    _FAILED: _Kind(_FAILED, COLOURS[1], "xxxx"),
    WAITING: _Kind(WAITING, PAPER, edge=GRID),
    PAUSED: _Kind("paused", COLOURS[5], "||||"),
    DROPPED: _Kind("dropped", COLOURS[3], "\\\\\\\\"),
    AWAY: _Kind("away", PAPER, "....", COLOURS[2]),
    GONE: _Kind("not connected", GRID),
}
_ALWAYS = 4
"""Number of first kinds that the legend always has; the legend has other kinds only if they occur."""


def timeline(run: RunData, most_orders: int = 2500) -> Picture | None:
    """Draw each silo's work and idle times, with commits as marks at the bottom; None without orders.

    Long runs are cut off after the first ``most_orders`` orders.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    names = list(thin(run.silos, MOST_SILOS))
    row_of = {name: row for row, name in enumerate(names)}
    orders = sorted((span for span in run.orders if span.silo in row_of), key=lambda span: span.begin_s)
    if not orders:
        return None
    whole_s = max(span.end_s for span in orders)
    shown_s = whole_s if len(orders) <= most_orders else orders[most_orders].begin_s
    kept = [span for span in orders if span.begin_s < shown_s or shown_s == whole_s]
    commits = [point.at_s for point in run.points if point.at_s <= shown_s]
    boxes = _boxes(run, kept, row_of, shown_s)
    told = [kind for index, kind in enumerate(_KINDS) if index < _ALWAYS or boxes[kind]]
    columns = 5 if len(told) == _ALWAYS else 4
    with canvas(7.0, 0.95 + 0.27 * max(len(names), 3) + 0.19 * (len(told) // columns)) as (figure, ax):
        for kind in told:
            # `add_patch` would compute the extent of every box, although the limits are set below.
            ax.add_artist(_patch(boxes[kind], _KINDS[kind]))
        # Short marks, because full-height lines would hide the boxes.
        for at_s in thin(commits, MOST_COMMITS):
            ax.axvline(at_s, ymax=0.04, color=INK, linewidth=1.0)
        ax.set_xlim(0, shown_s or 1.0)
        ax.set_ylim(len(names) - 0.1, -0.6)
        ax.set_yticks(range(len(names)), [name_of(name) for name in names])
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("time [s]")
        handles: list[Patch | Line2D] = [Patch(label=_KINDS[kind].label, **_KINDS[kind].look()) for kind in told]
        handles.append(Line2D([], [], label="commit", color=INK, linestyle="", marker="|", markersize=8))
        figure.legend(handles=handles, loc="outside upper center", ncols=columns)
    failed = sum(not span.done for span in kept)
    absent_s = {kind: sum(end_s - begin_s for begin_s, end_s, _ in boxes[kind]) for kind in told[_ALWAYS:]}
    absent = ", ".join(f"{seconds:.1f} s {_KINDS[kind].label}" for kind, seconds in absent_s.items())
    alt = (
        f"Timeline of {run.label}: {len(names)} silos over {shown_s:.1f} s, {len(kept)} orders, {failed} without an "
        f"update, {len(commits)} commits. Of all silos' time {run.summary['wait_fraction']:.0%} was waiting."
        + (f" Of that {absent}." if absent else "")
    )
    return Picture(
        f"Timeline of {run.label}",
        alt,
        _caption(run, names, shown_s, whole_s, commits, told),
        figure,
        wide=True,
    )


def _caption(
    run: RunData, names: Sequence[str], shown_s: float, whole_s: float, commits: Sequence[float], told: Collection[str]
) -> str:
    notes = ["An order's training is drawn before its overhead. Its beginning is not measured."]
    if any(not span.done for span in run.orders):
        notes.append("No update: the order failed, or was unfinished when training ended.")
    if DROPPED in told:
        notes.append("Dropped: by the operator.")
    if AWAY in told:
        notes.append("Away: outside the silo's availability window.")
    if len(names) < len(run.silos):
        notes.append(f"{len(names)} of {len(run.silos)} silos, evenly spaced.")
    if shown_s < whole_s:
        notes.append(f"The first {shown_s:.1f} s of {whole_s:.1f} s.")
    notes.append("Marks at the bottom are commits: updates become a new version of the model.")
    if len(commits) > MOST_COMMITS:
        notes.append(f"{MOST_COMMITS} of {len(commits)} commits, evenly spaced.")
    return " ".join(notes)


def _boxes(run: RunData, orders: Iterable[OrderSpan], row_of: Mapping[str, int], end_s: float) -> dict[str, list[Box]]:
    boxes: dict[str, list[Box]] = {kind: [] for kind in _KINDS}
    idle_since = dict.fromkeys(row_of, 0.0)

    def rest(silo: str, until_s: float) -> None:
        for piece in pieces(idle_since[silo], until_s, run.absences.get(silo, ())):
            boxes[piece.why].append((piece.begin_s, piece.end_s, row_of[silo]))

    for span in orders:
        row, stop_s = row_of[span.silo], min(span.end_s, end_s)
        middle_s = min(span.begin_s + span.compute_s, stop_s)
        if span.begin_s > idle_since[span.silo]:
            rest(span.silo, span.begin_s)
        if span.done:
            boxes[_COMPUTE].append((span.begin_s, middle_s, row))
            boxes[_OVERHEAD].append((middle_s, stop_s, row))
        else:
            boxes[_FAILED].append((span.begin_s, stop_s, row))
        idle_since[span.silo] = stop_s
    for silo, since_s in idle_since.items():
        if since_s < end_s:
            rest(silo, end_s)
    return boxes


def _patch(boxes: Iterable[Box], kind: _Kind) -> PathPatch:
    """Draw all boxes of a kind as one path: separate paths would take three times as many bytes."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    corners: list[tuple[float, float]] = []
    codes: list[np.uint8] = []
    for begin_s, end_s, row in boxes:
        if end_s <= begin_s:
            continue
        top, bottom = row - 0.36, row + 0.36
        corners += [(begin_s, top), (end_s, top), (end_s, bottom), (begin_s, bottom), (begin_s, top)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    path = Path(corners or [(0.0, 0.0)], codes or [Path.MOVETO])
    return PathPatch(path, linewidth=0.4, **kind.look())
