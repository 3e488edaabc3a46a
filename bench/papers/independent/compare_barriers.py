"""SSP, PSP and A-BSP: FedSync's decisions against `paper_barriers`."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import numpy as np
from scipy.stats import chi2

from bench.papers.independent import paper_barriers
from bench.papers.independent.finding import Finding, decisions, random_silos
from fedsync.core.actions import Dispatch, HaltEarly
from fedsync.core.events import Progressed, UpdateArrived
from fedsync.core.orders import Cursor, LocalWork, SiloFacts, WorkOrder
from fedsync.core.speed.curve import Curve
from fedsync.core.views import ClusterView, SiloView
from fedsync.policies.barrier.kinds.sampled import Sampled, SampledState, Sampling
from fedsync.policies.barrier.kinds.ssp import Clocks, Tick
from fedsync.train.batches import Sampler

FALSE_ALARM = 1e-6
"""Probability that a chi-square test rejects the right distribution."""


def ssp(cases: int, rng: np.random.Generator) -> Finding:
    """Which silos get an order, and which wait, after each event of whole runs."""
    compared = wrong = 0
    updates = 100
    while compared < cases:
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
            wrong += len(released ^ wanted)
            compared += len(idle)
            idle -= released
    return Finding("SSP", "PSP, 10.3", compared, wrong, 0, "decisions")


def psp_passing(cases: int, rng: np.random.Generator, staleness: int) -> Finding:
    """How often a silo continues, over draws of many versions: Pearson's chi-square of pass and wait."""
    worst, freedom, settings = 0.0, 0, 12
    draws = max(cases // settings, 50)
    for _ in range(settings):
        n = int(rng.integers(4, 13))
        beta, lagging = int(rng.integers(1, n)), int(rng.integers(1, n))
        ticks = [5 + staleness, *[4] * lagging, *[5] * (n - 1 - lagging)]
        barrier, seed = Sampled(sample_size=beta, staleness=staleness), int(rng.integers(2**31))
        passed = sum(_continues(barrier, ticks, version, seed) for version in range(draws))
        chance = paper_barriers.chance_to_continue(n - 1, lagging, beta)
        if 0 < chance < 1:
            worst += (passed - draws * chance) ** 2 / (draws * chance * (1 - chance))
            freedom += 1
        elif passed != draws * chance:
            worst = np.inf
    name = "pSSP, passing" if staleness else "pBSP, passing"
    return Finding(name, "PSP, 10.4.1", settings * draws, worst, _critical(freedom), "chi-square")


def _continues(barrier: Sampled, ticks: list[int], version: int, seed: int) -> bool:
    """Whether the first silo gets an order; the others are busy."""
    order = WorkOrder("?/1", 0, 1, 8, 4, 0.1, 1)
    silos = {
        f"s{index}": SiloView(SiloFacts(100), clock=tick, order=order if index else None)
        for index, tick in enumerate(ticks)
    }
    state = SampledState(Clocks({f"s{index}": Tick(tick, tick, 0) for index, tick in enumerate(ticks)}))
    view = ClusterView(0.0, version, silos, {}, dict.fromkeys(silos, LocalWork(4, 8, 0.1)), seed)
    return "s0" in barrier.decide(state, view)[1].release


def psp_samples(cases: int, rng: np.random.Generator, sampling: Sampling) -> Finding:
    """Whether all samples are equally frequent; of ``grouped``, half from the fast and half from the slow silos."""
    n, beta = 7, 4 if sampling is Sampling.GROUPED else 3
    cases = max(cases, 500)  # the chi-square distribution needs some draws a sample
    names = [f"s{index}" for index in range(n)]
    fast, slow = names[1:4], names[4:]
    silos = {name: SiloView(SiloFacts(100), clock=5, forecast=Curve(10.0 if name in slow else 100.0)) for name in names}
    wanted = [set(sample) for sample in combinations(names[1:], beta)]
    if sampling is Sampling.GROUPED:
        wanted = [set(a + b) for a in combinations(fast, beta // 2) for b in combinations(slow, beta // 2)]
    found: Counter[frozenset[str]] = Counter()
    seed = int(rng.integers(2**31))
    for version in range(cases):
        view = ClusterView(0.0, version, silos, {}, dict.fromkeys(silos, LocalWork(4, 8, 0.1)), seed)
        found[frozenset(sampling.draw(sampling.pools(view), beta, view, "s0", 5, keeps=False))] += 1
    expected = cases / len(wanted)
    statistic = sum((found.pop(frozenset(sample), 0) - expected) ** 2 / expected for sample in wanted)
    worst = statistic if not found else np.inf  # a sample that must not occur
    return Finding(
        f"PSP, {sampling} samples", "PSP, 10.4.1, 10.5", cases, worst, _critical(len(wanted) - 1), "chi-square"
    )


def _critical(freedom: int) -> float:
    return float(chi2.isf(FALSE_ALARM, freedom))


def absp_signal(cases: int, rng: np.random.Generator) -> Finding:
    """The instant of the signal in each round of whole runs, from the reports that the server had."""
    compared, worst = 0, 0.0
    while compared < max(cases // 10, 10):
        ratio, silos = float(rng.uniform(0.3, 1)), random_silos(rng, least=3)
        sets = [f"barrier={{kind: a-bsp, sync_ratio: {ratio}, report_s: 0.05}}", "stop={rounds: 10}"]
        planned: dict[str, int] = {}
        processed: dict[str, int] = {}
        instants: list[float] = []
        reports: list[int] = []
        request, signal = -1, None
        for entry in decisions("a-bsp", [*sets, "local={steps: 40, batch_size: 8}"], silos):
            for event in entry.events:
                if isinstance(event, UpdateArrived):
                    processed[event.meta.silo] = event.meta.samples
                    request = len(reports) if request < 0 else request
                elif isinstance(event, Progressed):
                    processed[event.silo] = event.steps * 8
            instants.append(entry.at_s)
            reports.append(sum(processed.values()))
            if any(isinstance(action, HaltEarly) for action in entry.actions):
                signal = entry.at_s
            begun = {a.silo: a.order.planned_samples for a in entry.actions if isinstance(a, Dispatch)}
            if begun:
                if planned:
                    at = paper_barriers.signal_report(reports, sum(planned.values()), request, ratio)
                    wanted = instants[-1] if at is None else instants[at]
                    worst = max(worst, abs((instants[-1] if signal is None else signal) - wanted))
                    compared += 1
                planned, processed, instants, reports, request, signal = begun, {}, [], [], -1, None
    return Finding("A-BSP, signal", "A-BSP, algorithm 1", compared, worst, 0, "s")


def absp_delay(cases: int, rng: np.random.Generator) -> Finding:
    """Delay of the first signal after the exact instant, on machines of constant speed; no signal may be early.

    Allowed are an interval between two reports and a step: a report counts whole steps.
    """
    worst, runs, report_s = 0.0, max(cases // 30, 5), 0.05
    for _ in range(runs):
        ratio, silos = float(rng.uniform(0.3, 1)), random_silos(rng, least=3, jitter=0.0)
        sets = [f"barrier={{kind: a-bsp, sync_ratio: {ratio}, report_s: {report_s}}}", "stop={rounds: 1}"]
        entries = decisions("a-bsp", [*sets, "local={steps: 40, batch_size: 8}"], silos)
        signals = [e.at_s for e in entries if any(isinstance(action, HaltEarly) for action in e.actions)]
        speeds = [silo["speed"] for silo in silos]
        wanted = paper_barriers.signal_s(speeds, [320] * len(silos), ratio)
        delay = (signals[0] if signals else 320 / min(speeds)) - wanted
        worst = max(worst, delay / (report_s + 8 / min(speeds)) if delay > -1e-9 else np.inf)
    return Finding("A-BSP, delay of the signal", "A-BSP, 3.2.1", runs, worst, 1, "report intervals and steps")


def absp_data(cases: int, rng: np.random.Generator) -> Finding:
    """How often each data point has been processed after each iteration, in ascending order."""
    compared, worst = 0, 0
    while compared < cases:
        points, number = int(rng.integers(5, 60)), int(rng.integers(2, 20))
        done = rng.integers(1, points + 1, number).tolist()
        sampler, cursor = Sampler(points, int(rng.integers(2**31)), "s0"), Cursor()
        paper, shipped = np.zeros(points, int), np.zeros(points, int)
        for iteration in paper_barriers.processing_order(points, done):
            paper[iteration] += 1
            rows, cursor = sampler.take(cursor, len(iteration))
            np.add.at(shipped, rows, 1)
            worst = max(worst, int(np.abs(np.sort(paper) - np.sort(shipped)).max()))
            compared += 1
    return Finding("A-BSP, unprocessed first", "A-BSP, 3.3.1", compared, worst, 0, "times processed")
