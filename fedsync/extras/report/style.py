"""Style of figures for light and dark screens, print, greyscale and colour-blind readers.

Colours are from Okabe and Ito. No two series of a figure have the same line style, marker or hatch. Ink, grid and
paper have unique colours, so that a page can replace them with its own colours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fedsync.common.errors import not_installed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID, PAPER = "#1a1b1c", "#d9dadb", "#fefefd"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK, "#8c8c00")
LINES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)), (0, (3, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "////", "\\\\\\\\", "xxxx", "||||", "++++", "----", "//")
SERIES = len(COLOURS)
"""Maximum number of distinguishable series in a figure."""

_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "fedsync",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 3.2,
    "hatch.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "savefig.facecolor": "none",
}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Picture:
    """Finished figure with title and caption; ``wide`` if it needs the full width of the page."""

    title: str
    alt: str
    caption: str
    figure: Figure
    wide: bool = False


@contextmanager
def canvas(width: float = 4.6, height: float = 3.0) -> Iterator[tuple[Figure, Axes]]:
    """Provide a figure without a window, and its axes; sizes in inches. `ConfigError` without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise not_installed("report", "matplotlib", "sim") from error
    with rc_context(_STYLE):
        # Padding, because a browser's font may be wider than the font measured here.
        layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
        figure = Figure(figsize=(width, height), layout=layout)
        yield figure, figure.add_subplot()


def series(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % SERIES], "linestyle": LINES[(index + index // SERIES) % SERIES]}


def marked(index: int, count: int) -> dict[str, Any]:
    """Return the style of a line of ``count`` points, with about 12 markers."""
    return {**series(index), "marker": MARKERS[index % SERIES], "markevery": max(count // 12, 1)}


def bars(index: int) -> dict[str, Any]:
    return {"facecolor": COLOURS[index % SERIES], "hatch": HATCHES[index % SERIES], "edgecolor": PAPER, "linewidth": 0}


def legend_above(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    columns = 4 if max(map(len, labels)) <= 8 else 3 if max(map(len, labels)) <= 14 else 2
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def thin(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return at most ``most`` items, evenly spaced, including the first and the last."""
    if len(items) <= most:
        return items
    last = len(items) - 1
    return [items[round(index * last / (most - 1))] for index in range(most)]


def name_of(label: str, most: int = 24) -> str:
    """Shorten a name, and escape it for matplotlib: no math mode, no leading underscore."""
    short = label if len(label) <= most else label[: most - 1] + "…"
    return short.replace("$", r"\$").lstrip("_") or "-"


def to_svg(figure: Figure, background: str = "none", title: str | None = None) -> str:
    """Render a figure as SVG with selectable text; the output is deterministic."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}
    if title is not None:
        metadata["Title"] = title
    with rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata=metadata, facecolor=background)
    return buffer.getvalue()


def inline(svg: str, key: str, alt: str) -> str:
    """Convert SVG for embedding in an HTML page, with ids that are unique in the page.

    ``alt``: text alternative, already escaped for an attribute.
    """
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"<style.*?</style>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'\bid="([^"]*)"', rf'id="{key}-\1"', body)
    body = re.sub(r"font(-family)?: '[^;\"]*;? ?", "", body)
    body = re.sub(r"(\.\d\d)\d+", r"\1", body)
    body = body.replace("url(#", f"url(#{key}-").replace('xlink:href="#', f'href="#{key}-')
    for colour, instead in ((INK, "currentColor"), (GRID, "var(--grid)"), (PAPER, "var(--paper)")):
        body = body.replace(colour, instead)
    box = re.search(r'viewBox="([^"]*)"', body)
    size = box.group(1) if box else "0 0 400 300"
    _, end = body.split(">", 1)
    return f'<svg role="img" aria-label="{alt}" viewBox="{size}" preserveAspectRatio="xMidYMid meet">{end.strip()}'
