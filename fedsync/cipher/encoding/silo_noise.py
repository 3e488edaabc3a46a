"""Noise for silo-level differential privacy: each silo adds a share of the noise before it encrypts its update.

The sum of all shares hides each silo's update. Colluding silos can subtract only their own shares. A sum has at least m
silos, of which k may collude. z is the noise multiplier. C, D and deviations are in quantisation steps.

| step | quantity |
|---|---|
| clip | the update's norm is at most C |
| round | to d integers, stochastically; if their norm exceeds D, towards zero; D^2 = C^2 + d/4 + 3.72 (C + sqrt(d)/2) |
| noise | each value gets discrete Gaussian noise of deviation z D / sqrt(m - k): any m - k shares have deviation z D |
| range | the exponent is the smallest for which C + 13 deviations fit a value, so no lane overflows |

Sources: Canonne, Kamath and Steinke 2020 (arXiv:2004.00010, discrete Gaussian, multivariate Renyi bound as for the
continuous one); Kairouz, Liu and Steinke 2021 (arXiv:2102.06387, Proposition 4: bound of the rounded norm; Theorem 1:
sums of shares, whose distance from a discrete Gaussian is below 10 m exp(-pi^2 s^2) for shares of deviation s).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding.packing import MAX_EXPONENT, MIN_EXPONENT, Integers
from fedsync.common.errors import ConfigError
from fedsync.model.chunked_arrays import spans
from fedsync.model.layout import Vector

Words = NDArray[np.uint64]

_TAIL = 13  # deviations at which the noise ends: a value lies beyond with a probability of 2^-126

_LEAST_SHARE = 4.0  # steps: sums of shares with at least this deviation differ from a discrete Gaussian by below 1e-67

_DEVIATIONS = math.sqrt(2 * math.log(1000))  # the norm of rounded values exceeds its bound with probability <= 1/1000

_BITS, _GUARD = 128, 72
_HALF = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class NoiseFit:
    """Integer grid of updates: ``exponent`` of all tensors; deviation of a share and largest squared norm, in steps."""

    exponent: int
    share: float
    longest: int


@dataclass(frozen=True, slots=True)
class SiloNoise:
    """Clipping and noise of whole updates.

    Args:
        clip: largest norm of an update; under FedNova, of the update divided by its progress.
        multiplier: z: deviation of the noise in a sum, divided by the largest norm of one update.
        shares: m - k, the number of shares that together have this deviation.
    """

    clip: float
    multiplier: float
    shares: int

    def fit(self, values: int, bits: int) -> NoiseFit:
        """Return the finest grid on which clipped values and noise stay in range; `ConfigError` if there is none."""
        peak = (1 << (bits - 1)) - 1
        for exponent in range(MIN_EXPONENT, MAX_EXPONENT + 1):
            norm = self.clip / math.ldexp(1.0, exponent - bits + 1)
            longest = norm**2 + values / 4 + _DEVIATIONS * (norm + math.sqrt(values) / 2)
            share = self.multiplier * math.sqrt(longest / self.shares)
            if norm + 1 + math.ceil(_TAIL * share) <= peak:
                if share < _LEAST_SHARE:
                    break
                return NoiseFit(exponent, share, math.floor(longest))
        problem = f"{bits} bits are too few for noise {self.multiplier:g} on {values} values clipped to {self.clip:g}"
        raise ConfigError("cipher.bits", problem, "Write bits: 16, a smaller model, or another noise_multiplier")

    def integers(
        self, values: Vector, factor: float, bits: int, rounding: np.random.Generator, noise: np.random.Generator | None
    ) -> Integers:
        """Clip, round and add one share of noise: int32 [d] within the range of ``bits``.

        ``values`` is the update, float32 [d]; ``factor`` multiplies it before clipping. ``noise`` is the source of the
        noise; None, as at every real silo, takes noise from the operating system. `ValueError` if a value or factor is
        not finite.
        """
        fit = self.fit(values.size, bits)
        norm = math.sqrt(sum(float(np.sum(np.square(values[a:b], dtype=np.float64))) for a, b in _spans(values)))
        norm *= abs(factor)
        if not math.isfinite(norm):
            raise ValueError("the update has values that are not finite")
        scale = factor * min(1.0, self.clip / norm if norm else 1.0) / math.ldexp(1.0, fit.exponent - bits + 1)
        result = _rounded(values, scale, lambda scaled: np.floor(scaled + rounding.random(scaled.size)))
        if sum(int(np.sum(np.square(result[a:b], dtype=np.int64))) for a, b in _spans(values)) > fit.longest:
            result = _rounded(values, scale, np.trunc)
        thresholds = _thresholds(fit.share)
        for a, b in _spans(values):
            result[a:b] += _discrete_gaussian(thresholds, b - a, _words(noise))
        return result


def _spans(values: Vector) -> Iterator[tuple[int, int]]:
    return spans(values.size, 8)


def _rounded(values: Vector, scale: float, rounded: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Integers:
    result = np.empty(values.size, np.int32)
    for a, b in _spans(values):
        result[a:b] = rounded(values[a:b] * np.float64(scale))
    return result


def _words(rng: np.random.Generator | None) -> Callable[[int], Words]:
    if rng is None:
        return lambda count: np.frombuffer(os.urandom(8 * count), np.uint64)
    return lambda count: rng.integers(0, _HALF, count, dtype=np.uint64, endpoint=True)


def _discrete_gaussian(thresholds: tuple[Words, Words], count: int, words: Callable[[int], Words]) -> Integers:
    """Draw by inversion with 128 uniform bits: int32 [count]."""
    high, low = thresholds
    drawn = words(count)
    place = np.searchsorted(high, drawn, side="right")
    for index in np.flatnonzero((place > 0) & (high[place - 1] == drawn)):  # the upper 64 bits do not decide
        rest = words(1)[0]
        while place[index] and high[place[index] - 1] == drawn[index] and rest < low[place[index] - 1]:
            place[index] -= 1
    return (place - len(high) // 2).astype(np.int32)


@lru_cache(maxsize=4)
def _thresholds(deviation: float) -> tuple[Words, Words]:
    """Return P(X <= k) in units of 2^-128 for k from -13 deviations on, as upper and lower words.

    Two multiplications turn one value of exp(-k^2 / (2 s^2)) into the next, with 72 bits to spare.
    """
    point, most = _BITS + _GUARD, math.ceil(_TAIL * deviation)
    with localcontext(prec=80):
        square = Decimal(deviation) ** 2
        ratio, falling = (int((-one / square).exp() * 2**point) for one in (Decimal("0.5"), Decimal(1)))
    weights = [1 << point]
    for _ in range(most):
        weights.append(weights[-1] * ratio >> point)
        ratio = ratio * falling >> point
    both = weights[:0:-1] + weights
    whole = sum(both)
    below = [(one << _BITS) // whole for one in accumulate(both[:-1])]
    return np.array([one >> 64 for one in below], np.uint64), np.array([one & _HALF for one in below], np.uint64)
