"""Numbers of local steps: ElasticBSP's searches and FedCompass against `paper_sync_points` and `paper_compass`."""

from __future__ import annotations

import numpy as np

from bench.papers.independent import paper_compass, paper_sync_points
from bench.papers.independent.finding import Finding
from fedsync.core.orders import LocalWork, SiloFacts, WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, SiloView
from fedsync.policies.barrier.kinds.compass import Compass
from fedsync.policies.barrier.kinds.elastic import METHODS, find_sync_point


def sync_points(cases: int, rng: np.random.Generator, method: str) -> Finding:
    """Waiting and time of the sync point on small tables of whole milliseconds, with many ties.

    The exact searches are compared with all choices, and with the paper's Algorithm 2; the scans with Algorithm 1.
    """
    worst = 0.0
    for _ in range(cases):
        n, r = int(rng.integers(2, 6)), int(rng.integers(1, 6))
        table = np.cumsum(rng.integers(1, int(rng.integers(3, 30)), (n, r)), axis=1)
        found, rows = find_sync_point(table, method), table.tolist()
        if METHODS[method]:
            least, time = paper_sync_points.naive(rows)
            ours = paper_sync_points.zipline(rows)
            worst = max(
                worst, abs(found.waiting - least), abs(found.time - time), abs(ours[0] - least), abs(ours[1] - time)
            )
        else:
            scan = paper_sync_points.grid_scan if method == "grid_scan" else paper_sync_points.full_grid_scan
            worst = max(worst, abs(found.waiting - scan(rows)))
    source = "all choices, algorithm 2" if METHODS[method] else "algorithm 1, 5.1"
    return Finding(f"ElasticBSP, {method}", f"ZipLine, {source}", cases, worst, 0, "ms")


def fedcompass(cases: int, rng: np.random.Generator) -> Finding:
    """Steps and group of silos that begin one after another, while earlier groups are open or over."""
    compared, wrong = 0, 0
    while compared < cases:
        least = int(rng.integers(1, 6))
        most, factor, n = least * int(rng.integers(2, 8)), float(rng.uniform(1, 1.6)), int(rng.integers(2, 9))
        barrier = Compass(least, most, factor)
        state, groups, now_s = barrier.init(), list[paper_compass.PaperGroup](), 0.0
        paces = rng.uniform(0.5, 4, n).tolist()
        silos: dict[str, SiloView] = {}
        for index, pace in enumerate(paces):
            silos[f"s{index}"] = SiloView(SiloFacts(1000), clock=1, forecast=Curve(8 / pace))
            view = ClusterView(now_s, 1, silos, {}, dict.fromkeys(silos, LocalWork(most, 8, 0.1)))
            groups = [group for group in groups if now_s < group.latest_s]
            joined, steps = paper_compass.assign(groups, now_s, pace, least, most)
            if joined is None:
                seconds = steps * pace
                groups.append(paper_compass.PaperGroup(now_s + seconds, now_s + factor * seconds, (pace,)))
            else:
                old = groups[joined]
                groups[joined] = paper_compass.PaperGroup(old.expected_s, old.latest_s, (*old.seconds_per_step, pace))
            state, verdict = barrier.decide(state, view)
            times = [(group.expected_s, group.latest_s) for group in groups]
            got = [(group.expected_s, group.latest_s) for group in state.groups]
            same = len(got) == len(times) and np.allclose(got, times, rtol=1e-9)
            wrong += verdict.steps != {f"s{index}": steps} or not same
            compared += 1
            order = WorkOrder(f"s{index}/2", 1, 2, 8, steps, 0.1, 1)
            silos[f"s{index}"] = SiloView(SiloFacts(1000), clock=1, order=order, forecast=Curve(8 / pace))
            now_s += float(rng.uniform(0, most * 1.5))
    return Finding("FedCompass", "arXiv 2309.14675, from memory", compared, wrong, 0, "decisions")
