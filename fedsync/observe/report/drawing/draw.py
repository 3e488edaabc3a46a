"""Figures of a report except the timeline: one function per figure, from `RunData` to `Picture`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from fedsync.observe.report.data import OrderSpan, RunData, natural
from fedsync.observe.report.style import (
    COLOURS,
    INK,
    PAPER,
    SERIES,
    Picture,
    bars,
    canvas,
    legend_above,
    marked,
    name_of,
    series,
    thin,
)

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
    """Draw the batch size of every order against its dispatch time; for many silos, median and range.

    None if all orders have the same batch size.
    """
    if len({span.batch_size for span in run.orders}) < 2:
        return None
    with canvas() as (figure, ax):
        if len(run.silos) <= SERIES:
            for index, name in enumerate(run.silos):
                mine = thin(
                    sorted((span.begin_s, span.batch_size) for span in run.orders if span.silo == name), MOST_POINTS
                )
                style = marked(index, len(mine))
                times, sizes = [at for at, _ in mine], [size for _, size in mine]
                ax.plot(times, sizes, drawstyle="steps-post", label=name_of(name), **style)
            caption = "A step is an order."
        else:
            _spread(ax, run.orders)
            caption = (
                f"{len(run.silos)} silos: median and range of the orders that were sent in the same stretch of time."
            )
        ax.set_xlabel("time [s]")
        ax.set_ylabel("batch size [samples]")
        ax.set_ylim(bottom=0)
        legend_above(figure, ax)
    sizes = [span.batch_size for span in run.orders]
    alt = f"Line chart of batch sizes against time. They lie between {min(sizes)} and {max(sizes)} samples."
    return Picture("Batch sizes", alt, caption, figure)


def _spread(ax: Axes, orders: Sequence[OrderSpan], pieces: int = 60) -> None:
    last = max(span.begin_s for span in orders) or 1.0
    bins: dict[int, list[int]] = {}
    for span in orders:
        bins.setdefault(min(int(span.begin_s / last * pieces), pieces - 1), []).append(span.batch_size)
    at = sorted(bins)
    times = [(index + 0.5) * last / pieces for index in at]
    ax.fill_between(
        times,
        [min(bins[index]) for index in at],
        [max(bins[index]) for index in at],
        alpha=0.3,
        color=COLOURS[5],
        label="range",
    )
    ax.plot(times, [median(bins[index]) for index in at], label="median", **series(0))


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
    caption = (
        "Waiting: neither training nor busy with an order otherwise; overhead is an order's time besides training."
    )
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


def traffic(runs: Sequence[RunData]) -> Picture | None:
    if not any(run.summary["bytes_up"] or run.summary["bytes_down"] for run in runs):
        return None
    with canvas(height=0.9 + 0.5 * max(len(runs), 2)) as (figure, ax):
        for index, (key, label) in enumerate((("bytes_up", "to the server"), ("bytes_down", "to the silos"))):
            widths = [run.summary[key] / 1e6 for run in runs]
            places = [row - 0.2 + 0.4 * index for row in range(len(runs))]
            ax.barh(places, widths, height=0.36, label=label, **bars(index))
        ax.set_yticks(range(len(runs)), [name_of(run.label) for run in runs])
        ax.set_ylim(len(runs) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
        ax.set_xlabel("payload [MB]")
        legend_above(figure, ax)
    alts = [f"{run.label}: {_megabytes(run, 'up')} up, {_megabytes(run, 'down')} down" for run in runs]
    caption = "Payload of updates, and of one model for every order and evaluation, without the transport's own."
    return Picture("Bytes", f"Bar chart of traffic. {'; '.join(alts)}.", caption, figure)


def _megabytes(run: RunData, way: str) -> str:
    return f"{run.summary[f'bytes_{way}'] / 1e6:.2f} MB"
