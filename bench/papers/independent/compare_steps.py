"""Numbers of local steps: ElasticBSP's searches and FedCompass against `paper_steps`."""

from __future__ import annotations

import numpy as np

from bench.papers.independent import paper_steps
from bench.papers.independent.finding import Finding
from fedsync.core.orders import LocalWork, SiloFacts, WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, SiloView
from fedsync.extras.compass import Compass
from fedsync.policies.barrier.kinds.elastic import find_sync_point


def sync_points(cases: int, rng: np.random.Generator, method: str) -> Finding:
    """Waiting and time of the sync point on small tables of whole milliseconds, with many ties."""
    differences = []
    for _ in range(cases):
        n, r = int(rng.integers(2, 6)), int(rng.integers(1, 6))
        table = np.cumsum(rng.integers(1, int(rng.integers(3, 30)), (n, r)), axis=1)
        found, (least, time) = find_sync_point(table, method), paper_steps.sync_point(table.tolist())
        differences.append(max(abs(found.waiting - least), abs(found.time - time)))
    return Finding(f"ElasticBSP, {method}", "ZipLine, 4.2, all choices", differences, 0, "ms")


def fedcompass(cases: int, rng: np.random.Generator) -> Finding:
    """Steps and group of silos that begin one after another, while earlier groups are open or over."""
    found: list[float] = []
    while len(found) < cases:
        least = int(rng.integers(1, 6))
        most, factor, n = least * int(rng.integers(2, 8)), float(rng.uniform(1, 1.6)), int(rng.integers(2, 9))
        barrier = Compass(least, most, factor)
        state, groups, now_s = barrier.init(), list[paper_steps.PaperGroup](), 0.0
        paces = rng.uniform(0.5, 4, n).tolist()
        silos: dict[str, SiloView] = {}
        for index, pace in enumerate(paces):
            silos[f"s{index}"] = SiloView(SiloFacts(1000), clock=1, forecast=Curve(8 / pace))
            view = ClusterView(now_s, 1, silos, {}, dict.fromkeys(silos, LocalWork(most, 8, 0.1)))
            groups = [group for group in groups if now_s < group.latest_s]
            joined, steps = paper_steps.assign(groups, now_s, pace, least, most)
            if joined is None:
                seconds = steps * pace
                groups.append(paper_steps.PaperGroup(now_s + seconds, now_s + factor * seconds, (pace,)))
            else:
                old = groups[joined]
                groups[joined] = paper_steps.PaperGroup(old.expected_s, old.latest_s, (*old.seconds_per_step, pace))
            state, verdict = barrier.decide(state, view)
            times = [(group.expected_s, group.latest_s) for group in groups]
            got = [(group.expected_s, group.latest_s) for group in state.groups]
            same = len(got) == len(times) and np.allclose(got, times, rtol=1e-9)
            found.append(abs(verdict.steps[f"s{index}"] - steps) if same else np.inf)
            order = WorkOrder(f"s{index}/2", 1, 2, 8, steps, 0.1, 1)
            silos[f"s{index}"] = SiloView(SiloFacts(1000), clock=1, order=order, forecast=Curve(8 / pace))
            now_s += float(rng.uniform(0, most * 1.5))
    return Finding("FedCompass", "arXiv 2309.14675, from memory", found, 0, "steps")
