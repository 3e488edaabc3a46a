"""What the tuned comparison comes to: ratios with intervals, the figures demanded, tables, and a picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.common import bar, figure, markdown_table, print_table, save
from bench.papers.target_cells import AUTO, CLUSTERS, FEDAVG, Cell, Side
from bench.papers.target_search import Found
from bench.papers.target_tuned import BALANCED, BASE, Outcome

DEMANDED_S = 1.0
DEMANDED = {
    "tuned FedAvg without a server optimizer: auto, untuned": (0.55, 0.40, 0.45, 0.25),
    "tuned FedAvg with server momentum: best shipped with it": (0.85, 0.60, 0.65, 0.30),
    "FedAvg at the same steps, no overhead: lb-bsp (bound 0.50)": (1.00, 0.51, 0.70, None),
}
"""Most that ratios may be, on the clusters in the order of `CLUSTERS`."""
RESAMPLES = 10_000

_Table = Callable[[str, Sequence[str], Iterable[Sequence[object]]], None]
Seconds = Mapping[tuple[str, Cell, Side], Mapping[int, float]]


@dataclass(frozen=True)
class Compared:
    """Seconds over another side's.

    Args:
        ratio: geometric mean over tasks and seeds.
        low, high: 95 % interval; None with one seed.
        missed, base_missed: runs that missed the target and count with the seconds that they had. Where a side's own
            did, its ratio is too small; where the other's did, too large.
        runs: of either side.
    """

    ratio: float
    low: float | None
    high: float | None
    missed: int
    base_missed: int
    runs: int

    def __str__(self) -> str:
        text = f"{self.ratio:.2f}" + ("" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})")
        return text + (
            f" missed {self.missed}:{self.base_missed}/{self.runs}" if self.missed or self.base_missed else ""
        )


def compared(
    mine: Sequence[Mapping[int, float]], base: Sequence[Mapping[int, float]], caps: Sequence[Mapping[int, float]]
) -> Compared:
    """Compare two sides, paired by seed.

    The interval is a bootstrap's over seeds, of the mean over tasks of the logarithm of the ratio.

    Args:
        mine, base: seconds by seed of each task; infinite where the target was missed.
        caps: what those count with.

    Raises:
        ValueError: the seeds are not the same.
    """
    seeds = sorted(mine[0])
    for one, other in zip(mine, base, strict=True):
        if sorted(one) != seeds or sorted(other) != seeds:
            raise ValueError(f"seeds {sorted(one)} and {sorted(other)} are no pairs")

    def logs(of: Sequence[Mapping[int, float]]) -> Any:
        return np.log([[min(some[seed], cap[seed]) for seed in seeds] for some, cap in zip(of, caps, strict=True)])

    means = (logs(mine) - logs(base)).mean(axis=0)
    low = high = None
    if len(seeds) > 1:
        drawn = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
        low, high = (float(end) for end in np.exp(np.quantile(means[drawn].mean(axis=1), (0.025, 0.975))))
    missed, base_missed = (sum(np.isinf(s) for some in of for s in some.values()) for of in (mine, base))
    return Compared(float(np.exp(means.mean())), low, high, int(missed), int(base_missed), len(seeds) * len(mine))


class Findings:
    """An outcome, asked for ratios over all its tasks."""

    def __init__(self, out: Outcome, tasks: Sequence[str]) -> None:
        self.out, self.tasks = out, tasks

    def over(self, cell: Cell, mine: tuple[Seconds, Side], base: tuple[Seconds, Side]) -> Compared | None:
        """A side over another; None where one of them was not run."""
        if any((task, cell, side) not in seconds for task in self.tasks for seconds, side in (mine, base)):
            return None
        ours, theirs = ([of[task, cell, side] for task in self.tasks] for of, side in (mine, base))
        return compared(ours, theirs, [self.out.caps[task, cell] for task in self.tasks])

    def best(self, cell: Cell, *, momentum: bool) -> Side | None:
        """The side other than FedAvg that did best on the tuning seeds; the fresh ones have no say.

        Of those that were run in all tasks; None where there is none.
        """

        def tuned(side: Side) -> tuple[int, float]:
            scores = [self.out.chosen[task, cell, side].score for task in self.tasks]
            return sum(missed for missed, _ in scores), fmean(logarithm for _, logarithm in scores)

        sides = {side for _, where, side in self.out.tuned if where == cell and side.strategy != FEDAVG}
        run = [s for s in sides if s.momentum == momentum and all((t, cell, s) in self.out.tuned for t in self.tasks)]
        return min(run, key=lambda side: (tuned(side), side), default=None)

    def demanded(self, cluster: str) -> list[tuple[Compared | None, str]]:
        """A row each of `DEMANDED`, and which strategy it is."""
        cell, (tuned, untuned) = Cell(cluster, DEMANDED_S), (self.out.tuned, self.out.untuned)
        best = self.best(cell, momentum=True)
        against = (tuned, Side(FEDAVG, momentum=True))
        return [
            (self.over(cell, (untuned, Side(AUTO)), (tuned, BASE)), AUTO),
            (None, "") if best is None else (self.over(cell, (tuned, best), against), best.strategy),
            (self.over(Cell(cluster, 0.0), (untuned, Side(BALANCED)), (untuned, BASE)), BALANCED),
        ]

    def tables(self, cells: Sequence[Cell]) -> dict[str, dict[str, dict[str, Compared]]]:
        """Ratios by table, row and cluster, for cells of one overhead; of FedAvg tuned, to FedAvg as shipped."""
        tuned, untuned = self.out.tuned, self.out.untuned
        sides = sorted({side for _, _, side in tuned}, key=lambda side: (side != BASE, side))
        shipped = [side for side in dict.fromkeys(side for _, _, side in untuned) if side != BASE]
        asked: dict[str, list[tuple[str, tuple[Seconds, Side], tuple[Seconds, Side]]]] = {
            "tuned, over tuned FedAvg": [(s.name, (tuned, s), (tuned, BASE)) for s in sides if s != BASE],
            "tuned, over tuned FedAvg with the same server optimizer": [
                (s.name, (tuned, s), (tuned, Side(FEDAVG, s.momentum))) for s in sides if s.strategy != FEDAVG
            ],
            "untuned, over untuned FedAvg": [(s.name, (untuned, s), (untuned, BASE)) for s in shipped],
        }
        asked["untuned, over untuned FedAvg"].append(("fedavg, tuned", (tuned, BASE), (untuned, BASE)))
        return {
            title: {
                name: {cell.cluster: found for cell in cells if (found := self.over(cell, mine, base)) is not None}
                for name, mine, base in rows
            }
            for title, rows in asked.items()
        }


def show(
    out: Outcome, tasks: Sequence[str], cells: Sequence[Cell], picture: Path, *, markdown: bool = False
) -> dict[str, Any]:
    """Print the tables of all tasks together and of each, draw the picture, and return what they hold.

    Args:
        out: of all runs.
        tasks, cells: asked for.
        picture: PNG.
        markdown: print tables for a page instead.
    """
    table = _page if markdown else print_table
    clusters = list(dict.fromkeys(cell.cluster for cell in cells))
    result: dict[str, Any] = {"ratios": {}, "demanded": {}}
    drawn: dict[str, dict[str, dict[str, Compared]]] = {}
    for findings in [Findings(out, tasks), *(Findings(out, [task]) for task in tasks if len(tasks) > 1)]:
        name = " x ".join(findings.tasks)
        for overhead_s in dict.fromkeys(cell.overhead_s for cell in cells):
            tables = findings.tables([cell for cell in cells if cell.overhead_s == overhead_s])
            drawn = drawn if any(drawn.values()) else tables
            for title, rows in tables.items():
                if any(rows.values()):
                    body = [[side, *(row.get(c, "not run") for c in clusters)] for side, row in rows.items() if row]
                    table(f"{name}: seconds to target, {overhead_s:g} s an order; {title}", ["", *clusters], body)
            result["ratios"].setdefault(name, {})[str(overhead_s)] = {
                title: {side: {cluster: asdict(each) for cluster, each in row.items()} for side, row in rows.items()}
                for title, rows in tables.items()
            }
        if any(cell.overhead_s == DEMANDED_S for cell in cells):
            result["demanded"][name] = _demanded(findings, clusters, table)
    _chosen(out, tasks, cells, table)
    _draw(drawn, clusters, picture)
    return result


def _page(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"{title}\n\n{markdown_table(columns, rows)}\n")


def _chosen(out: Outcome, tasks: Sequence[str], cells: Sequence[Cell], table: _Table) -> None:
    """Steps and rate of each side in each task; a star where the grid's end was reached."""
    body = []
    for side in sorted({side for _, _, side in out.chosen}):
        for cell in cells:
            found = [out.chosen.get((task, cell, side)) for task in tasks]
            if any(found):
                texts = ["not run" if each is None else _point(each) for each in found]
                body.append([f"{side.name}, {cell.cluster}, {cell.overhead_s:g} s", *texts])
    table(
        "Chosen: local steps x rate, points of the grid (least: one step, there is no less; *: not interior)",
        ["", *tasks],
        body,
    )


