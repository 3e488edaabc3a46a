"""Report as one self-contained HTML page, from the templates ``page.html`` and ``sections.html``.

Styles and figures are inline, and the page loads nothing. All text from a run is escaped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedsync import __version__
from fedsync.common.foreign import escape
from fedsync.extras.report.data import RunData
from fedsync.extras.report.drawing import draw, draw_results
from fedsync.extras.report.drawing.timeline import timeline
from fedsync.extras.report.results import (
    HEAD,
    CrossSiteTable,
    Estimate,
    Estimates,
    Findings,
    amount,
    distinct,
    fairness,
    number,
    short,
    title_of,
)
from fedsync.extras.report.style import Picture, inline, thin, to_svg

_SECTIONS = {
    "summary": "Summary",
    "accuracy": "Accuracy",
    "timeline": "Timeline",
    "results": "Results",
    "cross-site": "Every model at every silo",
    "curves": "ROC and calibration",
    "learning": "Metrics over rounds",
    "work": "Batch sizes",
    "waiting": "Waiting",
    "metrics": "Figures of the silos",
    "end": "How it ended",
    "configuration": "Configuration",
}
"""Titles of the sections; ``sections.html`` has a macro for each."""

TIMELINE_ORDERS = 5000
"""Maximum number of orders in all timelines of a page together: orders are most of the page's bytes."""

MOST_SILOS = 200
MOST_COLUMNS, SPACIOUS = 40, 8
"""Maximum number of silos in a heat map, and of silos with intervals inside its cells."""
SHADES = 7
"""Number of colours of a heat map, from worst to best; the style sheet defines each colour."""

MEANINGS = {
    "accuracy": "share of samples whose class is right, or the mean of another score of the task",
    "balanced_accuracy": "accuracy of each class, averaged over classes, so that rare classes count as much",
    "f1": "harmonic mean of precision and recall; with more than two classes, averaged over them",
    "f1_macro": "f1 of each class against the rest, averaged over classes",
    "sensitivity": "share of the class's samples that are found",
    "specificity": "share of the other samples that are left alone",
    "auroc": "chance that a sample of the class scores higher than one of another; 0.5 is guessing",
    "average_precision": "precision averaged over all thresholds that find one more sample of the class",
    "brier": "mean squared difference of predicted probabilities and what is true; 0 is perfect",
    "calibration_error": "how far predicted probabilities are from the shares that come true; 0 is perfect",
    "dice": "twice the overlap of two areas over the sum of both; 1 is perfect",
    "iou": "overlap of two areas over what both cover; 1 is perfect",
    "mae": "mean distance from the true value, in its unit",
    "rmse": "root of the mean squared distance from the true value, in its unit",
    "r2": "share of the variance that is explained; 1 is perfect, 0 is no better than the mean",
    "concordance": "share of comparable pairs that are put in the right order; 0.5 is guessing",
    "perplexity": "exponential of the mean loss of a token; lower is better",
    "loss": "what training minimises, averaged over samples; lower is better",
}


def page(runs: Sequence[RunData]) -> str:
    """Return the report of one run, or of several side by side, as HTML; `ConfigError` without matplotlib."""
    labels, several = ", ".join(run.label for run in runs), len(runs) > 1
    sections = _sections(runs)
    return (
        templates()
        .get_template("page.html")
        .render(
            version=__version__,
            title=f"Comparison of {labels}" if several else f"Run {labels}",
            several=several,
            clocks=" or ".join(sorted({run.clock for run in runs})),
            sections=[(key, title, body) for key, title in _SECTIONS.items() if (body := sections(key))],
        )
    )


def section(key: str, runs: Sequence[RunData]) -> str:
    """Return one section as HTML; "" where the runs have nothing for it."""
    return _sections(runs)(key)


