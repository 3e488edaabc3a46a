"""Figures of a report except the timeline: one function per figure, from `RunData` to `Picture`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedsync.extras.report.data import RunData
from fedsync.extras.report.style import (
    INK,
    PAPER,
    SERIES,
    Picture,
    bars,
    canvas,
    legend_above,
    marked,
    name_of,
    thin,
)
from fedsync.observe.run_state import natural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 600
MOST_SILOS = 24

_THINNED = f"Of long runs {MOST_POINTS} points, evenly spaced."


def progress(runs: Sequence[RunData]) -> Picture | None:
    """Draw accuracy, or else training loss, against time; None if the runs have neither."""
    scored = any(point.accuracy is not None for run in runs for point in run.points)
    if not scored and not any(point.loss for run in runs for point in run.points):
        return None
    what = "accuracy" if scored else "training loss"
    with canvas() as (figure, ax):
        thinned = False
        for index, run in enumerate(runs):
            values = [(point.at_s, point.accuracy if scored else point.loss) for point in run.points]
            rows = [(at_s, value) for at_s, value in values if value is not None]
            kept = thin(rows, MOST_POINTS)
            thinned = thinned or len(kept) < len(rows)
            style = marked(index, len(kept))
            ax.plot([at_s for at_s, _ in kept], [value for _, value in kept], label=name_of(run.label), **style)
        ax.set_xlabel("time [s]")
        targets = {run.summary["target_accuracy"] for run in runs} - {None}
        if scored and len(targets) == 1:
            ax.axhline(targets.pop(), color=INK, linewidth=0.9, linestyle=(0, (2, 2)), label="target")
        scores = [point.accuracy for run in runs for point in run.points if point.accuracy is not None]
        unit = "share correct" if all(0 <= score <= 1 for score in scores) else "score a sample"
        ax.set_ylabel(f"accuracy [{unit}]" if scored else "training loss a sample")
        if len(ax.get_legend_handles_labels()[1]) > 1:
            legend_above(figure, ax)
    ends = ", ".join(f"{run.label} {_final(run, scored)}" for run in runs)
    shared = any(run.results.main is not None and run.results.main.shared for run in runs)
    data = "one shared split" if shared else "their own test data, pooled"
    notes = [f"A version is evaluated by the silos on {data}."] if scored else []
    notes += ["Nothing was evaluated, so this is the loss in training."] if not scored else []
    notes += [_THINNED] if thinned else []
    title = f"{what.capitalize()} against time"
    return Picture(
        title,
        f"Line chart of {what} against time. At the end: {ends}.",
        " ".join(notes),
        figure,
    )


def _final(run: RunData, scored: bool) -> str:
    values = [point.accuracy if scored else point.loss for point in run.points]
    known = [value for value in values if value is not None]
    return f"{known[-1]:.3f}" if known else "unknown"


def batch_sizes(run: RunData) -> Picture | None:
    """Draw the batch size of every order against its dispatch time; None if all orders have the same batch size."""
    if len({span.batch_size for span in run.orders}) < 2:
        return None
    names = thin(run.silos, SERIES)
    with canvas() as (figure, ax):
        for index, name in enumerate(names):
            mine = thin(
                sorted((span.begin_s, span.batch_size) for span in run.orders if span.silo == name), MOST_POINTS
            )
            style = marked(index, len(mine))
            times, sizes = [at for at, _ in mine], [size for _, size in mine]
            ax.plot(times, sizes, drawstyle="steps-post", label=name_of(name), **style)
        ax.set_xlabel("time [s]")
        ax.set_ylabel("batch size [samples]")
        ax.set_ylim(bottom=0)
        legend_above(figure, ax)
    sizes = [span.batch_size for span in run.orders]
    alt = f"Line chart of batch sizes against time. They lie between {min(sizes)} and {max(sizes)} samples."
    few = "" if len(names) == len(run.silos) else f" {len(names)} of {len(run.silos)} silos, evenly spaced."
    return Picture("Batch sizes", alt, f"Each step of a line is one order.{few}", figure)


def waiting(runs: Sequence[RunData]) -> Picture | None:
    """Draw every silo's use of time for one run, or every silo's share of waiting for several runs."""
    names = sorted({silo["name"] for run in runs for silo in run.summary["silos"]}, key=natural)
    if not names or not any(run.summary["seconds"] for run in runs):
        return None
    kept = list(thin(names, MOST_SILOS))
    rows = len(kept) * (1 if len(runs) == 1 else len(runs))
    with canvas(height=min(1.1 + 0.16 * max(rows, 4) + 0.1 * len(kept), 9.0)) as (figure, ax):
        if len(runs) == 1:
            _one_run(ax, runs[0], kept)
        else:
            _several(ax, runs, kept)
        ax.set_yticks(range(len(kept)), [name_of(name) for name in kept])
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlim(0, 100)
        ax.set_xlabel("share of the run [%]" if len(runs) == 1 else "time spent waiting [% of the run]")
        legend_above(figure, ax)
    shares = ", ".join(f"{run.label} {run.summary['wait_fraction']:.0%}" for run in runs)
    caption = "Waiting is time without an order. Overhead is the time of an order besides its training."
    if len(kept) < len(names):
        caption += f" {len(kept)} of {len(names)} silos, evenly spaced."
    return Picture(
        "Who waited", f"Bar chart of waiting per silo. All silos together waited: {shares}.", caption, figure
    )


def _one_run(ax: Axes, run: RunData, names: Sequence[str]) -> None:
    silos = {silo["name"]: silo for silo in run.summary["silos"]}
    empty = {"facecolor": PAPER, "edgecolor": INK, "linewidth": 0.4}
    styles: dict[str, dict[str, Any]] = {
        "compute": bars(0),
        "overhead": bars(1),
        "wait": empty,
    }
    left = [0.0] * len(names)
    for part, style in styles.items():
        widths = [100 * silos[name][f"{part}_s"] / run.summary["seconds"] for name in names]
        widths = [max(width, 0.0) for width in widths]
        ax.barh(range(len(names)), widths, left=left, height=0.7, label="waiting" if part == "wait" else part, **style)
        left = [a + b for a, b in zip(left, widths, strict=True)]


def _several(ax: Axes, runs: Sequence[RunData], names: Sequence[str]) -> None:
    height = 0.8 / len(runs)
    for index, run in enumerate(runs):
        waited = {silo["name"]: silo["wait_s"] for silo in run.summary["silos"]}
        rows = [row for row, name in enumerate(names) if name in waited]
        widths = [max(100 * waited[names[row]] / (run.summary["seconds"] or 1.0), 0.0) for row in rows]
        places = [row - 0.4 + (index + 0.5) * height for row in rows]
        ax.barh(places, widths, height=height, label=name_of(run.label), **bars(index))
