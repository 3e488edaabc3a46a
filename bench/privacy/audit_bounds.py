"""Lower bounds of epsilon from guesses about which canaries were in the data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
_BISECTIONS, _MOST = 40, 50.0

Scores = NDArray[np.float64]
Coins = NDArray[np.bool_]


def chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Largest probability of so many right guesses under (epsilon, delta).

    Each of ``canaries`` examples is in the data by a fair coin of its own; the opponent guesses ``guesses`` of the
    coins from one output. Source: Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846), theorem 5.2.
    """
    rate = 1 / (1 + math.exp(-epsilon))
    below = np.asarray(stats.binom.pmf(np.arange(right - 1, -1, -1), guesses, rate), np.float64)
    alpha = float(np.max(np.cumsum(below) / np.arange(1, right + 1), initial=0.0))
    return min(float(stats.binom.sf(right - 1, guesses, rate)) + 2 * alpha * delta * canaries, 1.0)


def bound_of_guesses(canaries: int, guesses: int, right: int, delta: float) -> float:
    """Largest epsilon that so many right guesses rule out at `CONFIDENCE`; 0 if they rule out none."""
    low, high = 0.0, _MOST
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if chance(canaries, guesses, right, middle, delta) < 1 - CONFIDENCE else (low, middle)
        )
    return low


def bound_of_one_run(scores: Scores, present: Coins, delta: float) -> float:
    """Bound from one run with many canaries.

    The opponent takes the tenth with the highest scores for present, and the tenth with the lowest for absent.
    """
    order, each = np.argsort(scores), len(scores) // 10
    right = int(present[order[-each:]].sum() + (~present[order[:each]]).sum())
    return bound_of_guesses(len(scores), 2 * each, right, delta)


def bound_of_runs(scores: Scores, present: Coins, delta: float) -> float:
    """Bound from many runs, each with one canary that is present by a fair coin.

    Both rates of a test of the canary's presence have Clopper-Pearson intervals; the first half of the runs chooses
    the test's threshold. Source: Jagielski, Ullman and Oprea 2020 (arXiv:2006.07709).
    """
    half = len(scores) // 2

    def bound(part: slice, threshold: float, interval: bool) -> float:
        above, inside = scores[part] >= threshold, present[part]
        found = [(int((above & inside).sum()), int(inside.sum())), (int((above & ~inside).sum()), int((~inside).sum()))]
        level = (1 - CONFIDENCE) / 2 if interval else 0.5
        true = _lower(*found[0], level)
        false = 1 - _lower(found[1][1] - found[1][0], found[1][1], level)
        return math.log((true - delta) / false) if true > delta else 0.0

    candidates = np.quantile(scores[:half], np.linspace(0.02, 0.999, 200))
    threshold = max(candidates, key=lambda each: bound(slice(half), float(each), True))
    return max(bound(slice(half, None), float(threshold), True), 0.0)


def _lower(count: int, of: int, level: float) -> float:
    """Lower end of the Clopper-Pearson interval."""
    return float(stats.beta.ppf(level, count, of - count + 1)) if count else 0.0


def membership(scores: Scores, present: Coins) -> dict[str, Any]:
    """Area under the curve of a test by these scores, and its true positives at 1 % false positives."""
    ranks = stats.rankdata(scores)
    inside, outside = int(present.sum()), int((~present).sum())
    area = (float(ranks[present].sum()) - inside * (inside + 1) / 2) / (inside * outside)
    threshold = np.quantile(scores[~present], 0.99)
    return {"area": area, "true_at_1_percent": float((scores[present] > threshold).mean())}