def _sections(runs: Sequence[RunData]) -> Callable[[str], str]:
    ids = count(1)

    def svg(picture: Picture) -> Markup:
        return Markup(inline(to_svg(picture.figure), f"f{next(ids)}", escape(picture.alt)))  # all text is escaped

    learnt = distinct(run.results.rounds for run in runs)
    if any(point.accuracy is not None for run in runs for point in run.points):
        learnt = [name for name in learnt if name != "accuracy"]  # section "Accuracy" shows it
    macros = (
        templates()
        .get_template("sections.html")
        .make_module(
            {
                "runs": runs,
                "several": len(runs) > 1,
                "columns": ["", *(run.label for run in runs)],
                "svg": svg,
                "summary_rows": [(title, *(show(run.summary) for run in runs)) for title, show in _ROWS],
                "timeline_of": partial(timeline, most_orders=max(TIMELINE_ORDERS // len(runs), 200)),
                "learnt": learnt,
                "over_rounds": lambda names: [draw_results.over_rounds(runs, name) for name in names],
                "differences": lambda: _differences(runs),
            }
        )
    )
    return lambda key: getattr(macros, key.replace("-", "_"))().strip()


@cache
def templates() -> Environment:
    made = Environment(
        loader=PackageLoader("fedsync.extras", "report"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(escape(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        number=number,
        short=short,
        pooled_of=lambda main: {} if main is None else main.pooled,
        title_of=lambda main: "-" if main is None else main.title,
    )
    made.globals.update(
        draw=draw,
        draw_results=draw_results,
        fairness=fairness,
        fairness_head=HEAD,
        meanings=MEANINGS,
        estimates=estimates,
        kept_rows=lambda run: [(each.file, each.version, each.why, each.digest or "-") for each in run.results.kept],
        pooled_rows=_pooled_rows,
        silo_table=_silo_table,
        gains=_gains,
        heat_map=HeatMap.of,
        titles=lambda subjects: [title_of(each) for each in subjects],
        by_subject=_by_subject,
        metric_rows=_metric_rows,
    )
    return made


_ROWS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("strategy", lambda s: str(s["strategy"])),
    ("runtime", lambda s: str(s["runtime"])),
    ("seed", lambda s: str(s["seed"])),
    ("silos", lambda s: str(len(s["silos"]))),
    ("rounds (commits)", lambda s: str(s["rounds"])),
    ("duration [s]", lambda s: number(s["seconds"], ".1f")),
    ("accuracy, last scored round", lambda s: number(s["accuracy"], ".4f")),
    ("loss, last scored round", lambda s: number(s["loss"], ".4f")),
    ("target accuracy", lambda s: number(s["target_accuracy"], "g")),
    ("time to target [s]", lambda s: number(s["seconds_to_target"], ".1f")),
    ("samples processed", lambda s: f"{s['samples']:,}"),
    ("time spent training", lambda s: number(s["utilisation"], ".1%")),
    ("time spent waiting", lambda s: number(s["wait_fraction"], ".1%")),
    ("failed orders", lambda s: str(sum(silo["failures"] for silo in s["silos"]))),
    ("to the server [MB]", lambda s: number(s["bytes_up"] / 1e6, ".2f")),
    ("to the silos [MB]", lambda s: number(s["bytes_down"] / 1e6, ".2f")),
    ("values sent encrypted", lambda s: number(s.get("sealed_share"), ".1%")),
)


def _metric_rows(run: RunData) -> list[tuple[str, ...]]:
    whole = run.summary["metrics"]
    of_silos = [(silo["name"], silo.get("metrics", {})) for silo in thin(run.summary["silos"], draw.MOST_SILOS)]
    return [(name, *(amount(key, found.get(key)) for key in whole)) for name, found in [("all", whole), *of_silos]]


def _differences(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    flat = [dict(_flatten(run.settings)) for run in runs]
    keys = distinct(flat)
    return [(key, *(one.get(key, "-") for one in flat)) for key in keys if len({one.get(key) for one in flat}) > 1]


def _flatten(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, json.dumps(value) if value is None or isinstance(value, bool | list) else str(value)


# Rows of estimates.


def estimates(columns: Sequence[Estimates]) -> list[list[str]]:
    return [[metric, *(words(column, metric) for column in columns)] for metric in distinct(columns)]


def words(numbers: Estimates, metric: str) -> str:
    """Format an estimate; a no-break space keeps an interval's ends together on narrow screens."""
    return numbers[metric].words.replace(", ", ",\u00a0") if metric in numbers else "-"


def _pooled_rows(findings: Sequence[Findings]) -> list[list[str]]:
    pooled = [found.pooled for found in findings]
    return [["samples", *map(_samples, pooled)], *estimates(pooled)]


def _silo_table(found: Findings) -> tuple[list[str], list[list[str]]]:
    metrics, names = distinct(found.silos.values()), thin(list(found.silos), MOST_SILOS)
    of = [(silo, found.silos[silo]) for silo in names]
    rows = [[silo, _samples(numbers), *(words(numbers, metric) for metric in metrics)] for silo, numbers in of]
    return ["silo", "samples", *metrics], rows


def _samples(numbers: Estimates) -> str:
    most = max((each.support for each in numbers.values()), key=len, default={})
    if len(most) < 2:
        return str(sum(most.values())) if most else "-"
    by_class = ", ".join(f"{label}:\u00a0{count}" for label, count in list(most.items())[:10])
    return f"{sum(most.values())} ({by_class})"


def _by_subject(columns: Mapping[str, Estimates], *, gain: bool = False) -> list[list[str]]:
    cells = [{subject: _signed(found) for subject, found in each.items()} for each in columns.values()]
    if not gain:
        cells = [{subject: words(each, subject) for subject in each} for each in columns.values()]
    missing = "not estimable" if gain else "-"
    return [[title_of(each), *(column.get(each, missing) for column in cells)] for each in distinct(columns.values())]


def _gains(matrix: CrossSiteTable, metric: str) -> Sequence[list[str]]:
    """Return each silo's improvement over its own local model by subject; empty without any."""
    subjects = matrix.gain.get(metric, {})
    if not any(cell is not None for row in subjects.values() for cell in row.values()):
        return []
    return thin([[silo, *(_signed(row.get(silo)) for row in subjects.values())] for silo in matrix.silos], MOST_SILOS)


def _signed(cell: Estimate | None) -> str:
    if cell is None or cell.value is None:
        return "not estimable"
    ends = "[no interval]" if cell.low is None or cell.high is None else f"[{cell.low:+.3f}, {cell.high:+.3f}]"
    return f"{cell.value:+.3f} {ends}"


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One metric of all models at all silos, as a table with coloured cells.

    Readers can copy and search the numbers of a table. A table also takes a tenth of a picture's bytes: 20 silos with
    two own models each make 840 cells.
    """

    caption: str
    silos: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Estimate | None]]]
    worst: float
    best: float

    @classmethod
    def of(cls, matrix: CrossSiteTable, metric: str, lower: bool) -> HeatMap:
        columns = thin(range(len(matrix.silos)), MOST_COLUMNS)
        shown = [matrix.silos[column] for column in columns]
        hidden = {silo for silo in matrix.silos if silo not in set(shown)}
        rows = [
            (name, [row[column] if column < len(row) else None for column in columns])
            for name, row in zip(matrix.models, matrix.matrix[metric], strict=False)
            if not any(name.startswith(f"{silo}, ") for silo in hidden)
        ]
        values = [cell.value for _, cells in rows for cell in cells if cell is not None and cell.value is not None]
        ends = sorted((min(values, default=0.0), max(values, default=0.0)), reverse=lower)
        caption = f"{metric} of each model (rows) on the test samples of each silo (columns)"
        caption += "; less is better" if lower else ""
        caption += f". {len(shown)} of {len(matrix.silos)} silos, evenly spaced" if hidden else ""
        return cls(caption, shown, rows, *ends)

    @property
    def spacious(self) -> bool:
        return len(self.silos) <= SPACIOUS

    def shade(self, value: float) -> int:
        """Return the colour index, from 0 for the worst to ``SHADES - 1`` for the best."""
        if self.worst == self.best:
            return SHADES // 2
        return min(int((value - self.worst) / (self.best - self.worst) * SHADES), SHADES - 1)
