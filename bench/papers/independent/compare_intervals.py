"""FSP's intervals: FedSync's ``binary`` (FSPB) and ``linear`` (FSPV) against `paper_intervals`."""

from __future__ import annotations

from math import isfinite

import numpy as np

from bench.papers.independent import paper_intervals
from bench.papers.independent.finding import Finding
from fedsync.policies.barrier.intervals import FittedInterval, HalvingInterval, IntervalRound, QualityFit


def fspb(cases: int, rng: np.random.Generator) -> Finding:
    """The interval in which the search ends, where the objective falls at a rate that depends on the interval only."""
    worst = 0.0
    for _ in range(cases):
        factor, start_s, cost_s = int(rng.integers(2, 5)), float(rng.uniform(2, 40)), float(rng.uniform(0.05, 1))
        peak, offset = float(rng.uniform(0.2, 10)), float(rng.uniform(0, 2))

        def fall(interval_s: float, peak: float = peak, offset: float = offset, cost_s: float = cost_s) -> float:
            valid_s = max(interval_s - cost_s, 0.0)
            return valid_s * (offset + 1 / (1 + (valid_s / peak) ** 2))

        wanted = paper_intervals.binary_search(start_s, factor, lambda interval_s, _, f=fall: f(interval_s), 200)[-1]
        policy = HalvingInterval(start_s, factor, floor_s=1e-3)
        state, loss = policy.init(), 100.0
        for _ in range(200):
            interval_s = policy.attempt(state).interval_s
            state = policy.observe(state, IntervalRound(interval_s, cost_s, loss))
            loss -= fall(interval_s)
        worst = max(worst, abs(policy.attempt(state).interval_s / wanted - 1))
    return Finding("FSPB", "FSP, 3.3, figure 2a", cases, worst, 1e-9, "of the interval")


def fspv(cases: int, rng: np.random.Generator) -> Finding:
    """The interval of a stage after its two trials, and the rollback between the trials."""
    compared, worst = 0, 0.0
    while compared < cases:
        eta, cost_s = float(rng.uniform(0.2, 5)), float(rng.uniform(0.05, 2))
        first, second = rng.uniform(0.1, 1, 2).tolist()
        slope, intercept = paper_intervals.fitted_line((eta, first), (2 * eta, second))
        best = paper_intervals.best_interval(cost_s, slope, intercept)
        if not isfinite(best):
            continue  # the paper gives no interval where progress does not fall with the interval
        policy = FittedInterval(eta + cost_s, stage_s=1e9, floor_s=1e-6, ceiling_s=1e6)
        state, loss, rolled = policy.init(), 100.0, []
        for number in range(5):  # three rounds of eta and two of 2 eta; a round's loss is that of its first model
            rate, length = (first, eta) if number < 3 else (second, 2 * eta)
            attempt = policy.attempt(state)
            rolled += [number] * attempt.rollback
            loss = 100.0 if attempt.rollback else loss
            worst = max(worst, abs(attempt.interval_s / (length + cost_s) - 1))
            state = policy.observe(state, IntervalRound(length + cost_s, cost_s, loss))
            loss -= rate * length
        worst = max(worst, abs(policy.attempt(state).interval_s / (best + cost_s) - 1), 0.0 if rolled == [3] else 1.0)
        compared += 1
    return Finding("FSPV, a stage", "FSP, 3.3, equation 7", compared, worst, 1e-6, "of the interval")


def fspv_gain(cases: int, rng: np.random.Generator) -> Finding:
    """The gain of equation 7 at FedSync's interval, and the greatest on a fine grid between the same bounds."""
    worst = 0.0
    for _ in range(cases):
        cost_s, slope, intercept = float(rng.uniform(0, 2)), float(rng.normal()), float(rng.normal(1, 1))
        low = float(rng.uniform(0.05, 1))
        high = low * float(rng.uniform(1.5, 30))
        chosen = QualityFit(slope, intercept).best(cost_s, low, high)
        grid = [paper_intervals.gain(eta, cost_s, slope, intercept) for eta in np.geomspace(low, high, 400)]
        got = paper_intervals.gain(chosen, cost_s, slope, intercept)
        worst = max(worst, max(grid) - got if low <= chosen <= high else np.inf)
    return Finding("FSPV, greatest gain", "FSP, equation 7", cases, worst, 1e-12, "loss/s below a grid's")
