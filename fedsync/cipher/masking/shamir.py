"""Shares of a secret: any ``threshold`` shares reconstruct it, fewer disclose nothing.

The secret is the value at 0 of a polynomial modulo a prime above 2^256. The other coefficients are drawn anew and
uniform. The share of holder x is the value at x. Through fewer points than ``threshold`` there is exactly one
polynomial for each secret, so every secret is as likely as before. This holds against any computer.

A changed share gives another secret, and this module cannot detect it: the caller of `join` must know a commitment.

Source: Shamir 1979, "How to share a secret".
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping

SECRET_BYTES = 32
PRIME = 2**256 + 297
"""The smallest prime above 2^256: every secret of 32 bytes is below it."""

SHARE_BYTES = 33


def split(
    secret: bytes, threshold: int, holders: Iterable[int], draw: Callable[[int], int] = secrets.randbelow
) -> dict[int, bytes]:
    """Split a secret of 32 bytes into shares by holder, 33 bytes each.

    Args:
        threshold: number of shares that reconstruct the secret, at least 1.
        holders: numbers from 1 on.
        draw: returns a uniform number below its argument.

    Raises:
        ValueError: a value is out of range.
    """
    numbers = list(holders)
    if len(secret) != SECRET_BYTES or threshold < 1 or not all(0 < number < PRIME for number in numbers):
        raise ValueError(f"a secret of {SECRET_BYTES} bytes, a threshold and holders from 1 on are needed")
    coefficients = [int.from_bytes(secret, "little"), *(draw(PRIME) for _ in range(threshold - 1))]
    return {number: _value(coefficients, number).to_bytes(SHARE_BYTES, "little") for number in numbers}


def join(shares: Mapping[int, bytes]) -> bytes:
    """Reconstruct the secret, 32 bytes, from ``threshold`` shares by holder; `ValueError` if they do not fit."""
    values = {holder: int.from_bytes(share, "little") for holder, share in shares.items()}
    secret = 0
    for holder, value in values.items():
        above, below = 1, 1
        for other in values:
            if other != holder:
                above, below = above * other % PRIME, below * (other - holder) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    if not shares or secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError(f"{len(shares)} shares that belong to no secret")
    return secret.to_bytes(SECRET_BYTES, "little")


def _value(coefficients: list[int], at: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * at + coefficient) % PRIME
    return value
