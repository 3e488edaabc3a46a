"""Seeds and generators of random numbers. FedSync never draws from a global generator."""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Iterable
from enum import IntEnum, unique
from hashlib import blake2b

import numpy as np


@unique
class Stream(IntEnum):
    """Number of each independent use of randomness; never reuse or renumber."""

    ORDER = 1
    SAMPLER = 2
    JITTER = 3
    PARTITION = 4
    SPLIT = 5
    MODEL = 6
    SAMPLE = 7
    CONTENTION = 8
    CRASHES = 9
    DATA = 10
    ROUNDING = 11
    ROUND = 12
    EVALUATION = 13
    VALIDATION = 14
    FETCHING = 15
    SILO_NOISE = 16
    TWIN = 20


def generator(seed: int, stream: Stream, silo: str = "", round: int = 0) -> np.random.Generator:
    """Return an independent generator for (run seed, use, silo, round)."""
    return np.random.default_rng([seed, int(stream), zlib.crc32(silo.encode()), round])


def derive_seed(seed: int, stream: Stream, silo: str = "", round: int = 0) -> int:
    """Return a 63-bit seed from the same coordinates; a hash, because a generator takes 20 us to set up."""
    coordinates = f"{seed}/{int(stream)}/{round}/{silo}".encode()
    return int.from_bytes(blake2b(coordinates, digest_size=8).digest()) >> 1


def part_of(silos: int, share: float, least: int) -> int:
    # 0.7 x 10 is 6.999999999999999 or so: rounding down must not make it 6.
    return min(max(math.floor(share * silos + 1e-9), least), silos)


def draw(names: Iterable[str], size: int, seed: int, stream: Stream, round: int = 0) -> tuple[str, ...]:
    """Draw ``size`` of ``names`` (all if there are fewer), uniformly without replacement.

    Each name's number depends only on the coordinates and the name; the lowest numbers win. So the order of names is
    irrelevant, and a joining or leaving name changes at most one place in the draw.
    """
    key = derive_seed(seed, stream, round=round).to_bytes(8)
    return tuple(heapq.nsmallest(size, names, lambda name: blake2b(name.encode(), digest_size=8, key=key).digest()))
