"""Seeds. Nothing in FedSync draws from a global generator."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable
from enum import IntEnum
from hashlib import blake2b

import numpy as np

SEED_RANGE = 2**63 - 1
"""Derived seeds lie below."""


class Stream(IntEnum):
    """One number for each independent use of randomness; never reuse or renumber."""

    ORDER = 1
    SAMPLER = 2
    JITTER = 3
    PARTITION = 4
    SPLIT = 5
    MODEL = 6
    SAMPLE = 7
    CONTENTION = 8
    CRASHES = 9


def generator(seed: int, stream: Stream, silo: str = "", round: int = 0) -> np.random.Generator:
    """An independent generator for (run seed, use, silo, round)."""
    return np.random.default_rng([seed, int(stream), zlib.crc32(silo.encode()), round])


def derive_seed(seed: int, stream: Stream, silo: str = "", round: int = 0) -> int:
    """A 63-bit seed for libraries that want a number, from the same coordinates."""
    # As ``integers(0, SEED_RANGE)`` draws it, but for a rejection once in 2^63 draws.
    return int(generator(seed, stream, silo, round).bit_generator.random_raw()) * SEED_RANGE >> 64


def draw(names: Iterable[str], size: int, seed: int, stream: Stream, silo: str = "", round: int = 0) -> tuple[str, ...]:
    """``size`` of ``names``, or all if there are fewer, uniformly without replacement.

    Each name has a number of its own from (coordinates, name), and the lowest win. So the order of the
    names does not matter, and when a name comes or goes, the draw changes by that name at most.
    """
    key = derive_seed(seed, stream, silo, round).to_bytes(8)
    return tuple(heapq.nsmallest(size, names, lambda name: blake2b(name.encode(), digest_size=8, key=key).digest()))
