"""Rounding of numbers to integers of a few bits in fixed-point arithmetic: fast, and exact except for the rounding."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def fraction_bits(bits: int) -> int:
    """Number of fractional bits in an int32 next to an integer of ``bits`` bits, sign included."""
    return 32 - bits


def round_fixed(
    scaled: NDArray[np.float32], bits: int, rng: np.random.Generator | None
) -> tuple[NDArray[np.int32], int]:
    """Round fixed-point numbers to integers within +-(2^(bits - 1) - 1); raises ValueError for infinity or NaN.

    Args:
        scaled: numbers times 2^`fraction_bits`, float32 [n]; overwritten.
        bits: width of an integer, 8 to 16.
        rng: source of stochastic rounding: up with probability equal to the lost fraction, so the mean is unbiased.
            None rounds to the nearest.

    Returns:
        Integers, int32 [n], and the number of clipped values.
    """
    fraction = fraction_bits(bits)
    limit = np.float32(((1 << (bits - 1)) - 1) << fraction)
    # The array may be empty: the header of a sealed model with very many tensors can fill its whole chunk.
    low, high = scaled.min(initial=0), scaled.max(initial=0)
    clipped = 0
    # NaN fails every comparison, so this test finds NaN too.
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
    kind = np.uint16 if fraction == 16 else np.uint32
    words = rng.integers(0, 2**64 - 1, -(-count * kind().itemsize // 8), dtype=np.uint64, endpoint=True)
    draws = words.view(kind)[:count]
    if kind is np.uint32:
        np.right_shift(draws, 32 - fraction, out=draws)
    return draws
