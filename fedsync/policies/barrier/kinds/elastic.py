"""Elastic bulk synchronous parallel (ElasticBSP): rounds (*supersteps*) that end when silos wait least.

Given the predicted step ends of every silo, choose one end per silo so that their spread, max - min, is least. The
spread is the time that the first silo waits for the last; the max is the time to synchronise (section 4.1, Problem 1).

The answer is unique. Every exact method returns the same answer, because ties are broken in this order:
1. the least waiting (spread);
2. then the earliest time (section 4.2: the longer a superstep, the staler the work of the fast silos);
3. then the latest step of each silo: it synchronises at its last step that ends at or before ``time`` (Algorithm 2).

The default search is `sweep`; the paper's searches are in `fedsync.extras.zipline_published`.

Source: Zhao et al., "ZipLine: an optimized algorithm for the elastic bulk synchronous parallel model", Machine
Learning, 2021, sections 4 and 5.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.schema import PositiveInt, register

Ends: TypeAlias = NDArray[Any]
"""Checked step ends, shape [n silos, R steps], float64 or int64, ascending along R."""

Steps: TypeAlias = NDArray[np.int64]
"""One step a silo, shape [n], counted from 1."""


def sweep(ends: Ends) -> Steps:
    """Find the sync point with one sort and one running maximum. Exact; O(R n log R n), all of it in NumPy.

    A window that starts at end ``a`` must reach, for every silo, the first end not before ``a``. The latest of these is

        reach(a) = max(the silos' very first ends, the ends that follow some end b < a in b's silo),

    since an end that follows such a b either is its silo's first end not before ``a``, or lies before ``a``. The window
    with the least ``reach(a) - a`` wins. Reach never falls as ``a`` grows, so the first such window ends earliest.
    """
    flat = ends.ravel()
    order = flat.argsort()
    starts = flat[order]
    # No window starts after the earliest of the silos' last ends. Every earlier end has a successor in its silo, which
    # is next in flat. Among equal starts, the first sees only b < a; the others see b = a, which gives no less reach.
    before = int(starts.searchsorted(ends[:, -1].min()))
    reach = np.empty(before + 1, dtype=flat.dtype)
    reach[0] = ends[:, 0].max()
    reach[1:] = flat[order[:before] + 1]
    np.maximum.accumulate(reach, out=reach)
    return last_steps(ends, reach[(reach - starts[: before + 1]).argmin()])


def last_steps(ends: Ends, time: float) -> Steps:
    return np.asarray(np.count_nonzero(ends <= time, axis=1), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)  # == of arrays returns an array
class SyncPoint:
    """Point at which the silos synchronise; times in the unit of the given ends, an int for ints.

    Args:
        time: sync time, the latest chosen end.
        waiting: latest minus earliest chosen end, the wait of the first silo.
        steps: step of each silo, counted from 1; shape [n], int64.
    """

    time: float
    waiting: float
    steps: Steps


def find_sync_point(ends: ArrayLike, method: str = "sweep") -> SyncPoint:
    """Choose one step end per silo with the least spread; ties by the module's three rules.

    ``ends``: predicted ends of the next R steps, shape [n, R], float or int, ascending along R. ``method``: a key of
    `METHODS`; heuristics do not always find the least waiting. Raises `ValueError` if ``method`` is ``naive`` and R^n
    exceeds `NAIVE_LIMIT`.
    """
    table, search = np.asarray(ends), sweep
    if method != "sweep":
        search = getattr(importlib.import_module("fedsync.extras.zipline_published"), method)
    steps = search(table)
    chosen = table[np.arange(len(table)), steps - 1]
    time = chosen.max()
    return SyncPoint(time.item(), (time - chosen.min()).item(), steps)


METHODS = {
    "sweep": True,
    "zipline": True,
    "zipline_opt": True,
    "zipline_opt_bs": True,
    "full_grid_scan": False,
    "grid_scan": False,
    "naive": True,
}
"""Search methods: name -> whether the method finds the unique point of the module's three rules on every input."""


@register("elastic")
@dataclass(frozen=True, slots=True)
class Elastic(BarrierPolicy[None]):
    """Barrier that gives each silo the number of local steps with which all silos finish together.

    After each superstep, the barrier predicts the ends of every silo's next steps:

        e_k = overhead + k step_s(batch),    k = floor, ..., R    [s from now]

    It chooses one end per silo so that ``max - min`` is least, the earliest on ties (`find_sync_point`). Step times
    come from the forecasts, overheads from each silo's last order. An unmeasured silo counts as the median of the
    measured silos. While no silo is measured, all silos do the configured number of steps.

    In the paper, a step pushes its gradients, so a barrier costs only waiting. Here each superstep also pays for one
    model transfer each way, so each silo does at least ``floor`` steps; the paper's rule is 1.

    Source: "ZipLine", sections 3 and 4.
    """

    lookahead: PositiveInt | None = None
    """Most local steps of an order; R in the paper. Default: twice ``local.steps``. A silo that is f times as fast as
    the slowest uses all R steps only if the slowest does ``R / f`` steps."""

    floor: PositiveInt | None = None
    """Fewest local steps of an order; 1 in the paper. Default: half of ``local.steps``."""

    # `naive` tries R^n combinations: for tests only.
    method: Literal["sweep", "zipline", "zipline_opt", "zipline_opt_bs", "full_grid_scan", "grid_scan"] = "sweep"
    """Search method for the meeting time. All methods but the two scans are exact, and ``sweep`` is the fastest."""

    most_ahead = 0
    sets_steps = True
    mixes_rounds = False

    def __post_init__(self) -> None:
        if self.lookahead is not None and self.floor is not None and self.floor > self.lookahead:
            raise ValueError(f"floor {self.floor} exceeds lookahead {self.lookahead}; lower the floor")

    def init(self) -> None: ...

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        idle = view.idle
        if len(idle) < len(view.silos):
            return None, Verdict(reason="waiting for the silos still at work")
        if not idle:
            return None, Verdict(reason="no silo is here")
        steps, reason = self._steps(idle, view)
        if view.pending:
            reason = f"all {len(view.pending)} updates are in; {reason}"
        return None, Verdict(commit=tuple(view.pending), release=idle, steps=steps, reason=reason)

    def _steps(self, idle: tuple[str, ...], view: ClusterView) -> tuple[dict[str, int], str]:
        measured = {}
        for name in idle:
            silo = view.silos[name]
            if silo.forecast is not None:
                measured[name] = (silo.forecast.step_s(view.work[name].batch_size), silo.overhead_s)
        if not measured:
            return {}, f"nothing is known yet: {len(idle)} silos begin as configured"
        usual = tuple(median(column) for column in zip(*measured.values(), strict=True))
        step_s, overhead_s = np.array([measured.get(name, usual) for name in idle]).T
        low, high = self._window(round(sum(view.work[name].steps for name in idle) / len(idle)))
        ends = overhead_s[:, None] + step_s[:, None] * np.arange(low, high + 1)
        point = find_sync_point(ends, self.method)
        steps = {name: int(step) + low - 1 for name, step in zip(idle, point.steps, strict=True)}
        return steps, (
            f"{len(idle)} silos meet in {point.time:.3g} s after {min(steps.values())} to {max(steps.values())} steps, "
            f"the first waits {point.waiting:.3g} s"
        )

    def _window(self, configured: int) -> tuple[int, int]:
        low = self.floor if self.floor is not None else max(configured // 2, 1)
        high = self.lookahead if self.lookahead is not None else max(2 * configured, low)
        return min(low, high), high
