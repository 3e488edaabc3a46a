"""The borders of what a report may say; `test_coordinator_absorb` has what lies beyond them."""

from __future__ import annotations

from typing import Any

import pytest

from fedsync.core.checks import check_evaluation, check_report, check_speed, usable
from fedsync.core.errors import ProtocolError
from fedsync.core.orders import Evaluation, Window, WorkOrder
from tests.core.make import answer, scored

ORDER = WorkOrder("a/1", 3, 1, batch_size=8, max_steps=4, learning_rate=0.1, seed=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"steps": 1, "samples": 1},
        {"steps": 4, "samples": 32},
        {"loss": -5.0},  # a log likelihood
        {"compute_s": 32e-9},  # 1e9 samples/s, the most
        {"overhead_s": {"load": 0.0}},
        {"windows": (Window(1e9, 0.0, 0.0),) * 64},
        {"windows": (Window(1.0, 1.001, 1.001),)},  # a mean of ones may exceed 1 by rounding
        {"windows": (Window(1.0),)},  # does not tell of its machine
        {"batch_cap": 1},
        {"evaluation": scored(0.0, samples=0)},
    ],
)
def test_what_just_passes(changes: dict[str, Any]) -> None:
    event = answer("a", ORDER, **changes)
    check_report("a", ORDER, event.meta, event.report)


def test_the_error_names_the_silo_the_check_and_the_value() -> None:
    event = answer("a", ORDER, samples=33)
    with pytest.raises(ProtocolError, match="silo 'a' failed the check 'samples': 33 samples in steps that hold 32"):
        check_report("a", ORDER, event.meta, event.report)


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.0000001e9, float("nan"), float("inf")])
def test_speeds_that_no_machine_has(speed: float) -> None:
    with pytest.raises(ProtocolError, match="'speed'"):
        check_speed("a", speed)


@pytest.mark.parametrize(
    "evaluation",
    [
        Evaluation(float("nan"), 0.0, 1),
        Evaluation(0.0, float("inf"), 1),
        Evaluation(0.0, 0.0, -1),
        Evaluation(0.0, float("nan"), 1),
        Evaluation(0.0, 1.1e7, 10),
        Evaluation(0.0, 0.5, 0),
        Evaluation(0.0, 1.0, 10**9 + 1),
    ],
)
def test_evaluations_that_poison_a_mean(evaluation: Evaluation) -> None:
    with pytest.raises(ProtocolError, match="'evaluation'"):
        check_evaluation("a", evaluation)
    assert usable("a", evaluation) is None


def test_a_score_may_be_negative_and_perfect_but_not_more() -> None:
    for evaluation in (Evaluation(5.0, -30.0, 10), Evaluation(-25.0, 25.0, 10), Evaluation(0.0, 0.0, 0)):
        assert usable("a", evaluation) is evaluation
    assert usable("a", None) is None
