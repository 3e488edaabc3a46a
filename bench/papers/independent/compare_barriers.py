"""SSP, PSP and A-BSP: FedSync's decisions against `paper_barriers`."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
from scipy.stats import chi2

from bench.papers.independent import paper_barriers
from bench.papers.independent.finding import Finding, decisions, random_silos
from fedsync.core.actions import Dispatch, HaltEarly
from fedsync.core.events import UpdateArrived
from fedsync.core.orders import Cursor, LocalWork, SiloFacts, WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, SiloView
from fedsync.policies.barrier.kinds.sampled import Sampled, SampledState, Sampling
from fedsync.policies.barrier.kinds.ssp import Clocks, Tick
from fedsync.train.batches import Sampler

FALSE_ALARM = 1e-6
"""Probability that a chi-square test rejects the right distribution."""

SETTINGS = 12
"""Numbers of silos, laggards and samples that `psp_passing` tries."""


def ssp(cases: int, rng: np.random.Generator) -> Finding:
    """Silos that get an order, and silos that wait, after each event of whole runs."""
    found, updates = list[float](), 100
    while len(found) < cases:
        staleness, silos = int(rng.integers(0, 5)), random_silos(rng)
        done, idle = dict.fromkeys([silo["name"] for silo in silos], 0), {silo["name"] for silo in silos}
        for entry in decisions("ssp", [f"barrier.staleness={staleness}", f"stop={{rounds: {updates}}}"], silos):
            for event in entry.events:
                if isinstance(event, UpdateArrived):
                    done[event.meta.silo] += 1
                    idle.add(event.meta.silo)
            if sum(done.values()) >= updates:
                break  # the run is over
            clocks, names = list(done.values()), list(done)
            everyone = range(len(names))
            wanted = {n for n in idle if paper_barriers.may_continue(clocks, names.index(n), staleness, everyone)}
            released = {action.silo for action in entry.actions if isinstance(action, Dispatch)}
            found += [(name in released) != (name in wanted) for name in idle]
            idle -= released
    return Finding("SSP", "PSP, 10.3", found, 0, "decisions")


def psp_passing(cases: int, rng: np.random.Generator, staleness: int) -> Finding:
    """Pearson's chi-square of pass and wait of a silo, over draws of many versions."""
    statistic, freedom, draws = 0.0, 0, max(cases // SETTINGS, 50)
    for _ in range(SETTINGS):
        n = int(rng.integers(4, 13))
        beta, lagging, seed = int(rng.integers(1, n)), int(rng.integers(1, n)), int(rng.integers(2**31))
        ticks = [5 + staleness, *[4] * lagging, *[5] * (n - 1 - lagging)]
        barrier = Sampled(sample_size=beta, staleness=staleness)
        state = SampledState(Clocks({f"s{index}": Tick(tick, tick, 0) for index, tick in enumerate(ticks)}))
        views = [_view(dict.fromkeys(state.clocks.present, 10.0), version, seed, ticks) for version in range(draws)]
        passed = sum("s0" in barrier.decide(state, view)[1].release for view in views)
        chance = paper_barriers.chance_to_continue(n - 1, lagging, beta)
        if 0 < chance < 1:
            statistic += (passed - draws * chance) ** 2 / (draws * chance * (1 - chance))
            freedom += 1
        elif passed != draws * chance:
            statistic = np.inf
    name, allowed = "pSSP, passing" if staleness else "pBSP, passing", float(chi2.isf(FALSE_ALARM, freedom))
    return Finding(name, "PSP, 10.4.1", [statistic], allowed, "chi-square", SETTINGS * draws)


def psp_samples(cases: int, rng: np.random.Generator, sampling: Sampling) -> Finding:
    """Whether all samples are equally frequent; of ``grouped``, half from the fast and half from the slow silos."""
    cases, seed = max(cases, 500), int(rng.integers(2**31))  # a chi-square test needs some draws of each sample
    speeds = {f"s{index}": 10.0 if index > 3 else 100.0 for index in range(7)}
    fast, slow = ("s1", "s2", "s3"), ("s4", "s5", "s6")
    wanted = [set(sample) for sample in combinations(fast + slow, 3)]
    if sampling is Sampling.GROUPED:
        wanted = [set(one + other) for one in combinations(fast, 2) for other in combinations(slow, 2)]
    found: Counter[frozenset[str]] = Counter()
    for version in range(cases):
        view = _view(speeds, version, seed, [5] * 7)
        found[frozenset(sampling.draw(sampling.pools(view), len(wanted[0]), view, "s0", 5, keeps=False))] += 1
    expected = cases / len(wanted)
    statistic = sum((found.pop(frozenset(sample), 0) - expected) ** 2 / expected for sample in wanted)
    statistic = statistic if not found else np.inf  # a sample that must not occur
    allowed = float(chi2.isf(FALSE_ALARM, len(wanted) - 1))
    return Finding(f"PSP, {sampling} samples", "PSP, 10.4.1, 10.5", [statistic], allowed, "chi-square", cases)


def _view(speeds: dict[str, float], version: int, seed: int, clocks: list[int]) -> ClusterView:
    """Silos of these speeds and finished orders; all but the first are busy."""
    order = WorkOrder("?/1", 0, 1, 8, 4, 0.1, 1)
    silos = {
        name: SiloView(SiloFacts(100), clock, order if name != "s0" else None, forecast=Curve(speed))
        for (name, speed), clock in zip(speeds.items(), clocks, strict=True)
    }
    return ClusterView(0.0, version, silos, {}, dict.fromkeys(silos, LocalWork(4, 8, 0.1)), seed)


def absp_signal(cases: int, rng: np.random.Generator) -> Finding:
    """Delay of the first signal after the exact instant, on machines of constant speed; no signal may be early.

    Allowed are an interval between two reports and a step: a report counts whole steps.
    """
    found, report_s = list[float](), 0.02
    for _ in range(max(cases // 10, 5)):
        ratio, silos = float(rng.uniform(0.3, 1)), random_silos(rng, least=3, jitter=0.0)
        sets = [f"barrier={{kind: a-bsp, sync_ratio: {ratio}, report_s: {report_s}}}", "stop={rounds: 1}"]
        entries = decisions("a-bsp", [*sets, "local={steps: 320, batch_size: 1}"], silos)
        signals = [e.at_s for e in entries if any(isinstance(action, HaltEarly) for action in e.actions)]
        speeds = [silo["speed"] for silo in silos]
        wanted = paper_barriers.signal_s(speeds, [320] * len(silos), ratio)
        delay = (signals[0] if signals else 320 / min(speeds)) - wanted
        found.append(delay / (report_s + 1 / min(speeds)) if delay > -1e-9 else np.inf)
    return Finding("A-BSP, delay of the signal", "A-BSP, algorithm 1", found, 1, "reports and steps")


def absp_data(cases: int, rng: np.random.Generator) -> Finding:
    """Number of times that each data point has been processed after each iteration, in ascending order."""
    found: list[float] = []
    while len(found) < cases:
        points, number = int(rng.integers(5, 60)), int(rng.integers(2, 20))
        done = rng.integers(1, points + 1, number).tolist()
        sampler, cursor = Sampler(points, int(rng.integers(2**31)), "s0"), Cursor()
        paper, shipped = np.zeros(points, int), np.zeros(points, int)
        for iteration in paper_barriers.processing_order(points, done):
            paper[iteration] += 1
            rows, cursor = sampler.take(cursor, len(iteration))
            np.add.at(shipped, rows, 1)
            found.append(np.abs(np.sort(paper) - np.sort(shipped)).max())
    return Finding("A-BSP, unprocessed first", "A-BSP, 3.3.1", found, 0, "times processed")
