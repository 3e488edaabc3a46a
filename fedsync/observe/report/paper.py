"""Result tables for papers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedsync.observe.report import seeds
from fedsync.observe.report.data import RunData
from fedsync.observe.report.page_results import metric_names
from fedsync.observe.report.results import Findings
from fedsync.observe.report.text_tables import comma_separated, latex, markdown, plain

POOLED = "all silos"


def result_files(run: RunData) -> dict[str, str]:
    """Return ``results.tex``, ``results.md`` and ``results.csv`` by name; empty for a run without evaluations.

    TeX and Markdown have the main finding, a row for each silo. CSV has all numbers of all findings.
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
    metrics = metric_names([found.pooled, *found.silos.values()])
    of = {f"{POOLED}, one shared split": found.pooled} if found.shared else {POOLED: found.pooled, **found.silos}
    rows = [
        [name, *(numbers[each].words if each in numbers else "-" for each in metrics)] for name, numbers in of.items()
    ]
    return ["silo", *metrics], rows


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
    tests = [[name, *seeds.test_row(*test)] for name in names for test in seeds.tests(groups, name)]
    tables = [(f"Mean over seeds with its 95 % interval, Student's t. {of}", ["strategy", "seeds", *names], means)]
    if tests:
        caption = f"Difference to {groups[0].label}, paired by seed, with 95 % interval and p-values. {of}"
        tables.append((caption, ["figure", *seeds.HEAD_TESTS], tests))
    return {
        "seeds.tex": "\n".join(latex(head, rows, caption) for caption, head, rows in tables),
        "seeds.md": "\n\n".join(f"{plain(caption)}\n\n{markdown(head, rows)}" for caption, head, rows in tables) + "\n",
        "seeds.csv": comma_separated(
            ("strategy", "seed", *names),
            (
                (group.label, seed, *(group.values(name).get(seed) for name in names))
                for group in groups
                for seed in sorted(group.runs)
            ),
        ),
    }


def _numbers(run: RunData) -> Iterator[tuple[object, ...]]:
    for found in run.results.findings:
        for silo, numbers in {"": found.pooled, **found.silos}.items():
            for metric, each in numbers.items():
                about = (found.subject, found.version, found.split, silo, metric)
                yield *about, each.value, each.low, each.high, each.samples or None
