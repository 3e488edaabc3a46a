"""Messages of refusing policies, with the remedy.

``tests/config/test_policies.py`` has what strategy files are refused for.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.papers.backtest import Step, backtest
from fedsync.common.errors import FedSyncError
from fedsync.core.actions import Commit
from fedsync.extras.intervals.published import FittedInterval
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.kinds.elastic import find_sync_point
from fedsync.policies.barrier.wrappers.late_orders import Quorum


def put(update: Any, times: int = 1, model: Any = None) -> PlainAggregator:
    store = PlainAggregator(np.zeros(2, dtype=np.float32) if model is None else model)
    for _ in range(times):
        store.put("a", "a/1", update)
    return store


class Frozen:
    """A predictor that forecasts a speed of zero."""

    def init(self) -> None: ...

    def observe(self, state: None, sample: object) -> None: ...

    def unlearned(self, state: None) -> bool:
        return False

    def forecast(self, state: object, drivers: object) -> float:
        return 0.0


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: put(np.zeros(2, np.float32), times=2), "'update id': 'a/1' is here already"),
    (
        lambda: put(np.array([0.5, np.inf], np.float32)),
        "'finite': values from 0.5 to inf; finite ones of at most 1e+30",
    ),
    (lambda: put(np.array([-(2.0**101), 0.5], np.float32)), "'finite': values from -2.535301200456459e+30 to 0.5"),
    (
        lambda: put(np.zeros(2, np.float32)).commit(Commit(1, {"a/1": 0.5}, toward=True)),
        "version 1 moves towards 'a/1', which no order began",
    ),
    (lambda: FittedInterval(interval_s=4.0, floor_s=5.0), "interval_s 4 lies outside floor_s 5 to ceiling_s 16"),
    (lambda: Quorum(Bsp()), "write either `count` or `share`"),
    (lambda: Quorum(Bsp(), count=1, share=0.5), "write either `count` or `share`"),
    (lambda: find_sync_point(np.ones((20, 2)), "naive"), "2^20 combinations, more than 1000000; use method 'sweep'"),
    (
        lambda: backtest(Frozen(), [Step(1.0, 0.5, 0.5)] * 3, 1),  # type: ignore[arg-type]
        "the predictor forecasts a speed of 0.0 samples/s",
    ),
]


@pytest.mark.parametrize(("refused", "told"), REFUSED, ids=[told[:40] for _, told in REFUSED])
def test_a_refusal_says_what_is_wrong_and_what_to_write(refused: Callable[[], object], told: str) -> None:
    with pytest.raises((ValueError, FedSyncError)) as caught:
        refused()
    assert told in str(caught.value)
