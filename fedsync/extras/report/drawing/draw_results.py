"""Figures of model quality: metrics over rounds with their spread over silos, ROC and calibration curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsync.extras.report.data import RunData
from fedsync.extras.report.results import Findings, RoundNumbers, short
from fedsync.extras.report.style import (
    COLOURS,
    INK,
    MARKERS,
    SERIES,
    Picture,
    canvas,
    legend_above,
    marked,
    name_of,
    series,
    thin,
)
from fedsync.observe.run_state import natural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 250
MOST_LINES = 5
"""Maximum number of silos with separate lines; for more silos, bands show the spread."""
MOST_BANDS = 3
"""Maximum number of runs with bands; more bands would hide each other."""


def over_rounds(runs: Sequence[RunData], metric: str) -> Picture | None:
    """Draw a pooled metric of every version, and its values at single silos; None if no version has the metric."""
    told = [(run, thin(run.results.rounds.get(metric, ()), MOST_POINTS)) for run in runs]
    if not any(rows for _, rows in told):
        return None
    silos = {silo for _, rows in told for row in rows for silo in row.silos}
    found = [(short(value), short(row.pooled)) for _, rows in told for row in rows for value in row.silos.values()]
    shared = len(silos) > 1 and all(own == pooled for own, pooled in found)
    if shared:
        silos = set()  # identical lines would hide each other
    with canvas() as (figure, ax):
        for index, (run, rows) in enumerate(told):
            label = "pooled" if len(runs) == 1 else name_of(run.label)
            style = {**marked(index, len(rows)), "zorder": 3}
            ax.plot([row.round for row in rows], [row.pooled for row in rows], label=label, **style)
            if silos and len(runs) <= MOST_BANDS:
                _spread(ax, rows, index, alone=len(runs) == 1)
        ax.set_xlabel("round (commits)")
        ax.set_ylabel(name_of(metric))
        if len(ax.get_legend_handles_labels()[1]) > 1:
            legend_above(figure, ax)
    ends = ", ".join(f"{run.label} {short(rows[-1].pooled)}" for run, rows in told if rows)
    alt = f"Line chart of {metric} against rounds, pooled over all silos. At the end: {ends}."
    thinned = any(len(rows) == MOST_POINTS for _, rows in told)
    caption = "All silos evaluate on one shared split." if shared else _caption(runs, silos, thinned)
    return Picture(metric, alt, caption, figure)


def _caption(runs: Sequence[RunData], silos: set[str], thinned: bool) -> str:
    notes = ["Pooled: all silos' samples together, of the validation split; of the test split where none is held out."]
    if not silos:
        notes.append("No silo told numbers of its own.")
    elif len(runs) > MOST_BANDS:
        notes.append("Single silos are in the report of each run.")
    elif len(runs) > 1 or len(silos) > MOST_LINES:
        notes.append(f"Bands: from the lowest to the highest of {len(silos)} silos" + ("." if len(runs) > 1 else ""))
        notes += ["and, darker, the middle half of them."] if len(runs) == 1 else []
    if thinned:
        notes.append(f"{MOST_POINTS} versions, evenly spaced.")
    return " ".join(notes)


def _spread(ax: Axes, rows: Sequence[RoundNumbers], index: int, *, alone: bool) -> None:
    """Draw the values of single silos: as lines for a few silos of a single run, else as bands."""
    names = sorted({silo for row in rows for silo in row.silos}, key=natural)
    if alone and len(names) <= MOST_LINES:
        for number, name in enumerate(names, start=1):
            own = [(row.round, row.silos[name]) for row in rows if name in row.silos]
            style = {**series(number), "linewidth": 1.0, "label": name_of(name)}
            ax.plot([at for at, _ in own], [value for _, value in own], **style)
        return
    told = [row for row in rows if row.silos]
    if not told:
        return
    at = [row.round for row in told]
    values = [np.quantile(list(row.silos.values()), [0.0, 0.25, 0.75, 1.0]) for row in told]
    least, low, high, most = np.array(values).T
    colour = COLOURS[index % SERIES]
    ax.fill_between(at, least, most, color=colour, alpha=0.18, linewidth=0, label="all silos" if alone else None)
    if alone:
        ax.fill_between(at, low, high, color=colour, alpha=0.32, linewidth=0, label="middle half")


def roc(runs: Sequence[RunData]) -> Picture | None:
    lines = _of_findings(runs, lambda found: found.roc)
    if not lines:
        return None
    with canvas(height=3.6) as (figure, ax):
        for index, (label, points) in enumerate(lines):
            drawn = thin(points, MOST_POINTS)
            ax.plot([x for x, _ in drawn], [y for _, y in drawn], label=name_of(label, 40), **series(index))
        ax.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (2, 2)), label="chance")
        _unit_square(ax, "false positive rate (1 - specificity)", "true positive rate (sensitivity)")
        legend_above(figure, ax)
    alt = f"ROC curves of {', '.join(label for label, _ in lines)}."
    caption = "From the histograms of scores of all silos together; scores in one bin count as ties."
    return Picture("ROC curve", alt, caption, figure)


def calibration(runs: Sequence[RunData]) -> Picture | None:
    """Draw the share of the class against the mean score, per span of each run's pooled scores; None without scores."""
    lines = _of_findings(runs, lambda found: found.calibration)
    if not lines:
        return None
    with canvas(height=3.6) as (figure, ax):
        for index, (label, points) in enumerate(lines):
            scores, shares, counts = (list(column) for column in zip(*points, strict=True))
            style = {**series(index), "marker": MARKERS[index % SERIES], "markersize": 0}
            ax.plot(scores, shares, label=name_of(label, 40), **style)
            sizes = [10 + 90 * count / max(max(counts), 1) for count in counts]
            ax.scatter(scores, shares, s=sizes, marker=MARKERS[index % SERIES], color=series(index)["color"])
        ax.plot([0, 1], [0, 1], color=INK, linewidth=0.8, linestyle=(0, (2, 2)), label="as predicted")
        _unit_square(ax, "mean score (predicted probability)", "share of the class (observed)")
        legend_above(figure, ax)
    alt = f"Calibration curves of {', '.join(label for label, _ in lines)}."
    caption = (
        "Scores of all silos together, in spans of equal width; the larger a mark, the more samples are behind it."
    )
    return Picture("Calibration", alt, caption, figure)


def _of_findings(
    runs: Sequence[RunData], curve_of: Callable[[Findings], Sequence[tuple[float, ...]]]
) -> list[tuple[str, Sequence[tuple[float, ...]]]]:
    """Return labelled curves: of one run, all models on the test split; of several runs, the main finding of each."""
    if len(runs) > 1:
        mains = [(run.label, run.results.main) for run in runs[:SERIES]]
        return [(label, curve_of(main)) for label, main in mains if main is not None and curve_of(main)]
    findings = runs[0].results.findings
    test = [found for found in findings if found.split == "test"] or list(findings)
    return [(found.title, curve_of(found)) for found in test if curve_of(found)]


def _unit_square(ax: Axes, x: str, y: str) -> None:
    ax.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal", xlabel=x, ylabel=y)
