"""A run's results as tables that go into a paper."""

from __future__ import annotations

from collections.abc import Iterator

from fedsync.observe.report.data import RunData
from fedsync.observe.report.page_results import metric_names
from fedsync.observe.report.results import Findings
from fedsync.observe.report.text_tables import comma_separated, latex, markdown

POOLED = "all silos"


def result_files(run: RunData) -> dict[str, str]:
    """``results.tex``, ``results.md`` and ``results.csv`` by name; nothing of a run that evaluated nothing.

    The first two have the main finding, a row for each silo; the third has every number of all findings.
    """
    main = run.results.main
    if main is None:
        return {}
    head, rows = result_rows(main)
    caption = f"{run.summary['strategy']}: {main.title}. Value with 95 % interval."
    return {
        "results.tex": latex(head, rows, caption),
        "results.md": f"{markdown(head, rows)}\n",
        "results.csv": comma_separated(
            ("model", "version", "split", "silo", "metric", "value", "low", "high", "samples"), _numbers(run)
        ),
    }


def result_rows(found: Findings) -> tuple[list[str], list[list[str]]]:
    """Head and rows: what was found over all silos together, and at each."""
    metrics = metric_names([found.pooled, *found.silos.values()])
    of = {POOLED: found.pooled, **found.silos}
    rows = [
        [name, *(numbers[each].words if each in numbers else "-" for each in metrics)] for name, numbers in of.items()
    ]
    return ["silo", *metrics], rows


def _numbers(run: RunData) -> Iterator[tuple[object, ...]]:
    for found in run.results.findings:
        for silo, numbers in {"": found.pooled, **found.silos}.items():
            for metric, each in numbers.items():
                about = (found.subject, found.version, found.split, silo, metric)
                yield *about, each.value, each.low, each.high, each.samples or None
