"""Results of the map: a record for each cell, tables, and the heat map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.common import figure, markdown_table, print_table, save
from bench.papers.map_cells import BALANCED, FEDAVG, PLAIN, TASKS, Cell, Side
from bench.papers.map_search import Outcome
from bench.papers.target_search import Seen

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RESAMPLES = 10_000
NEAR, SMALL = 1.10, 0.1
"""Demanded of LB-BSP at overheads of at most `SMALL`: at most `NEAR` times the bound."""
SLOWER = 1.05
"""Demanded of LB-BSP in every cell: at most this ratio."""
ABSENT = "not computed"

_Table = Callable[[str, Sequence[str], Iterable[Sequence[object]]], None]


@dataclass(frozen=True)
class Compared:
    """Seconds over FedAvg's with the same server optimizer, paired by seed.

    Args:
        ratio: geometric mean over seeds; a run that missed the target counts with the cap.
        low, high: 95 % interval; None with one seed.
        rounds, round_s: ratio of rounds, and of seconds a round, over the pairs that both reached; None without any.
            Their product is ``ratio`` where nothing was missed.
        missed, base_missed: runs that missed the target. Where a side's own did, its ratio is too small; where the
            other's did, too large.
        runs: of either side.
    """

    ratio: float
    low: float | None
    high: float | None
    rounds: float | None
    round_s: float | None
    missed: int
    base_missed: int
    runs: int

    def __str__(self) -> str:
        text = f"{self.ratio:.2f}" + ("" if self.low is None else f" ({self.low:.2f}-{self.high:.2f})")
        text += "" if self.rounds is None or self.round_s is None else f" = {self.rounds:.2f} x {self.round_s:.2f}"
        some = self.missed or self.base_missed
        return text + (f" missed {self.missed}:{self.base_missed}/{self.runs}" if some else "")


def compared(mine: Mapping[int, Seen], base: Mapping[int, Seen], cap_s: float) -> Compared:
    """Compare two sides; the interval is a bootstrap's over seeds, of the mean of the logarithm of the ratio.

    Raises:
        ValueError: the seeds are not the same.
    """
    seeds = sorted(mine)
    if sorted(base) != seeds:
        raise ValueError(f"seeds {seeds} and {sorted(base)} are no pairs")
    ours, theirs = ([min(of[seed].seconds, cap_s) for seed in seeds] for of in (mine, base))
    logs = np.log(ours) - np.log(theirs)
    low = high = None
    if len(seeds) > 1:
        drawn = np.random.default_rng(0).integers(len(seeds), size=(RESAMPLES, len(seeds)))
        low, high = (float(end) for end in np.exp(np.quantile(logs[drawn].mean(axis=1), (0.025, 0.975))))
    both = [(mine[s], base[s]) for s in seeds if math.isfinite(mine[s].seconds + base[s].seconds)]
    rounds = math.exp(fmean(math.log(one.rounds / other.rounds) for one, other in both)) if both else None
    whole = math.exp(fmean(math.log(one.seconds / other.seconds) for one, other in both)) if both else None
    round_s = None if rounds is None or whole is None else whole / rounds
    missed, base_missed = (sum(math.isinf(seen.seconds) for seen in of.values()) for of in (mine, base))
    return Compared(float(np.exp(logs.mean())), low, high, rounds, round_s, missed, base_missed, len(seeds))


@dataclass(frozen=True)
class Record:
    """One cell with one server optimizer.

    Args:
        sides: each computed strategy over FedAvg; FedAvg's own entry is 1.
        best: the strategy that did best on the tuning seeds; the fresh seeds have no say.
        bound: see `Cell.bound`, at FedAvg's steps.
    """

    task: str
    cell: Cell
    optimizer: str
    sides: dict[str, Compared]
    best: str
    bound: float | None

    def failings(self) -> list[str]:
        """What was demanded of LB-BSP and is not met."""
        lb_bsp = self.sides.get(BALANCED)
        if lb_bsp is None:
            return []
        found = [f"over {SLOWER:g}"] if lb_bsp.ratio > SLOWER else []
        if self.bound is not None and self.cell.overhead <= SMALL and lb_bsp.ratio > NEAR * self.bound:
            found.append(f"over {NEAR:g} x bound")
        return found


def record(out: Outcome, task: str, cell: Cell, optimizer: str) -> Record | None:
    """The record of a cell; None where FedAvg was not computed, or nothing that is tuned to compare with it."""
    base = out.fresh.get((task, cell, Side(FEDAVG, optimizer)))
    if base is None:
        return None
    sides = {
        who.strategy: who for what, where, who in out.fresh if (what, where, who.optimizer) == (task, cell, optimizer)
    }
    cap_s = out.caps[task, cell, optimizer]
    of = {name: compared(out.fresh[task, cell, side], base, cap_s) for name, side in sides.items()}
    tuned = [name for name, side in sides.items() if side.tuned]
    if tuned == [FEDAVG]:
        return None
    best = min(tuned, key=lambda name: (out.chosen[task, cell, sides[name]].score, name != FEDAVG, name))
    bound = cell.bound(TASKS[task].silos, out.chosen[task, cell, sides[FEDAVG]].point.tau)
    return Record(task, cell, optimizer, of, best, bound)


def as_json(out: Outcome, each: Record) -> dict[str, Any]:
    """A record, with the chosen points, and seconds and rounds of each seed."""
    sides: dict[str, Any] = {}
    for name, comparison in each.sides.items():
        key = (each.task, each.cell, Side(name, each.optimizer))
        seeds = {
            seed: [seen.seconds if math.isfinite(seen.seconds) else None, seen.rounds]
            for seed, seen in out.fresh[key].items()
        }
        found = out.chosen[key]
        sides[name] = asdict(comparison) | {"steps": found.point.tau, "rate": found.point.rate, "seeds": seeds}
        sides[name]["interior"] = found.interior
    place = {"task": each.task, "machines": each.cell.machines, "overhead": each.cell.overhead}
    return {**place, "server_optimizer": each.optimizer, "best": each.best, "bound": each.bound, "sides": sides}


def optimizer_gain(out: Outcome, task: str, cell: Cell, optimizer: str) -> Compared | None:
    """FedAvg with the optimizer over FedAvg without, both tuned."""
    mine, base = (out.fresh.get((task, cell, Side(FEDAVG, each))) for each in (optimizer, PLAIN))
    return None if mine is None or base is None else compared(mine, base, out.caps[task, cell, PLAIN])


def show(
    out: Outcome, plan: Sequence[tuple[str, str, Sequence[Cell]]], picture: Path, *, markdown: bool = False
) -> list[dict[str, Any]]:
    """Print the tables, draw the picture and return the records.

    Args:
        out: of all runs.
        plan: task, server optimizer and cells of each panel.
        picture: PNG.
        markdown: print tables for a page instead.
    """
    table = _page if markdown else print_table
    records, panels, unmet = list[Record](), list[tuple[str, list[Record]]](), list[str]()
    for task, optimizer, cells in plan:
        here = [each for cell in cells if (each := record(out, task, cell, optimizer)) is not None]
        title = f"{task}, server optimizer: {optimizer}"
        panels.append((title, here))
        records += here
        names = list(dict.fromkeys(name for each in here for name in each.sides if name != FEDAVG))
        body = []
        for each in here:
            point = out.chosen[task, each.cell, Side(FEDAVG, optimizer)].point
            bound = "-" if each.bound is None else f"{each.bound:.3f}"
            unmet += [f"{title}, {each.cell.machines}, {each.cell.overhead:g}: lb-bsp {why}" for why in each.failings()]
            cells_of = [str(each.sides[name]) if name in each.sides else ABSENT for name in names]
            place = f"{each.cell.machines}, {each.cell.overhead:g}"
            body.append([place, f"{point.tau} x {point.rate:g}", bound, *cells_of, each.best])
        heads = ["speeds, overhead", "FedAvg: steps x rate", "bound", *names, "best"]
        note = "seconds over tuned FedAvg with the same server optimizer = ratio of rounds x of seconds a round"
        table(f"{title}: {note}", heads, body)
    for task in dict.fromkeys(task for task, _, _ in plan):
        cells = dict.fromkeys(cell for what, _, some in plan if what == task for cell in some)
        others = list(dict.fromkeys(optimizer for what, optimizer, _ in plan if what == task and optimizer != PLAIN))
        rows = [
            [
                f"{cell.machines}, {cell.overhead:g}",
                *(optimizer_gain(out, task, cell, each) or ABSENT for each in others),
            ]
            for cell in cells
        ]
        if any(ABSENT not in row for row in rows):
            title = f"{task}: seconds of tuned FedAvg with an optimizer over tuned FedAvg without"
            table(title, ["speeds, overhead", *others], rows)
    print("\n".join(["Demanded and not met:", *unmet]) if unmet else "All that is demanded of computed cells is met.")
    draw(panels, plan, picture)
    return [as_json(out, each) for each in records]


def _page(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"{title}\n\n{markdown_table(columns, rows)}\n")


def draw(
    panels: Sequence[tuple[str, list[Record]]], plan: Sequence[tuple[str, str, Sequence[Cell]]], path: Path
) -> None:
    """A panel for each task and server optimizer: machines down, overheads across, colour by the best ratio."""
    columns = max(1, len({optimizer for _, optimizer, _ in plan}))
    rows = math.ceil(len(panels) / columns)
    made, axes = figure(columns=columns, rows=rows, width=6.4, height=3.9)
    for ax, (title, records), (_, _, cells) in zip(axes, panels, plan, strict=False):
        _panel(ax, title, records, cells)
    for ax in axes[len(panels) :]:
        ax.axis("off")
    save(made, path)


def _panel(ax: Axes, title: str, records: Sequence[Record], cells: Sequence[Cell]) -> None:
    machines = list(dict.fromkeys(cell.machines for cell in cells))
    overheads = sorted({cell.overhead for cell in cells})
    known = {each.cell: each for each in records}
    grid = np.full((len(machines), len(overheads)), np.nan)
    for cell, each in known.items():
        grid[machines.index(cell.machines), overheads.index(cell.overhead)] = math.log2(each.sides[each.best].ratio)
    image = ax.imshow(grid, cmap="Blues_r", vmin=-3.0, vmax=0.0, aspect="auto")
    for cell in cells:
        at, place = overheads.index(cell.overhead), machines.index(cell.machines)
        found = known.get(cell)
        if found is None:
            ax.text(at, place, "not\ncomputed", ha="center", va="center", fontsize=7, color="dimgrey")
            continue
        side = found.sides[found.best]
        interval = "" if side.low is None else f"\n{side.low:.2f}-{side.high:.2f}"
        dark = side.ratio < 0.4
        text = f"{side.ratio:.2f} {found.best}{interval}"
        ax.text(at, place, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    ax.grid(visible=False)
    ax.set(xticks=range(len(overheads)), xticklabels=[f"{each:g}" for each in overheads])
    ax.set(yticks=range(len(machines)), yticklabels=[_machines(name) for name in machines])
    ax.set_xlabel("overhead of an order / one local step of the slowest silo [1]")
    ax.set_ylabel("speeds of the silos")
    ax.set_title(title, fontsize=9)
    bar = ax.figure.colorbar(image, ax=ax, ticks=[-3, -2, -1, 0])
    bar.ax.set_yticklabels(["1/8", "1/4", "1/2", "1"])
    bar.set_label("seconds to target / FedAvg's [1]", fontsize=8)


def _machines(name: str) -> str:
    return {"1": "equal", "one slow": "one 10 x slower"}.get(name, f"1 to {name}" if name[0].isdigit() else name)
