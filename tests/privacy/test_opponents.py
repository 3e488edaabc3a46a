"""The opponents of `bench/privacy/audit.py`: bounds worked out by hand, and breakages that end with their block."""

import math

import numpy as np
import pytest
from scipy import stats

from bench.faults.breakages.privacy import MUTANTS
from bench.privacy.audit_bounds import bound_of_guesses, bound_of_one_run, bound_of_runs, chance, membership
from bench.privacy.audit_opponents import OPPONENTS, broken, directions

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def test_without_delta_guesses_are_as_good_as_randomised_response() -> None:
    """All of r guesses right have the probability (1 / (1 + exp(-epsilon))) ** r, which is 5 % at the bound."""
    assert chance(100, 40, 30, 0.0, 0.0) == pytest.approx(stats.binom.sf(29, 40, 0.5))
    rate = 0.05 ** (1 / 60)
    assert bound_of_guesses(100, 60, 60, 0.0) == pytest.approx(math.log(rate / (1 - rate)), abs=1e-6)
    assert bound_of_guesses(100, 60, 30, 0.0) == 0


def test_delta_adds_to_the_chance_by_the_best_of_all_shifts() -> None:
    """By hand for two guesses, both right: P[W >= 2] = q^2, and alpha = max(P[W = 1], P[W <= 1] / 2)."""
    q = 1 / (1 + math.exp(-1.0))
    alpha = max(2 * q * (1 - q), (2 * q * (1 - q) + (1 - q) ** 2) / 2)
    assert chance(10, 2, 2, 1.0, 1e-3) == pytest.approx(q**2 + 2 * 10 * 1e-3 * alpha)
    assert chance(10, 2, 2, 1.0, 1.0) == 1.0


def test_gaussian_scores_of_known_epsilon_are_bounded_below_it_and_above_nothing() -> None:
    """A shift of 1 in noise of 1 has an epsilon of 4.38 at 1e-5, by Balle and Wang's formula."""
    drawn = np.random.default_rng(1)
    present = drawn.random(4000) < 0.5
    scores = present + drawn.normal(size=4000)
    for bound in (bound_of_one_run(scores, present, 1e-5), bound_of_runs(scores, present, 1e-5)):
        assert 0.8 < bound < 4.38
    assert bound_of_one_run(drawn.normal(size=4000), present, 1e-5) < 0.2
    found = membership(scores, present)
    assert found["area"] == pytest.approx(stats.norm.cdf(2**-0.5), abs=0.04)


def test_opponents_are_for_breakages_that_there_are_once_each() -> None:
    known, tried = {mutant.name for mutant in MUTANTS}, [each for _, names in OPPONENTS.values() for each in names]
    assert set(tried) <= known and len(tried) == len(set(tried)) and len(known) == 23


def test_an_opponent_is_below_the_ledger_and_above_one_that_forgets() -> None:
    assert directions(200, 1).bound < directions(200, 1).ledger
    with broken("executed-steps-are-not-counted"):
        assert directions(200, 1).ledger == 0
