"""What policies refuse is said to the letter, with what to write instead."""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from bench.papers.backtest import Step, backtest
from fedsync.common.errors import FedSyncError
from fedsync.core.actions import Commit
from fedsync.core.protocols import Bounds
from fedsync.core.speed.curve import Curve
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.policies.balance.balancer_base import CurvePolicy
from fedsync.policies.balance.by_forecast import EqualisingBalancer, ProportionalBalancer
from fedsync.policies.barrier.climbing import ClimbingInterval
from fedsync.policies.barrier.intervals import FittedInterval, FixedInterval, HalvingInterval
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.barrier.kinds.compass import Compass
from fedsync.policies.barrier.kinds.elastic import Elastic, find_sync_point
from fedsync.policies.barrier.kinds.fsp import Fsp, Late, WaitFor
from fedsync.policies.barrier.wrappers.late_orders import Capped, LateRule, Quorum
from fedsync.policies.predict.mixture import Mixture
from fedsync.policies.schema import Chosen

ONE, TWO = Bounds(np.array([1]), np.array([9])), Bounds(np.array([1, 2]), np.array([4, 5]))


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
    (
        lambda: put(np.zeros(2, dtype=np.float32), times=2),
        "silo 'a' failed the check 'update id': 'a/1' is here already",
    ),
    (lambda: put(np.zeros(2)), "silo 'a' failed the check 'shape': float64 (2,), the model is float32 (2,)"),
    (
        lambda: put(np.zeros(3, dtype=np.float32)),
        "silo 'a' failed the check 'shape': float32 (3,), the model is float32 (2,)",
    ),
    (
        lambda: put(np.array([0.5, np.inf], dtype=np.float32)),
        "silo 'a' failed the check 'finite': values from 0.5 to inf; finite ones of at most 1e+30 are accepted",
    ),
    (
        lambda: put(np.array([-(2.0**101), 0.5], dtype=np.float32)),
        "silo 'a' failed the check 'finite': values from -2.535301200456459e+30 to 0.5; "
        "finite ones of at most 1e+30 are accepted",
    ),
    (
        lambda: put(np.zeros(2, dtype=np.float32)).commit(Commit(1, {"a/1": 0.5}, toward=True)),
        "version 1 moves towards 'a/1', which no order began",
    ),
    (
        lambda: ProportionalBalancer(floor=9).check(8),
        "balancer.floor 9 exceeds local.batch_size 8",
    ),
    (
        lambda: ProportionalBalancer(cap=7).check(8),
        "balancer.cap 7 lies below local.batch_size 8: the silos could not take the total together",
    ),
    (
        lambda: ProportionalBalancer(multiple=3).check(8),
        "balancer.multiple 3 does not divide local.batch_size 8: multiples could not sum to the total; "
        "write local.batch_size: 9, or another multiple",
    ),
    (
        lambda: ProportionalBalancer(multiple=2, scale="steps"),
        "balancer.multiple has no effect: balancer.scale 'steps' keeps batch sizes",
    ),
    (
        lambda: EqualisingBalancer().plan([Curve(0.0)], 4, ONE),
        "speeds must be finite and positive, and times finite, not [[0. 0. 0.]]",
    ),
    (lambda: ProportionalBalancer().plan([Curve(-1.0)], 4, ONE), "speeds must be finite and positive, not [-1.]"),
    (
        lambda: ProportionalBalancer().plan([Curve(1.0), Curve(1.0)], 10, TWO),
        "balancer: 2 silos can take 3 to 9 samples a step together, not 10. "
        "Change local.batch_size, balancer.floor or balancer.cap",
    ),
    (lambda: ClimbingInterval(floor_s=2.0, ceiling_s=1.0), "floor_s 2 exceeds ceiling_s 1; lower the floor"),
    (lambda: HalvingInterval(interval_s=1.0, floor_s=2.5), "floor_s 2.5 exceeds interval_s 1; lower the floor"),
    (
        lambda: FittedInterval(interval_s=4.0, ceiling_s=3.0),
        "interval_s 4 lies outside floor_s 1 to ceiling_s 3; move the bounds",
    ),
    (
        lambda: FittedInterval(interval_s=4.0, floor_s=5.0),
        "interval_s 4 lies outside floor_s 5 to ceiling_s 16; move the bounds",
    ),
    (lambda: Compass(min_steps=5, max_steps=4), "max_steps 4 lies below min_steps 5; raise max_steps"),
    (lambda: Elastic(lookahead=3, floor=4), "floor 4 exceeds lookahead 3; lower the floor"),
    (
        lambda: Fsp(FixedInterval(1.0), late=Late.DROP, wait_for=WaitFor(sample_size=1)),
        "late 'drop' discards the updates that wait_for does not wait for; write late: next",
    ),
    (
        lambda: Capped(Quorum(Bsp(), count=1, late=LateRule.DROP), cap_s=1.0),
        "late 'next' of capped would commit what quorum inside it drops; write the same `late` in both",
    ),
    (lambda: Quorum(Bsp()), "the number of silos is not defined; write either `count` or `share`"),
    (lambda: Quorum(Bsp(), count=1, share=0.5), "the number of silos is not defined; write either `count` or `share`"),
    (
        lambda: find_sync_point(np.ones((20, 2)), "naive"),
        "naive would try 2^20 combinations, more than 1000000; use method 'sweep'",
    ),
    (
        lambda: backtest(Frozen(), [Step(1.0, 0.5, 0.5)] * 3, 1),  # type: ignore[arg-type]
        "the predictor forecasts a speed of 0.0 samples/s",
    ),
    (
        lambda: Mixture((Mixture(),)),
        "a mixture cannot contain a mixture; write the inner mixture's experts instead",
    ),
]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (5, "Input should be a valid dictionary"),
        ({}, "Unable to extract tag using discriminator 'kind'"),
        (
            {"kind": "cubic"},
            "Input tag 'cubic' found using 'kind' does not match any of the expected tags: 'affine', 'linear'",
        ),
        ({"kind": 5}, "Input tag '5' found using 'kind' does not match any of the expected tags: 'affine', 'linear'"),
    ],
)
def test_a_choice_that_there_is_not(value: object, told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Annotated[CurvePolicy, Chosen("curve")]).validate_python(value)
    assert [error["msg"] for error in caught.value.errors()] == [told]


@pytest.mark.parametrize(("refused", "told"), REFUSED, ids=[told[:40] for _, told in REFUSED])
def test_a_refusal_says_what_is_wrong_and_what_to_write(refused: Callable[[], object], told: str) -> None:
    with pytest.raises((ValueError, FedSyncError)) as caught:
        refused()
    assert str(caught.value) == told
