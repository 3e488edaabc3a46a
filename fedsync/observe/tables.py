"""Terminal tables of one run, or of several runs side by side."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich import box
from rich.console import JustifyMethod
from rich.table import Table

from fedsync.observe.terminal import words

MOST_ROWS = 50
"""Maximum number of silos that `silo_table` lists; for more silos, the table shows quantiles."""


def silo_table(summary: dict[str, Any]) -> Table:
    title = f"{summary['strategy']}: who waited for whom (seconds)"
    silos, missing = summary["silos"], {each["silo"] for each in summary.get("lost", ())}
    failed = ("failed",) if any(silo.get("failures") for silo in silos) else ()
    table = new_table(title, "silo", "orders", *failed, "samples", "batch", "compute", "overhead", "waiting", "share")
    for silo in silos if len(silos) <= MOST_ROWS else _quantiles(silos):
        share = silo["wait_s"] / summary["seconds"] if summary["seconds"] else 0.0
        table.add_row(
            f"{silo['name']} (missing)" if silo["name"] in missing else silo["name"],
            str(silo["orders"]),
            *(str(silo["failures"]) for _ in failed),
            str(silo["samples"]),
            str(silo["batch_size"]),
            f"{silo['compute_s']:.1f}",
            f"{silo['overhead_s']:.1f}",
            f"{silo['wait_s']:.1f}",
            f"{share:.1%}",
        )
    return table


def _quantiles(silos: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    columns = {key: sorted(silo[key] for silo in silos) for key in silos[0] if key not in ("name", "metrics")}
    last = len(silos) - 1
    return [
        {"name": name, **{key: column[round(share * last)] for key, column in columns.items()}}
        for name, share in (("least", 0.0), ("10 %", 0.1), ("median", 0.5), ("90 %", 0.9), ("most", 1.0))
    ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of one strategy, one per seed, in one order of seeds for all; ``seconds_to_target`` is None for a miss."""

    strategy: str
    summaries: Sequence[dict[str, Any]]
    seconds_to_target: Sequence[float | None]

    @property
    def mean_seconds(self) -> float | None:
        reached = [seconds for seconds in self.seconds_to_target if seconds is not None]
        return fmean(reached) if reached and len(reached) == len(self.seconds_to_target) else None

    def mean(self, key: str) -> float | None:
        values = [summary[key] for summary in self.summaries if summary[key] is not None]
        return fmean(values) if values else None

    def row(self, first: Comparison) -> dict[str, Any]:
        seconds, reference = self.mean_seconds, first.mean_seconds
        return {
            "strategy": self.strategy,
            "seeds": [summary["seed"] for summary in self.summaries],
            "seconds_to_target": seconds,
            "ratio": seconds / reference if seconds is not None and reference else None,
            "reached": sum(seconds is not None for seconds in self.seconds_to_target),
            "seconds": self.mean("seconds"),
            "accuracy": self.mean("accuracy"),
            "utilisation": self.mean("utilisation"),
            "wait_fraction": self.mean("wait_fraction"),
        }


def comparison_table(comparisons: Sequence[Comparison], title: str, *, trained: bool = True) -> Table:
    """Compare strategies, one row each; ratios are to the first. Without training, there is no accuracy or target."""
    rows = [comparison.row(comparisons[0]) for comparison in comparisons]
    columns = {"strategy": [str(row["strategy"]) for row in rows]}
    if trained:
        columns["to target s"] = [cell(row["seconds_to_target"], "{:.1f}", "missed") for row in rows]
        columns["ratio"] = [cell(row["ratio"], "{:.3f}") for row in rows]
        columns["reached"] = [f"{row['reached']}/{len(row['seeds'])}" for row in rows]
    columns["total s"] = [cell(row["seconds"], "{:.1f}") for row in rows]
    if trained:
        columns["accuracy"] = [cell(row["accuracy"], "{:.4f}") for row in rows]
    columns["utilised"] = [cell(row["utilisation"], "{:.1%}") for row in rows]
    columns["waiting"] = [cell(row["wait_fraction"], "{:.1%}") for row in rows]
    table = new_table(title, *columns)
    table.padding = (0, 1, 0, 0)  # eight columns fit 80 characters with two spaces between them, not with three
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def new_table(title: str | None, *columns: str, left: Collection[str] = (), wraps: str = "") -> Table:
    """Return an empty table for 80 columns and log files. Columns of names are ``left``, by default the first one."""
    # Rich would break a title where its table is narrow.
    above = None if title is None else words(title, "table.title", no_wrap=len(title) <= 80, overflow="ignore")
    table = Table(title=above, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: JustifyMethod = "left" if column in (left or columns[:1]) else "right"
        table.add_column(column, justify=justify, no_wrap=column != wraps)
    return table


def cell(value: float | str | None, form: str = "{}", missing: str = "-") -> str:
    return missing if value is None else form.format(value)
