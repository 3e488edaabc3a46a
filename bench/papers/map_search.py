"""Tuning of every side in every cell on its own seeds, then runs on fresh seeds: `compare`.

The work is divided into stages, each a strategy with one server optimizer on one kind of machines at all overheads, so
that finished parts are whole. A run that takes longer than `LIMIT` times tuned FedAvg with the same server optimizer
has missed the target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.papers.map_cells import AUTO, BALANCED, CAUTIOUS, FEDAVG, LOCAL, PLAIN, TASKS, Cell, Side, preset
from bench.papers.map_replay import INF, Replay, Wanted
from bench.papers.target_runs import Runner
from bench.papers.target_search import FIRST, Asked, Found, Point, Search, Seen, search

LIMIT = 4.0
TUNING, FRESH = 1000, 100
"""First of the seeds by which sides are tuned, and of those that are reported."""
STAGE = 60
"""About how many runs a stage takes, for the estimate of what is left."""
START = Point(1, 1.0)
"""Near point with a server optimizer."""

Key = tuple[str, Cell, Side]
"""Task, machines and side."""


@dataclass
class Outcome:
    """Results.

    Args:
        chosen: point of each side; of ``auto`` its preset.
        fresh: seconds and rounds by seed; infinite where the target was missed.
        caps: what a run that missed counts with [s].
        failed: messages of runs that came to no end.
        trained, replayed: runs that trained, and runs whose seconds came from another's training.
    """

    chosen: dict[Key, Found] = field(default_factory=dict)
    fresh: dict[Key, dict[int, Seen]] = field(default_factory=dict)
    caps: dict[tuple[str, Cell, str], float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    trained: int = 0
    replayed: int = 0


@dataclass(frozen=True)
class Stage:
    task: str
    side: Side
    cells: tuple[Cell, ...]


def stages(
    tasks: Iterable[str], machines: Sequence[str], overheads: Sequence[float], sides: Sequence[Side]
) -> list[Stage]:
    """All work in its order: by task; FedAvg first, as it is what others are compared to."""
    ordered = [*(side for side in sides if side.strategy == FEDAVG), *(s for s in sides if s.strategy != FEDAVG)]
    return [
        Stage(task, side, tuple(Cell(each, overhead) for overhead in overheads))
        for task in tasks
        for side in ordered
        for each in machines
    ]


def compare(
    runner: Runner,
    plan: Sequence[Stage],
    seeds: tuple[Sequence[int], Sequence[int]],
    targets: Mapping[str, float] | None = None,
    *,
    small: bool = False,
) -> Outcome:
    """Tune, and run with fresh seeds; what there was no time for is not in the outcome.

    Args:
        runner: of all runs.
        plan: stages.
        seeds: to tune by, and fresh.
        targets: in place of the tasks' own.
        small: see `search`.
    """
    out, replays = Outcome(), dict[str, Replay]()
    runner.planned = STAGE * len(plan)
    for stage in plan:
        runner.begin(STAGE)
        replay = replays.get(stage.task)
        if replay is None:
            target = (targets or {}).get(stage.task, TASKS[stage.task].target)
            replay = replays[stage.task] = Replay(stage.task, target, runner)
        if replay.aim([*seeds[0], *seeds[1]]):
            _carry_out(replay, stage, seeds, out, small=small)
    for replay in replays.values():
        out.failed += replay.failed
        out.trained, out.replayed = out.trained + replay.trained, out.replayed + replay.replayed
    return out


def _carry_out(
    replay: Replay, stage: Stage, seeds: tuple[Sequence[int], Sequence[int]], out: Outcome, *, small: bool
) -> None:
    task, side = stage.task, stage.side
    optimizer = side.optimizer
    base = side.strategy == FEDAVG
    cells = [cell for cell in stage.cells if base or (task, cell, optimizer) in out.caps]
    caps = {} if base else {cell: out.caps[task, cell, optimizer] for cell in cells}
    if side.tuned:
        found = tune(replay, cells, side, seeds[0], out, caps, small=small)
    else:
        found = {cell: Found(preset(), (0, INF), True, 1) for cell in cells}
    if base:
        caps = {cell: cap for cell, each in found.items() if math.isfinite(cap := LIMIT * math.exp(each.score[1]))}
        out.caps |= {(task, cell, optimizer): cap for cell, cap in caps.items()}
    out.chosen |= {(task, cell, side): each for cell, each in found.items()}
    # ``auto`` is LB-BSP at one point (a test says so).
    runs_as = side if side.tuned else Side(BALANCED, CAUTIOUS)
    wanted = {
        (cell, seed): Wanted(cell, runs_as, found[cell].point, seed)
        for cell in found
        if cell in caps
        for seed in seeds[1]
    }
    seen = replay.seconds(f"fresh seeds, {side.strategy}, {optimizer}", dict.fromkeys(wanted.values(), INF), caps)
    for cell in found:
        if all((cell, seed) in wanted and wanted[cell, seed] in seen for seed in seeds[1]):
            out.fresh[task, cell, side] = {seed: seen[wanted[cell, seed]] for seed in seeds[1]}


def tune(
    replay: Replay,
    cells: Sequence[Cell],
    side: Side,
    seeds: Sequence[int],
    out: Outcome,
    caps: Mapping[Cell, float],
    *,
    small: bool,
) -> dict[Cell, Found]:
    """The best point of a side in each cell, of those for which there was time; searches go on beside each other."""
    # No version comes before its orders' overhead.
    going: dict[Cell, Search] = {
        cell: search(seeds, small=small, near=_near(out, replay.task, cell, side), least=max(cell.overhead_s, 1e-3))
        for cell in cells
    }
    asked = {cell: next(each) for cell, each in going.items()}
    found: dict[Cell, Found] = {}
    while asked:
        runs: dict[tuple[Cell, Asked], Wanted] = {}
        within: dict[Wanted, float] = {}
        for cell, questions in asked.items():
            for (point, seed), seconds in questions.items():
                runs[cell, (point, seed)] = each = Wanted(cell, side, point, seed)
                within[each] = seconds
        what = f"tuning {side.strategy}, {side.optimizer}, {cells[0].machines}"
        seen = replay.seconds(what, within, caps)
        asked = {cell: some for cell, some in asked.items() if all(runs[cell, each] in seen for each in some)}
        for cell, some in list(asked.items()):
            try:
                asked[cell] = going[cell].send({each: seen[runs[cell, each]] for each in some})
            except StopIteration as end:
                found[cell] = end.value
                del asked[cell]
    return found


def _near(out: Outcome, task: str, cell: Cell, side: Side) -> Point:
    """What was found in the case that is most like this one: FedAvg's in the same cell, or on other machines."""
    first = FIRST if side.optimizer == PLAIN or side.optimizer in LOCAL else START
    others = [each for (what, where, who), each in out.chosen.items() if what == task and who == side]
    same = out.chosen.get((task, cell, Side(FEDAVG, side.optimizer)))
    return same.point if same is not None else others[-1].point if others else first


def sides_of(strategies: Iterable[str], optimizers: Sequence[str]) -> list[Side]:
    """FedAvg and the strategies with each server optimizer; ``auto`` with its own."""
    found = [Side(name, each) for each in optimizers for name in (FEDAVG, *strategies) if name != AUTO]
    return [*found, *([Side(AUTO, CAUTIOUS)] if AUTO in strategies and CAUTIOUS in optimizers else [])]
