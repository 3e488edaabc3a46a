"""Numbers to whole ones of a few bits, in fixed point: fast, and exact but for what is rounded."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def fraction_bits(bits: int) -> int:
    """Fractional bits that an int32 leaves beside a whole number of so many bits, sign included."""
    return 32 - bits


def round_fixed(
    scaled: NDArray[np.float32], bits: int, rng: np.random.Generator | None
) -> tuple[NDArray[np.int32], int]:
    """Round fixed-point numbers to whole ones within +-(2^(bits - 1) - 1).

    Args:
        scaled: numbers times 2^`fraction_bits`, float32 [n]; overwritten.
        bits: of a whole number, 8 to 16.
        rng: what stochastic rounding draws from: up with the probability of the fraction that is lost, so the mean is
            right. None rounds to the nearest.

    Returns:
        Whole numbers, int32 [n], and how many lay beyond the range and were clipped.

    Raises:
        ValueError: a number is not finite.
    """
    fraction = fraction_bits(bits)
    limit = np.float32(((1 << (bits - 1)) - 1) << fraction)
    # There may be none: the header of a sealed model of very many tensors leaves no room in its chunk.
    low, high = scaled.min(initial=0), scaled.max(initial=0)
    clipped = 0
    # NaN fails every comparison, so this finds it too.
    if not (low >= -limit and high <= limit):
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("the update has values that are not finite, or far beyond any range")
        clipped = int(np.count_nonzero(np.abs(scaled) > limit))
        np.clip(scaled, -limit, limit, out=scaled)
    np.rint(scaled, out=scaled)
    integers = scaled.astype(np.int32)
    # At the limit the largest draw still fits: peak * 2^fraction + 2^fraction - 1 = 2^31 - 1.
    if rng is None:
        np.add(integers, 1 << (fraction - 1), out=integers)
    else:
        np.add(integers, _draws(integers.size, fraction, rng), out=integers, casting="unsafe")
    np.right_shift(integers, fraction, out=integers)
    return integers, clipped


def _draws(count: int, fraction: int, rng: np.random.Generator) -> NDArray[np.generic]:
    """Uniform numbers below 2^fraction."""
    kind = np.uint16 if fraction == 16 else np.uint32
    words = rng.integers(0, 2**64 - 1, -(-count * kind().itemsize // 8), dtype=np.uint64, endpoint=True)
    draws = words.view(kind)[:count]
    if kind is np.uint32:
        np.right_shift(draws, 32 - fraction, out=draws)
    return draws
