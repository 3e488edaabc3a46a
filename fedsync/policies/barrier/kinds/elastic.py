"""Elastic bulk synchronous parallel (ElasticBSP): supersteps that end where the silos' predicted steps meet."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.barrier.barrier_base import BarrierPolicy
from fedsync.policies.barrier.zipline import find_sync_point
from fedsync.policies.schema import PositiveInt, register


@register("elastic")
@dataclass(frozen=True, slots=True)
class Elastic(BarrierPolicy[None]):
    """Barrier that gives each silo the number of local steps with which all silos finish together.

    After each superstep, the barrier predicts the ends of every silo's next steps:

        e_k = overhead + k step_s(batch),    k = floor, ..., R    [s from now]

    It chooses one end per silo so that ``max - min`` is least, the earliest on ties (`find_sync_point`). Each silo gets
    its own k. Step times come from the forecasts, overheads from each silo's last order. An unmeasured silo counts as
    the median of the measured silos. While no silo is measured, all silos do the configured number of steps: the
    paper's monitoring phase.

    In the paper, a step is an iteration that pushes its gradients, so a barrier costs only waiting. Here each superstep
    also pays for one model transfer each way, and equal silos would meet after every step. So each silo does at least
    ``floor`` steps; the paper's rule is 1.

    Raises:
        ValueError: both are given and ``floor`` exceeds ``lookahead``.

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
