"""Noise on whole updates: clipped and rounded within the norm that it is measured by, exact, without overflow."""

import math

import numpy as np
import pytest
from scipy import stats

from fedsync.cipher.encoding import silo_noise
from fedsync.cipher.encoding.silo_noise import SiloNoise
from fedsync.common.errors import ConfigError
from fedsync.model.layout import Vector

NOISE = SiloNoise(clip=1.0, multiplier=1.0, shares=2)
BITS = 16


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def rounded(values: Vector, noise: SiloNoise = NOISE, bits: int = BITS, factor: float = 1.0) -> np.ndarray:
    """The integers without their noise: the same draws on zeros are subtracted."""
    noisy = noise.integers(values, factor, bits, rng(1), rng(2)).astype(np.int64)
    return noisy - noise.integers(np.zeros_like(values), factor, bits, rng(1), rng(2))


def step(values: int, noise: SiloNoise = NOISE, bits: int = BITS) -> float:
    return math.ldexp(1.0, noise.fit(values, bits).exponent - bits + 1)


@pytest.mark.parametrize(("size", "scale"), [(1, 5.0), (10, 1e3), (5_000, 1e-4), (20_000, 1e6), (20_000, 0.0)])
def test_no_update_is_longer_than_the_noise_is_measured_by(size: int, scale: float) -> None:
    values = (rng().normal(size=size) * scale).astype(np.float32)
    found = rounded(values)
    assert int((found**2).sum()) <= NOISE.fit(size, BITS).longest
    norm = float(np.linalg.norm(values.astype(np.float64)))
    wanted = values * min(1.0, NOISE.clip / norm if norm else 1.0) / step(size)
    assert np.abs(found - wanted).max() <= 1 + 1e-3


def test_a_rounding_that_came_out_too_long_is_cut_towards_zero() -> None:
    class Up(np.random.Generator):
        """Every value is rounded up, which no bound on the norm expects."""

        def random(self, *args: object, **kwargs: object) -> np.ndarray:  # type: ignore[override]
            return np.full(args[0], 0.999)  # type: ignore[call-overload]

    noise, values = SiloNoise(1.6, 0.1, 1), np.full(400, 0.08, np.float32)
    in_steps = 0.08 / step(400, noise, 8)
    assert 400 * math.ceil(in_steps) ** 2 > noise.fit(400, 8).longest
    found = noise.integers(values, 1.0, 8, Up(np.random.PCG64(0)), rng(2))
    found -= noise.integers(values * 0, 1.0, 8, rng(1), rng(2))
    assert (found == math.floor(in_steps)).all()


def test_rounding_has_no_bias() -> None:
    values = np.full(40_000, 3.3e-4, np.float32)
    found = rounded(values).mean() * step(40_000)
    assert found == pytest.approx(3.3e-4, abs=4 * step(40_000) / math.sqrt(12 * 40_000) + 1e-9)


@pytest.mark.parametrize("deviation", [4.0, 11.7])
def test_noise_is_a_discrete_gaussian(deviation: float) -> None:
    """Chi-square against the weights exp(-k^2 / 2 s^2), over all k that are expected ten times or more."""
    count = 400_000
    drawn = silo_noise._discrete_gaussian(silo_noise._thresholds(deviation), count, silo_noise._words(rng(3)))
    numbers = np.arange(-200, 201)
    weights = np.exp(-(numbers**2) / (2 * deviation**2))
    expected = count * weights / weights.sum()
    usual = expected >= 10
    seen = np.array([(drawn == number).sum() for number in numbers[usual]])
    fair = expected[usual] * seen.sum() / expected[usual].sum()
    assert stats.chisquare(seen, fair).pvalue > 1e-4


def test_a_word_on_a_threshold_is_decided_by_the_next_word() -> None:
    high, low = silo_noise._thresholds(4.0)
    place = len(high) // 2
    for rest, wanted in ((0, 0), (2**64 - 1, 1)):
        words = iter([np.array([high[place]]), np.array([rest], np.uint64)])
        found = silo_noise._discrete_gaussian((high, low), 1, lambda count, words=words: next(words))
        assert found[0] == wanted


def test_shares_add_up_to_the_noise_that_was_asked_for() -> None:
    noise = SiloNoise(clip=2.0, multiplier=1.5, shares=4)
    zeros = np.zeros(50_000, np.float32)
    total = sum(noise.integers(zeros, 1.0, BITS, rng(), rng(seed)).astype(np.int64) for seed in range(4))
    longest = math.sqrt(noise.fit(zeros.size, BITS).longest)
    assert np.std(total) == pytest.approx(1.5 * longest, rel=0.02)
    assert longest * step(zeros.size, noise) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("bits", "size"), [(16, 14), (16, 1_000_000), (12, 5_000), (8, 10)])
def test_nothing_overflows(bits: int, size: int) -> None:
    found = NOISE.integers(np.full(size, 1e9, np.float32), 1.0, bits, rng(), rng(1))
    assert np.abs(found).max() <= (1 << (bits - 1)) - 1


def test_bits_that_are_too_few_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 bits are too few for noise 1 on 10000 values"):
        NOISE.fit(10_000, 8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        NOISE.integers(np.array([value], np.float32), 1.0, BITS, rng(), None)


def test_real_noise_is_no_silo_s_and_no_seed_s() -> None:
    """With the same seed of rounding, two updates differ only by noise of the operating system."""
    zeros = np.zeros(100, np.float32)
    assert (NOISE.integers(zeros, 1.0, BITS, rng(), None) != NOISE.integers(zeros, 1.0, BITS, rng(), None)).any()
    same = [NOISE.integers(zeros, 1.0, BITS, rng(), rng(5)) for _ in range(2)]
    assert (same[0] == same[1]).all()
