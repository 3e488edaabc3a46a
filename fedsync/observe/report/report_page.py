"""Report as one self-contained HTML page: styles and figures are inline, and the page loads nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from fedsync import __version__
from fedsync.common.foreign import escape
from fedsync.observe.report import page_results, seeds
from fedsync.observe.report.data import RunData
from fedsync.observe.report.drawing import draw
from fedsync.observe.report.first_section import opening
from fedsync.observe.report.html import FigureIds, amount, number, table
from fedsync.observe.report.style import thin
from fedsync.observe.report.timeline import timeline

TIMELINE_ORDERS = 5000
"""Maximum number of orders in all timelines of a page together: orders are most of the page's bytes."""

MOST_OPENINGS = 12
"""Maximum number of runs with an opening text; the table has all runs."""

MOST_CHARTS = 8


def page(runs: Sequence[RunData]) -> str:
    """Return the report of one run, or of several runs side by side, as HTML.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    sections = [(key, title, body) for key, title, body in _sections(runs) if body]
    labels = ", ".join(run.label for run in runs)
    clocks = sorted({run.clock for run in runs})
    lead = f"Written by FedSync {__version__} from the journal of the run{'s' if len(runs) > 1 else ''}. "
    lead += f"Times are {' or '.join(clocks)} since training began."
    folder = files(__package__)
    return Template((folder / "page.html").read_text(encoding="utf-8")).substitute(
        version=escape(__version__),
        title=escape(f"Comparison of {labels}" if len(runs) > 1 else f"Run {labels}"),
        lead=escape(lead),
        css=(folder / "page.css").read_text(encoding="utf-8"),
        contents="\n".join(f'<li><a href="#{key}">{escape(title)}</a></li>' for key, title, _ in sections),
        sections="\n".join(
            f'<section id="{key}" aria-labelledby="{key}-title">'
            f'\n<h2 id="{key}-title">{escape(title)}</h2>\n{body}\n</section>'
            for key, title, body in sections
        ),
    )


def _sections(runs: Sequence[RunData]) -> Iterable[tuple[str, str, str]]:
    """Yield key, title and HTML of every section; an empty HTML means that the section is omitted."""
    ids = FigureIds()
    yield "summary", "Summary", _unfinished(runs) + _opening(runs) + _summary(runs)
    averaged = bool(seeds.groups(runs)) and any("accuracy" in run.results.rounds for run in runs)
    yield "accuracy", "Accuracy", "" if averaged else ids.figures([draw.progress(runs)])
    most = max(TIMELINE_ORDERS // len(runs), 200)
    yield "timeline", "Timeline", "\n".join(ids.figures([timeline(run, most)]) for run in runs)
    yield "results", "Results", page_results.results(runs)
    yield "seeds", "Over seeds", page_results.over_seeds(runs)
    matrices = [page_results.cross_site(run, named=len(runs) > 1) for run in runs]
    yield "cross-site", "Every model at every silo", "\n".join(filter(None, matrices))
    yield "curves", "ROC and calibration", page_results.curves(runs, ids)
    yield "learning", "Metrics over rounds", page_results.over_rounds(runs, ids)
    yield "work", "Batch sizes and speed", "\n".join(_work(run, ids, named=len(runs) > 1) for run in runs)
    yield "waiting", "Waiting and staleness", ids.figures([draw.waiting(runs), draw.staleness(runs)])
    yield "traffic", "Traffic and overhead", ids.figures([draw.traffic(runs)]) + _overhead(runs)
    yield "metrics", "Figures of the silos", _metrics(runs, ids)
    yield "end", "How it ended", "\n".join(_end(run) for run in runs)
    yield "configuration", "Configuration", _differences(runs) + "\n".join(_configuration(run) for run in runs)


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


def _summary(runs: Sequence[RunData]) -> str:
    rows = [(title, *(show(run.summary) for run in runs)) for title, show in _ROWS]
    body = table("The whole run, all silos together", ["", *(run.label for run in runs)], rows)
    return body if len(runs) > 1 else f"<details><summary>All figures</summary>{body}</details>"


def _opening(runs: Sequence[RunData]) -> str:
    parts = []
    for run in runs[:MOST_OPENINGS]:
        name = f"<strong>{escape(run.label)}</strong>: " if len(runs) > 1 else ""
        parts.append(f'<p class="lead">{name}{escape(" ".join(opening(run)))}</p>')
        parts += [f'<p class="mark">{escape(str(note))}</p>' for note in run.summary["notes"]]
    return "\n".join(parts)


def _unfinished(runs: Sequence[RunData]) -> str:
    names = [run.label for run in runs if not run.ended]
    if not names:
        return ""
    said = f"Not ended when this was written: {', '.join(names)}. The figures are those up to then."
    return f'<p class="mark">{escape(said)}</p>\n'


def _work(run: RunData, ids: FigureIds, *, named: bool) -> str:
    figures = ids.figures([draw.batch_sizes(run), draw.speeds(run)])
    if not run.orders:
        return ""
    sizes = {span.batch_size for span in run.orders}
    notes = [f"Every order had {min(sizes)} samples a step."] if len(sizes) == 1 else []
    notes += [run.forecasts] if run.forecasts else []
    title = f"<h3>{escape(run.label)}</h3>" if named else ""
    return title + "".join(f"<p>{escape(note)}</p>" for note in notes) + figures


def _overhead(runs: Sequence[RunData]) -> str:
    kinds = sorted({kind for run in runs for kind, seconds in (run.overhead_s or {}).items() if seconds > 0})
    told = [sum((run.overhead_s or {}).values()) for run in runs]
    whole = [sum(silo["overhead_s"] for silo in run.summary["silos"]) for run in runs]
    if not any(whole):
        return ""
    rows = [(kind, *(number((run.overhead_s or {}).get(kind), ".1f") for run in runs)) for kind in kinds]
    rest = [max(total - known, 0.0) for total, known in zip(whole, told, strict=True)]
    rows.append(("not told by silos (transfer, start)", *(f"{seconds:.1f}" for seconds in rest)))
    rows.append(("overhead in all", *(f"{seconds:.1f}" for seconds in whole)))
    return table("Overhead of all orders by kind [s]", ["", *(run.label for run in runs)], rows)


def _metrics(runs: Sequence[RunData], ids: FigureIds) -> str:
    names = sorted({name for run in runs for name in run.summary.get("metrics", {})})
    charts = ids.figures([draw.metric(runs, name) for name in names[:MOST_CHARTS]])
    return charts + "\n".join(_metric_table(run) for run in runs if run.summary.get("metrics"))


def _metric_table(run: RunData) -> str:
    whole, silos = run.summary["metrics"], run.summary["silos"]
    of_silos = [(silo["name"], silo.get("metrics", {})) for silo in thin(silos, draw.MOST_SILOS)]
    rows = [(name, *(amount(key, found.get(key)) for key in whole)) for name, found in [("all", whole), *of_silos]]
    return table(f"{run.label}: reported by silos, whole run", ["", *whole], rows)


def _end(run: RunData) -> str:
    reason = run.summary["stopped_by"] or "has not ended"
    return f"<p><strong>{escape(run.label)}</strong>: {escape(str(reason))}</p>"


def _configuration(run: RunData) -> str:
    if not run.config:
        return ""
    config = "\n".join(map(escape, run.config.splitlines()))
    return (
        f"<details><summary>{escape(run.label)}: config.yaml, resolved</summary>"
        f'<pre tabindex="0" aria-label="{escape(run.label)}">{config}</pre></details>'
    )


def _differences(runs: Sequence[RunData]) -> str:
    if len(runs) < 2:
        return ""
    flat = [dict(_flatten(run.settings)) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [(key, *(one.get(key, "-") for one in flat)) for key in keys if len({one.get(key) for one in flat}) > 1]
    return table("What differs", ["", *(run.label for run in runs)], rows) if rows else "<p>All the same.</p>"


def _flatten(value: Any, prefix: str = "") -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, json.dumps(value) if value is None or isinstance(value, bool | list) else str(value)
