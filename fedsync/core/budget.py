"""How many local steps fit a time budget."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def may_begin(elapsed_s: float, step_s: float, budget_s: float, overrun: float) -> bool:
    """Whether a step that takes ``step_s`` may begin ``elapsed_s`` after the order did.

    It has to begin before the budget ends, and may end after it by at most ``overrun`` of its length.

    Source: FSP, section 3.1 (a worker decides whether to go on when the signal comes in mid-step).
    """
    left_s = budget_s - elapsed_s
    return left_s > 0 and left_s >= (1 - overrun) * step_s


def steps_within(seconds: NDArray[np.float64], budget_s: float, overrun: float) -> int:
    """Number of steps that fit a budget, at least 1.

    Args:
        seconds: length of each step, float64 [k], k >= 1.
        budget_s: seconds for all of them.
        overrun: see `may_begin`.
    """
    left_s = budget_s - (np.cumsum(seconds) - seconds)
    stays_out = ~((left_s > 0) & (left_s >= (1 - overrun) * seconds))
    return max(int(np.argmax(stays_out)) if stays_out.any() else len(seconds), 1)
