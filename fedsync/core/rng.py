"""Seeds. Nothing in FedSync draws from a global generator."""

from __future__ import annotations

import zlib
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """One number for each independent use of randomness; never reuse or renumber."""

    ORDER = 1
    SAMPLER = 2
    JITTER = 3
    PARTITION = 4
    SPLIT = 5
    MODEL = 6


def generator(seed: int, stream: Stream, silo: str = "", round: int = 0) -> np.random.Generator:
    """An independent generator for (run seed, use, silo, round)."""
    return np.random.default_rng([seed, int(stream), zlib.crc32(silo.encode()), round])


def derive_seed(seed: int, stream: Stream, silo: str = "", round: int = 0) -> int:
    """A 63-bit seed for libraries that want a number, from the same coordinates."""
    return int(generator(seed, stream, silo, round).integers(0, 2**63 - 1))
