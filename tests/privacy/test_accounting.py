"""Epsilon of a schedule: what the libraries of others find for the same releases, and noise for a given epsilon."""

import random
from collections import Counter
from math import inf

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from fedsync.privacy import accounting
from fedsync.privacy.accounting import PrivacyPlan, epsilon, fits, noise_for, shown
from fedsync.privacy.release import PrivateSettings, Release

DELTA = 1e-5


def schedule(seed: int) -> list[tuple[Release, int]]:
    """Phases of a run: rates, noise and steps change with the batch sizes that a server chooses."""
    drawn = random.Random(seed)
    return [
        (Release(drawn.choice([0.01, 0.04, 0.1, 0.3, 1.0]), drawn.uniform(1.5, 6.0)), drawn.randint(1, 60))
        for _ in range(drawn.randint(1, 3))
    ]


def by_hand(phases: list[tuple[Release, int]], kind: str) -> float:
    accountant = PLDAccountant() if kind == "pld" else RdpAccountant()
    for release, times in phases:
        event = dp_event.PoissonSampledDpEvent(release.rate, dp_event.GaussianDpEvent(release.noise))
        accountant.compose(event, times)
    return float(accountant.get_epsilon(DELTA))


def counted(phases: list[tuple[Release, int]]) -> Counter[Release]:
    found: Counter[Release] = Counter()
    for release, times in phases:
        found[release] += times
    return found


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 20))])
@pytest.mark.slow
def test_a_changing_schedule_costs_what_dp_accounting_finds_by_hand(seed: int) -> None:
    phases = schedule(seed)
    found = epsilon(counted(phases), DELTA)
    assert found == pytest.approx(by_hand(phases, "pld"), abs=1e-6)
    # The grid of orders is our own, and so a bound that is not the library's; both are above the exact figure.
    assert min(epsilon(counted(phases), DELTA, "rdp"), by_hand(phases, "rdp")) >= found


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "noise", "steps"), [(0.02, 1.5, 200), (0.1, 3.0, 50), (0.5, 6.0, 20)])
def test_constant_rates_cost_what_opacus_finds(rate: float, noise: float, steps: int) -> None:
    """Opacus' PRV accountant bounds its own error: ours lies within it. Its RDP orders give ours within a twentieth."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    error = 0.01
    others = PRVAccountant(), RDPAccountant()
    for accountant in others:
        accountant.history = [(noise, rate, steps)]
    prv = others[0].get_epsilon(DELTA, eps_error=error)  # the upper end of its interval
    releases = {Release(rate, noise): steps}
    ours = epsilon(releases, DELTA)
    assert prv - 2 * error <= ours <= prv + error
    bound = others[1].get_epsilon(DELTA)
    assert epsilon(releases, DELTA, "rdp") == pytest.approx(bound, rel=0.05)
    assert bound >= ours


def test_a_full_batch_costs_what_the_gaussian_mechanism_costs() -> None:
    """Balle and Wang 2018 (arXiv:1805.06530), equation 6: delta of the Gaussian mechanism at an epsilon."""
    from scipy.stats import norm

    noise, times = 4.0, 9
    found, single = epsilon({Release(1.0, noise): times}, DELTA), noise / times**0.5
    delta = norm.cdf(0.5 / single - found * single) - np.exp(found) * norm.cdf(-0.5 / single - found * single)
    assert delta == pytest.approx(DELTA, rel=1e-2)


@pytest.mark.parametrize("kind", ["pld", "rdp"])
def test_the_order_of_releases_does_not_matter(kind: str) -> None:
    phases = [(Release(0.1, 2.0), 10), (Release(1.0, 5.0), 3), (Release(0.02, 1.5), 40)]
    found = {epsilon(counted(each), DELTA, kind) for each in (phases, phases[::-1], [*phases[1:], phases[0]])}  # type: ignore[arg-type]
    assert len(found) == 1


def test_nothing_costs_nothing_and_no_noise_everything() -> None:
    assert epsilon({}, DELTA) == epsilon({Release(0.1, 1.0): 0}, DELTA) == 0
    assert epsilon({Release(0.1, 0.0): 1}, DELTA) == inf
    assert (shown(inf), shown(1.0), shown(1.00001)) == ("infinite", "1.000", "1.001")


def test_a_budget_holds_at_its_edge_by_the_exact_figure_and_by_the_bound() -> None:
    releases = {Release(0.1, 2.0): 30}
    exact, bound = epsilon(releases, DELTA), epsilon(releases, DELTA, "rdp")
    assert exact < bound
    assert fits(releases, exact, DELTA) and not fits(releases, exact * 0.999, DELTA)
    assert fits(releases, bound, DELTA, "rdp") and not fits(releases, bound * 0.999, DELTA, "rdp")
    assert fits(releases, bound * 0.999, DELTA)


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "batch", "scores"), [(3, 40, None), (5, 20, 20.0)])
def test_the_noise_of_a_plan_costs_the_target_and_hardly_less(rounds: int, batch: int, scores: float | None) -> None:
    plan, settings = PrivacyPlan(rounds, 4, batch, scores, 2), PrivateSettings(1.0, None, 400)
    noise = plan.noise(settings, 1.0, DELTA, 0.1)

    def cost(noise: float) -> float:
        return epsilon(plan.releases(PrivateSettings(1.0, noise, 400)), DELTA)

    assert cost(noise) <= 1.0 < cost(0.995 * noise)


def test_weights_by_precision_of_a_large_model_keep_their_ratio() -> None:
    """Noise on a million values leaves a weight of less than one row in a thousand."""
    silos = [PrivateSettings(1.0, noise, units) for noise, units in ((1.0, 200), (2.0, 400), (4.0, 800))]
    weights = [each.precision(64, 10**6) for each in silos]
    assert [weights[0] / each for each in weights] == pytest.approx([1, 2, 4], rel=0.02)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.3, 6.0])
def test_noise_is_found_in_few_compositions_however_steep(power: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A composition takes seconds. With epsilon 8 it falls with the power 3.3, and the bound is a quarter above it."""
    composed = list[float]()

    def found(releases: dict[Release, int], delta: float, kind: str) -> float:
        (noise,) = (release.noise for release in releases)
        composed.extend([noise] if kind == "pld" else [])
        return 8.0 * (0.8 / noise) ** power * (1.25 if kind == "rdp" else 1.0)

    monkeypatch.setattr(accounting, "epsilon", found)
    noise = noise_for(8.0, DELTA, lambda noise: {Release(0.2, noise): 1})
    assert 0.99 <= (0.8 / noise) ** power <= 1 and len(composed) <= 6


