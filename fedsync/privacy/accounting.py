"""Accounting of the privacy loss (epsilon, delta) of a sequence of noisy releases, by the library dp-accounting.

The privacy loss distributions (PLD) of all releases are composed, which is exact up to the library's grid (1e-4,
rounded up). The bound by Renyi differential privacy (RDP) takes a hundredth of the time. It is an upper bound too, so
most orders are admitted by it alone, without a composition. Neighbours are data sets that differ by one added unit.

Sources: Koskela et al. 2020 (arXiv:1906.03049) and Doroshenko et al. 2022 (arXiv:2207.04380) for PLD; Mironov et al.
2019 (arXiv:1908.10530) for RDP of the sampled Gaussian.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, inf, log
from typing import Any, Literal

from fedsync.common.errors import ConfigError
from fedsync.privacy.release import PrivateSettings, Release

AccountantKind = Literal["pld", "rdp"]

LEAST_NOISE = 0.1  # smallest noise multiplier that may be used: one release with it costs an epsilon above 50

MOST_NOISE = 10_000.0

_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512)
_NEAR = 0.01

_MOST_RATES = 32
"""Number of different releases that are composed without rounding their rates; each can take a second."""


def epsilon(releases: Mapping[Release, int], delta: float, kind: AccountantKind = "pld") -> float:
    """Return epsilon of ``releases``, each with its number of times; `ConfigError` if dp-accounting is not installed.
    ``pld`` composes exactly. ``rdp`` is an upper bound; at one of its orders it also holds where each release is chosen
    by the results of those before (Feldman and Zrnic 2021, arXiv:2008.11193).
    """
    counted = tuple(sorted((release, times) for release, times in releases.items() if times))
    if not counted:
        return 0.0
    if any(release.noise <= 0 for release, _ in counted):
        return inf
    return _rdp_epsilon(counted, delta) if kind == "rdp" else _pld_epsilon(_fewer(counted), delta)


def _fewer(counted: tuple[tuple[Release, int], ...]) -> tuple[tuple[Release, int], ...]:
    """Return releases of fewer rates that cost as much or more, if there are over `_MOST_RATES` releases. Rates are
    rounded up, by 1 % or the next step that is enough: batch sizes that follow speeds give each order another rate.
    """
    step, found = _NEAR, counted
    while len(found) > _MOST_RATES and step < 1:
        rounded = Counter[Release]()
        for release, times in counted:
            rate = min((1 + step) ** ceil(log(release.rate) / log(1 + step) - 1e-9), 1.0)
            rounded[replace(release, rate=max(rate, release.rate))] += times
        step, found = 1.4 * step, tuple(sorted(rounded.items()))
    return found


def fits(releases: Mapping[Release, int], most: float, delta: float, kind: AccountantKind = "pld") -> bool:
    """Return whether ``releases`` cost an epsilon of at most ``most``; arguments and errors as for `epsilon`. The exact
    figure is not computed if the bound by RDP is at most ``most``, or far above it.
    """
    rough = epsilon(releases, delta, "rdp")
    return rough <= most or (kind == "pld" and rough <= 2 * most + 1 and epsilon(releases, delta) <= most)


def noise_for(
    most: float,
    delta: float,
    planned: Callable[[float], Mapping[Release, int]],
    least: float = LEAST_NOISE,
    kind: AccountantKind = "pld",
    guess: float | None = None,
) -> float:
    """Return a noise multiplier with which a plan costs an epsilon of at most ``most``, and at least 99 % of it.

    ``planned`` returns the plan's releases by noise multiplier; more noise never costs more. ``least`` is a lower bound
    of the result. A ``guess`` near the result saves time. `ValueError` if no noise is enough, because the plan has
    other releases.
    """
    if epsilon(planned(MOST_NOISE), delta, kind) > most:
        raise ValueError(f"no noise is enough for the plan to have epsilon {most:g}")
    noise = max(_by_bound(most, delta, planned, least) if guess is None else guess, least)
    low, high, power, last = 0.0, inf, 1.0, (0.0, 0.0)
    while True:
        found = max(epsilon(planned(noise), delta, kind) / most, _NEAR)
        low, high = (low, noise) if found <= 1 else (noise, high)
        if found <= 1 and (found > 1 - _NEAR or noise == least):
            return noise
        if high / max(low, least) < 1 + _NEAR / 8:  # other releases of the plan take nearly all
            return high
        # Epsilon falls about as a power of the noise: first as the inverse, then as between the last two noises.
        if last[0] and max(found, last[1]) < inf:
            power = max(log(last[1] / found) / log(noise / last[0]), 0.1)
        following = max(noise * ((found / (1 - _NEAR / 2)) ** (1 / power) if found < inf else 2.0), least)
        last = noise, found
        noise = following if low < following < high else (low * high) ** 0.5 if high < inf else 2 * low


def _by_bound(most: float, delta: float, planned: Callable[[float], Mapping[Release, int]], least: float) -> float:
    """Return a noise multiplier with which the bound by RDP is about ``most``, which is cheap to find."""
    low = high = least
    while epsilon(planned(high), delta, "rdp") > most and high < MOST_NOISE:
        low, high = high, 1.5 * high
    for _ in range(6):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if epsilon(planned(middle), delta, "rdp") <= most else (middle, high)
    return high


def shown(value: float) -> str:
    """Return an epsilon for people, rounded upwards to three digits."""
    return "infinite" if value == inf else f"{ceil(value * 1000 - 1e-9) / 1000:.3f}"


@lru_cache(maxsize=4096)  # a run in virtual time composes again what its plan has composed
def _pld_epsilon(counted: tuple[tuple[Release, int], ...], delta: float) -> float:
    distributions = [
        _gaussian(release.noise / times**0.5, 1.0)
        if release.rate >= 1
        else _gaussian(release.noise, release.rate).self_compose(times)
        for release, times in counted
    ]
    total = distributions[0]
    for one in distributions[1:]:
        total = total.compose(one)
    return float(total.get_epsilon_for_delta(delta))


def _rdp_epsilon(counted: tuple[tuple[Release, int], ...], delta: float) -> float:
    from dp_accounting.rdp import compute_epsilon

    total = [0.0] * len(_ORDERS)
    for release, times in counted:
        total = [before + times * one for before, one in zip(total, _renyi(release), strict=True)]
    return float(compute_epsilon(_ORDERS, total, delta)[0])


@lru_cache(maxsize=64)
def _gaussian(noise: float, rate: float) -> Any:
    pld, _ = _libraries()
    return pld.from_gaussian_mechanism(noise, sampling_prob=rate)


@lru_cache(maxsize=4096)
def _renyi(release: Release) -> tuple[float, ...]:
    from dp_accounting import dp_event

    _, rdp = _libraries()
    accountant, gaussian = rdp(_ORDERS), dp_event.GaussianDpEvent(release.noise)
    accountant.compose(gaussian if release.rate >= 1 else dp_event.PoissonSampledDpEvent(release.rate, gaussian))
    return tuple(float(one) for one in accountant.rdp)


def _libraries() -> tuple[Any, Any]:
    try:
        from dp_accounting.pld import privacy_loss_distribution
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        problem = "a privacy budget needs the package dp-accounting, which is not installed"
        raise ConfigError("privacy", problem, "Run pip install 'fedsync[privacy]'") from error
    return privacy_loss_distribution, RdpAccountant


@dataclass(frozen=True, slots=True)
class PrivacyPlan:
    """Orders of a whole run, as the strategy asks for them.

    Args:
        rounds: number of orders, with ``steps`` local steps each.
        batch_size: samples of a step, on average.
        score_noise: noise multiplier of an evaluation; None where no score is sent.
        scores: number of evaluations besides those of the orders.
        estimate: number of further steps, from which the scale of updates is estimated.
    """

    rounds: int
    steps: int
    batch_size: int
    score_noise: float | None = None
    scores: int = 0
    estimate: int = 0

    def releases(self, settings: PrivateSettings) -> Counter[Release]:
        planned = Counter({settings.release(self.batch_size): self.rounds * self.steps + self.estimate})
        if self.score_noise is not None:
            planned[Release(1.0, self.score_noise)] += self.rounds + self.scores
        return planned

    def noise(
        self,
        settings: PrivateSettings,
        target: float,
        delta: float,
        least: float,
        kind: AccountantKind = "pld",
        *,
        spent: Counter[Release] | None = None,
        guess: float | None = None,
    ) -> float:
        """Return the noise multiplier with which the run, after ``spent``, costs ``target``; see `noise_for`."""

        def planned(noise: float) -> Counter[Release]:
            return (spent or Counter()) + self.releases(replace(settings, noise=noise))

        return noise_for(target, delta, planned, least, kind, guess)