def _point(found: Found) -> str:
    steps = "1 (least)" if found.point.tau == 1 else str(found.point.tau)
    return f"{steps} x {found.point.rate:g}{'' if found.interior else '*'}, {found.tried}"


def _demanded(findings: Findings, clusters: Sequence[str], table: _Table) -> dict[str, dict[str, Any]]:
    found = {cluster: findings.demanded(cluster) for cluster in clusters}
    result: dict[str, dict[str, Any]] = {}
    body = []
    for at, (title, limits) in enumerate(DEMANDED.items()):
        cells = []
        result[title] = {}
        for cluster in clusters:
            limit, (figures, strategy) = limits[CLUSTERS.index(cluster)], found[cluster][at]
            verdict = "" if limit is None else f" / {limit:.2f}"
            if figures is None:
                cells.append(f"not run{verdict}")
                continue
            if limit is not None:
                verdict += " met" if figures.ratio <= limit and not figures.missed else " missed"
            cells.append(f"{strategy} {figures}{verdict}")
            result[title][cluster] = asdict(figures) | {"strategy": strategy, "demanded": limit}
        body.append([title, *cells])
    name = " x ".join(findings.tasks)
    table(f"{name}: demanded at {DEMANDED_S:g} s: seconds to target over, ratio / at most", ["", *clusters], body)
    return result


def _draw(tables: Mapping[str, Mapping[str, Mapping[str, Compared]]], clusters: Sequence[str], path: Path) -> None:
    """Bars of ratios, and lines of their intervals, a panel each table."""
    most = max([1, *(len(rows) for rows in tables.values())])
    made, axes = figure(columns=len(tables), width=5.6, height=0.16 * (len(clusters) + 1) * most + 1.4)
    high = 0.8 / len(clusters)
    for ax, (title, rows) in zip(axes, tables.items(), strict=True):
        for index, cluster in enumerate(clusters):
            for place, row in enumerate(rows.values()):
                if (each := row.get(cluster)) is None:
                    continue
                at = place + (index - (len(clusters) - 1) / 2) * high
                ax.barh(at, each.ratio, 0.92 * high, **bar(index), label=cluster if place == 0 else None)
                if each.low is not None and each.high is not None:
                    ax.plot([each.low, each.high], [at, at], color="black", linewidth=1.0)
        ax.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
        ax.set(yticks=range(len(rows)), yticklabels=list(rows), xlabel="ratio of seconds to target (less is better)")
        ax.set_title(title, fontsize=8)
        ax.invert_yaxis()
    axes[0].legend(fontsize=7, frameon=True, loc="best")
    save(made, path)