def test_noise_is_at_least_what_the_owner_demands() -> None:
    assert noise_for(50.0, DELTA, lambda noise: {Release(0.01, noise): 1}, least=3.0) == 3.0


def test_a_plan_counts_each_step_and_each_evaluation() -> None:
    """Ten rounds of three steps; the models of ten rounds are scored, and others at the end; two steps come before."""
    settings = PrivateSettings(1.0, 2.0, 40)
    assert PrivacyPlan(10, 3, 8, 5.0, 2, 2).releases(settings) == {Release(0.2, 2.0): 32, Release(1.0, 5.0): 12}
    assert PrivacyPlan(10, 3, 80).releases(settings) == {Release(1.0, 2.0): 30}


def test_of_many_rates_a_few_are_composed_that_cost_at_least_as_much() -> None:
    """Each composition takes a fifth of a second, and a balancer chose another batch size for each order."""
    many = tuple((Release(float(rate), 1.1), 2) for rate in np.linspace(0.01, 0.05, 150))
    few = accounting._fewer(many)
    assert len(few) <= 32 and sum(times for _, times in few) == 300
    highest = sorted(release.rate for release, times in few for _ in range(times // 2))
    assert all(rate <= high <= 1.15 * rate for rate, high in zip(np.linspace(0.01, 0.05, 150), highest, strict=True))
    assert accounting._fewer(many[:32]) == many[:32], "few rates stay exact"
