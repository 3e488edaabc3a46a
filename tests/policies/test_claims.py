"""What every shipped policy says of itself, which others decide by: what goes with what, and what is refused."""

from typing import Any

import pytest

from fedsync.core.orders import UpdateMeta, mean_loss
from fedsync.core.protocols import SpeedSample
from fedsync.extras.intervals.climbing import ClimbingInterval
from fedsync.extras.intervals.published import FittedInterval
from fedsync.extras.predictors.arima import Arima
from fedsync.policies.barrier.kinds.fsp import Fsp, Late
from fedsync.policies.schema import kinds
from tests.laws.kinds import configuration, examples

CLAIMS = {
    "barrier": [
        *("lockstep", "sets_steps", "unequal_steps", "mixes_rounds"),
        *("needs_discount", "needs_progress", "needs_examples", "needs_losses", "rolls_back", "draws"),
    ],
    "aggregation": ["normalises", "discounts", "additive"],
    "predictor": ["learns"],
    "balancer": ["declared", "scales_steps", "needs_lockstep", "spends"],
}
STEPS = {"sets_steps": True, "unequal_steps": True}
MIXES: dict[str, Any] = {"mixes_rounds": True}
LEARNS = {"learns": True}
SAID: dict[str, dict[str, dict[str, Any]]] = {
    "barrier": {
        "a-bsp": {"unequal_steps": True, "needs_progress": 0.3},
        "bsp": {"lockstep": True},
        "elastic": STEPS,
        "fedcompass": STEPS | MIXES,
        "fraction": {"draws": True},
        "fsp": STEPS | MIXES | {"needs_examples": True},
        "on-time": {"unequal_steps": True, "needs_progress": 0.3},
        **dict.fromkeys(["asp", "buffered", "capped", "deadline", "quorum", "sampled", "ssp"], MIXES),
    },
    "aggregation": {
        "fedasync": {"discounts": True},
        "fedavg": {"additive": True},
        "fedbuff": {"discounts": True, "additive": True},
        "fednova": {"normalises": True, "additive": True},
        **{kind: {} for kind in ("krum", "median", "trimmed-mean")},
    },
    "predictor": {
        **dict.fromkeys(("arima", "lstm", "mixture", "narx", "rnn"), LEARNS),
        **{kind: {} for kind in ("ema", "kalman", "memoryless")},
    },
    "balancer": {
        "leader-straggler": {"needs_lockstep": True},
        "spend-evenly": {"spends": True},
        **{kind: {} for kind in ("equalise", "fixed", "proportional")},
    },
}
"""What is not here is False, or None where it is a number of seconds."""


@pytest.mark.parametrize("section", CLAIMS)
def test_what_policies_say_of_themselves(section: str) -> None:
    shipped = {kind for kind, policy in kinds(section).items() if policy.is_shipped()}
    assert SAID[section].keys() == shipped
    for kind in shipped:
        policy = getattr(configuration((section, kind, examples(section)[kind]), {"rounds": 1}), section)
        for claim in CLAIMS[section]:
            nothing = None if claim == "needs_progress" else False
            assert getattr(policy, claim) == SAID[section][kind].get(claim, nothing), f"{kind}: {claim}"


def test_fsp_says_more_with_other_settings() -> None:
    climbing = Fsp(ClimbingInterval(), late=Late.STALE)
    assert (climbing.needs_losses, climbing.needs_discount, climbing.mixes_rounds) == (True, True, True)
    dropping = Fsp(climbing.interval, late=Late.DROP)
    assert (dropping.needs_discount, dropping.mixes_rounds) == (False, False)
    assert not dropping.rolls_back and Fsp(FittedInterval(3.0)).rolls_back


def test_a_mean_loss_counts_samples_and_is_none_where_nobody_tells() -> None:
    def part(loss: float | None, samples: int) -> UpdateMeta:
        return UpdateMeta("a/1", "a", 0, 1, samples, 1, 1, loss)

    assert mean_loss([part(1.0, 30), part(None, 1000), part(5.0, 10)]) == 2.0  # (30 + 50) / 40
    assert mean_loss([part(None, 3)]) is None
    assert mean_loss([]) is None


def test_arima_counts_orders_and_keeps_the_newest_speeds() -> None:
    arima = Arima(samples=3, memory=50)
    state = arima.init()
    assert (state.seen, state.due, state.average) == (0, 18, None)  # 3 (p + d + q + 1)
    for number in range(1, 61):
        state = arima.observe(state, SpeedSample(float(number)))
        assert (state.seen, arima.unlearned(state)) == (number, number >= 18)
    assert state.speeds == tuple(float(number) for number in range(11, 61))
    assert arima.observe(arima.observe(arima.init(), SpeedSample(10.0)), SpeedSample(20.0)).average == 12.0
