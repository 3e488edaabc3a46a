"""Tables over seeds: mean of each strategy with its interval, and paired tests against the first strategy."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from fedsync.extras.papers.paired import PairedTest, SeedMean, corrected, paired
from fedsync.extras.report.data import RunData
from fedsync.extras.report.results import SUBJECTS, number_of, short
from fedsync.observe.tables import new_table

HEAD_TESTS = ("strategy", "pairs", "difference [95 % interval]", "t-test p", "after Holm", "Wilcoxon p")

TO_TARGET = "seconds to target"

_PLAIN: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "accuracy": lambda summary: summary.get("accuracy"),
    "seconds": lambda summary: summary.get("seconds"),
    TO_TARGET: lambda summary: summary.get("seconds_to_target"),
}


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs of one strategy that differ in their seed alone, by seed."""

    label: str
    runs: dict[int, RunData] = field(default_factory=dict)

    def values(self, figure: str) -> dict[int, float]:
        """Return a figure by seed; no times to a target if one run missed it, because the rest would be biased."""
        found = {seed: number_of(_figure(run, figure)) for seed, run in self.runs.items()}
        if figure == TO_TARGET and None in found.values():
            return {}
        return {seed: value for seed, value in found.items() if value is not None}


def groups(runs: Sequence[RunData]) -> list[SeedGroup]:
    """Group runs by configuration; empty if no configuration has two seeds, or a seed occurs twice."""
    found: dict[str, SeedGroup] = {}
    for run in runs:
        seed = run.summary["seed"]
        if not isinstance(seed, int):
            return []
        rest = json.dumps(
            {key: value for key, value in run.settings.items() if key != "seed"}, sort_keys=True, default=str
        )
        group = found.setdefault(rest, SeedGroup(str(run.summary["strategy"])))
        if seed in group.runs:
            return []
        group.runs[seed] = run
    return list(found.values()) if any(len(group.runs) > 1 for group in found.values()) else []


def figures(all_groups: Sequence[SeedGroup]) -> list[str]:
    names = dict.fromkeys(_PLAIN)
    for group in all_groups:
        for run in group.runs.values():
            main = run.results.main
            names.update(dict.fromkeys(() if main is None else (name for name in main.pooled if name not in _PLAIN)))
    return [name for name in names if any(group.values(name) for group in all_groups)]


def _figure(run: RunData, figure: str) -> object:
    main = run.results.main
    if main is not None and figure in main.pooled:
        return main.pooled[figure].value
    return _PLAIN[figure](run.summary) if figure in _PLAIN else None


def judged(all_groups: Sequence[SeedGroup]) -> str:
    mains = [run.results.main for group in all_groups for run in group.runs.values()]
    kinds = {f"{SUBJECTS.get(main.subject, main.subject)}, {main.split} split" for main in mains if main is not None}
    return "; ".join(sorted(kinds)) or "last version that was scored"


def mean_of(group: SeedGroup, figure: str) -> str:
    values = list(group.values(figure).values())
    return with_interval(SeedMean.of(values) if values else None)


def tests(all_groups: Sequence[SeedGroup], figure: str) -> list[tuple[str, ...]]:
    first, *others = all_groups
    found = corrected([paired(first.values(figure), other.values(figure)) for other in others])
    return [_test_row(other.label, test) for other, test in zip(others, found, strict=True)]


def seed_table(all_groups: Sequence[SeedGroup]) -> Table:
    """Return the tests of accuracy and of seconds to the target, for a terminal."""
    title = f"Differences to {all_groups[0].label}, seed by seed; metrics: {judged(all_groups)}"
    table = new_table(title, "figure", *HEAD_TESTS, left=("figure", "strategy"), wraps="t-test p")
    for figure in ("accuracy", TO_TARGET):
        for row in tests(all_groups, figure):
            table.add_row(figure, *row)
    return table


def _test_row(label: str, test: PairedTest) -> tuple[str, ...]:
    numbers = [test.t, test.holm, test.wilcoxon]
    words = [f"not tested: {test.why}", "-", "-"] if test.why else [f"{p:.3g}" for p in numbers if p is not None]
    return label, str(test.pairs), with_interval(test.difference), *words


def with_interval(mean: SeedMean | None) -> str:
    if mean is None:
        return "-"
    if mean.low is None or mean.high is None:
        return f"{short(mean.mean)} [one run]"
    return f"{short(mean.mean)} [{short(mean.low)}, {short(mean.high)}]"
