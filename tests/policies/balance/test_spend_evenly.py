"""Batches that spend privacy budgets evenly: by rows and budgets, within bounds, and by what the ledgers then say."""

from math import log, sqrt

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.protocols import Bounds, RoundSeen
from fedsync.policies.balance.without_forecast import SpendEvenly
from fedsync.privacy.accounting import fits
from fedsync.privacy.release import Release

NAMES = ("a", "b", "c")


def sizes(balancer: SpendEvenly, rows: dict[str, int], total: int = 96, cap: int = 1000) -> list[int]:
    bounds = Bounds(np.full(3, 1), np.full(3, cap))
    state, notes = balancer.advance(balancer.init(), RoundSeen(NAMES, {}, {}, total, bounds, rows))
    assert notes == ()
    return balancer.plan(state, NAMES, total, bounds).tolist()


def test_without_budgets_all_silos_have_one_sampling_rate() -> None:
    assert sizes(SpendEvenly(), {"a": 100, "b": 200, "c": 300}) == [16, 32, 48]


def test_a_rate_follows_the_root_of_the_room_that_a_budget_has() -> None:
    """With L = log(1e5): sqrt(L + 1) - sqrt(L) is 0.1443, sqrt(L + 8) - sqrt(L) is 1.0248; 7.10 times as much."""
    least = log(1e5)
    ratio = (sqrt(least + 8) - sqrt(least)) / (sqrt(least + 1) - sqrt(least))
    assert ratio == pytest.approx(7.10, abs=0.01)
    found = sizes(SpendEvenly(budgets={"a": 1.0, "b": 8.0, "c": 8.0}), dict.fromkeys(NAMES, 500), total=1520)
    assert found == [100, 710, 710]


def test_a_silo_without_a_budget_counts_as_the_largest_one() -> None:
    rows = dict.fromkeys(NAMES, 500)
    named = SpendEvenly(budgets={"a": 1.0, "b": 8.0, "c": 8.0})
    assert sizes(SpendEvenly(budgets={"a": 1.0, "b": 8.0}), rows) == sizes(named, rows)


def test_bounds_hold_and_before_the_first_round_rows_count_alike() -> None:
    rows = {"a": 10, "b": 100, "c": 1000}
    assert sizes(SpendEvenly(), rows, cap=60) == [3, 33, 60]
    assert SpendEvenly().plan({}, NAMES, 96, Bounds(np.full(3, 1), np.full(3, 96))).tolist() == [32, 32, 32]


@pytest.mark.parametrize("noise", [2.0, 4.0])
def test_budgets_end_at_about_the_same_step_by_the_ledger(noise: float) -> None:
    """Of equal batches, the first budget ends after a small part of the steps that the last one has room for."""
    rows, budgets = {"a": 1000, "b": 2000, "c": 4000}, {"a": 1.0, "b": 2.0, "c": 4.0}

    def lasts(batches: list[int]) -> list[int]:
        """Steps that each budget has room for."""
        found = []
        for name, batch in zip(NAMES, batches, strict=True):
            release, steps, beyond = Release(batch / rows[name], noise), 0, 100_000
            while beyond - steps > 1:
                middle = (steps + beyond) // 2
                room = fits({release: middle}, budgets[name], 1e-5, "rdp")
                steps, beyond = (middle, beyond) if room else (steps, middle)
            found.append(steps)
        return found

    equal, even = lasts([60, 60, 60]), lasts(sizes(SpendEvenly(budgets=budgets), rows, total=180))
    assert min(equal) < 0.01 * max(equal)
    assert min(even) > 0.8 * max(even) and min(even) > 40 * min(equal)


def test_it_is_refused_where_each_silo_fits_its_noise_itself() -> None:
    balancer = "balancer={kind: spend-evenly, budgets: {a: 1.0}}"
    target = "privacy={kind: dp-sgd, clip: 1.0, target_epsilon: 1.0}"
    with pytest.raises(
        ConfigError, match=r"'spend-evenly' changes nothing with target_epsilon.*Write noise_multiplier"
    ):
        StrategyConfig.load("fedavg", [balancer, target, "stop.rounds=3"])
    StrategyConfig.load("fedavg", [balancer, "privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 1.0}"])


def test_a_budget_of_a_silo_that_is_not_there_is_no_typing_mistake_without_consequences() -> None:
    config = StrategyConfig.load("fedavg", ["balancer={kind: spend-evenly, budgets: {berlin: 1.0}}"])
    config.check_silos(["berlin", "paris"])
    with pytest.raises(ConfigError, match=r"balancer: 'berlin' is named, and the silo file does not have it\. Did you"):
        config.check_silos(["berlim", "paris"])
