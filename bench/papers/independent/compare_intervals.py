"""FSP's intervals: FedSync's ``binary`` (FSPB) and ``linear`` (FSPV) against `paper_intervals`."""

from __future__ import annotations

from math import isfinite

import numpy as np

from bench.papers.independent import paper_intervals
from bench.papers.independent.finding import Finding
from fedsync.extras.intervals.published import FittedInterval, HalvingInterval
from fedsync.policies.barrier.intervals import IntervalRound


def fspb(cases: int, rng: np.random.Generator) -> Finding:
    """The interval in which the search ends, where the objective falls at a rate that depends on the interval only."""
    found = []
    for _ in range(cases):
        factor, start_s, cost_s = int(rng.integers(2, 5)), float(rng.uniform(2, 40)), float(rng.uniform(0.05, 1))
        peak, offset = float(rng.uniform(0.2, 10)), float(rng.uniform(0, 2))

        def fall(interval_s: float, peak: float = peak, offset: float = offset, cost_s: float = cost_s) -> float:
            valid_s = max(interval_s - cost_s, 0.0)
            return valid_s * (offset + 1 / (1 + (valid_s / peak) ** 2))

        wanted = paper_intervals.binary_search(start_s, factor, fall)
        policy = HalvingInterval(start_s, factor, floor_s=1e-3)
        state, loss = policy.init(), 100.0
        for _ in range(200):
            interval_s = policy.attempt(state).interval_s
            state = policy.observe(state, IntervalRound(interval_s, cost_s, loss))
            loss -= fall(interval_s)
        found.append(abs(policy.attempt(state).interval_s / wanted - 1))
    return Finding("FSPB", "FSP, 3.3, figure 2a", found, 1e-9, "of the interval")


def fspv(cases: int, rng: np.random.Generator) -> Finding:
    """The interval of a stage after its two trials, and the rollback between the trials."""
    found: list[float] = []
    while len(found) < cases:
        eta, cost_s = float(rng.uniform(0.2, 5)), float(rng.uniform(0.05, 2))
        first, second = rng.uniform(0.1, 1, 2).tolist()
        best = paper_intervals.best_interval((eta, first), (2 * eta, second), cost_s)
        if not isfinite(best):
            continue  # the paper gives no interval where progress does not fall with the interval
        policy = FittedInterval(eta + cost_s, stage_s=1e9, floor_s=1e-6, ceiling_s=1e6)
        state, loss, worst = policy.init(), 100.0, 0.0
        for number in range(5):  # three rounds of eta and two of 2 eta; a round's loss is that of its first model
            rate, length = (first, eta) if number < 3 else (second, 2 * eta)
            attempt = policy.attempt(state)
            worst = worst if attempt.rollback == (number == 3) else np.inf
            loss = 100.0 if attempt.rollback else loss
            worst = max(worst, abs(attempt.interval_s / (length + cost_s) - 1))
            state = policy.observe(state, IntervalRound(length + cost_s, cost_s, loss))
            loss -= rate * length
        found.append(max(worst, abs(policy.attempt(state).interval_s / (best + cost_s) - 1)))
    return Finding("FSPV, a stage", "FSP, 3.3, equation 7", found, 1e-6, "of the interval")
