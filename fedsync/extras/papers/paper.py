"""Result tables for publications, as Markdown, LaTeX and CSV.

Names come from silos, so each format escapes its special characters.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from fedsync.extras.exporters.csv_exporter import without_formulas
from fedsync.extras.papers import seeds
from fedsync.extras.report.card import CARD, markdown, model_card, plain, result_rows
from fedsync.extras.report.data import RunData, read_runs

_LATEX = str.maketrans(
    {letter: rf"\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
)


def files_beside(runs: Sequence[RunData]) -> dict[str, str]:
    return {CARD: model_card(runs[0]), **result_files(runs[0])} if len(runs) == 1 else seed_files(runs)


def over_seeds(folders: Sequence[Path], seconds: Sequence[float | None]) -> tuple[Table, dict[str, str]]:
    """Return the tests of several strategies over seeds, and `seed_files`.

    ``seconds``: time of each run to the target of its comparison [s], None if the run did not reach the target.
    """
    times = zip(read_runs(folders), seconds, strict=True)
    runs = [replace(run, summary={**run.summary, "seconds_to_target": each}) for run, each in times]
    return seeds.seed_table(seeds.groups(runs)), seed_files(runs)


def result_files(run: RunData) -> dict[str, str]:
    """Return ``results.tex``, ``results.md`` and ``results.csv`` by name; empty for a run without evaluations.

    TeX and Markdown have the main finding, a row for each silo. CSV has all numbers of all findings.
    """
    main = run.results.main
    if main is None:
        return {}
    head, rows = result_rows(main)
    caption = f"{run.summary['strategy']}: {main.title}. Value with 95 % interval."
    columns = ("model", "version", "split", "silo", "metric", "value", "low", "high", "samples")
    return {
        "results.tex": latex(head, rows, caption),
        "results.md": f"{markdown(head, rows)}\n",
        "results.csv": comma_separated(columns, _numbers(run)),
    }


def seed_files(runs: Sequence[RunData]) -> dict[str, str]:
    """Return ``seeds.tex``, ``seeds.md`` and ``seeds.csv`` by name; empty if no strategy has several seeds.

    TeX and Markdown have means over seeds, and each strategy against the first. CSV has the numbers of all seeds.
    """
    groups = seeds.groups(runs)
    names = seeds.figures(groups) if groups else []
    if not names:
        return {}
    of = f"Metrics: {seeds.judged(groups)}, samples of all silos pooled. Times: seconds."
    means = [[group.label, str(len(group.runs)), *(seeds.mean_of(group, name) for name in names)] for group in groups]
    tests = [[name, *test] for name in names for test in seeds.tests(groups, name)]
    tables = [(f"Mean over seeds with its 95 % interval, Student's t. {of}", ["strategy", "seeds", *names], means)]
    if tests:
        caption = f"Difference to {groups[0].label}, paired by seed, with 95 % interval and p-values. {of}"
        tables.append((caption, ["figure", *seeds.HEAD_TESTS], tests))
    by_seed = ((group, seed) for group in groups for seed in sorted(group.runs))
    lines = ((group.label, seed, *(group.values(name).get(seed) for name in names)) for group, seed in by_seed)
    return {
        "seeds.tex": "\n".join(latex(head, rows, caption) for caption, head, rows in tables),
        "seeds.md": "\n\n".join(f"{plain(caption)}\n\n{markdown(head, rows)}" for caption, head, rows in tables) + "\n",
        "seeds.csv": comma_separated(("strategy", "seed", *names), lines),
    }


def _numbers(run: RunData) -> Iterator[tuple[object, ...]]:
    for found in run.results.findings:
        for silo, numbers in {"": found.pooled, **found.silos}.items():
            for metric, each in numbers.items():
                about = (found.subject, found.version, found.split, silo, metric)
                yield *about, each.value, each.low, each.high, each.samples or None


def latex(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Format a table for a paper that has ``\\usepackage{booktabs}``."""
    # Braces: LaTeX reads a bracket after the end of a row as the optional vertical space.
    first, *others = (f"    {' & '.join(f'{{{_latex(cell)}}}' for cell in cells)} \\\\" for cells in (head, *rows))
    return "\n".join(
        [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_latex(caption)}}}",
            rf"  \begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
            r"    \toprule",
            first,
            r"    \midrule",
            *others,
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _latex(text: str) -> str:
    return " ".join(text.split()).translate(_LATEX)


def comma_separated(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format as CSV; None is an empty cell, and texts that a spreadsheet would read as formulas are escaped."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(without_formulas(row) for row in rows)
    return file.getvalue()
