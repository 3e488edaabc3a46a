"""Seeds of many orders at once: what `derive_seed` gives one by one, at a sixth of the cost.

NumPy promises that `SeedSequence` and `PCG64` never change, so their arithmetic may stand here as well: the entropy of
all orders is hashed in arrays, and the first output of each generator is worked out without making it.

Source: O'Neill, "PCG", 2014 (XSL-RR 128/64); numpy/random/bit_generator.pyx (SeedSequence).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedsync.core.rng import SEED_RANGE, Stream, derive_seed

Words = NDArray[np.uint32]

_POOL = 4
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = np.uint32(0xCA01F9DD), np.uint32(0x4973F715)
_SHIFT = np.uint32(16)

_64, _128 = (1 << 64) - 1, (1 << 128) - 1
_STEP = 0x2360ED051FC65DA44385DF649FCCF645
# Three steps of the generator from state 0: inc, + seed, twice more. As a polynomial of the seed and inc:
_OF_SEED = _STEP**2 & _128
_OF_INC = (_STEP**2 + _STEP + 1) & _128

_WORTH_IT = 10
"""Fewer seeds than this come faster one by one."""


class _Hash:
    """SeedSequence's hash, whose constant changes with every word."""

    def __init__(self, constant: int, factor: int) -> None:
        self._constant, self._factor = constant, factor

    def __call__(self, word: Words) -> Words:
        """The word, hashed."""
        word = word ^ np.uint32(self._constant)
        self._constant = self._constant * self._factor & 0xFFFFFFFF
        word = word * np.uint32(self._constant)
        return word ^ (word >> _SHIFT)


def derive_seeds(seed: int, stream: Stream, silos: Sequence[str], rounds: Sequence[int]) -> list[int]:
    """``derive_seed(seed, stream, silo, round)`` of each pair; all of the same length, rounds below 2^32."""
    if len(silos) < _WORTH_IT:
        return [derive_seed(seed, stream, silo, round) for silo, round in zip(silos, rounds, strict=True)]
    names = np.fromiter((zlib.crc32(silo.encode()) for silo in silos), np.uint32, len(silos))
    fixed = [seed >> shift & 0xFFFFFFFF for shift in range(0, max(seed.bit_length(), 1), 32)]
    entropy = [np.full(len(silos), word, np.uint32) for word in [*fixed, int(stream)]]
    state = _state([*entropy, names, np.asarray(rounds, np.uint32)])
    seeds = []
    for high, low, inc_high, inc_low in zip(*(words.tolist() for words in state), strict=True):
        inc = (inc_high << 65 | inc_low << 1 | 1) & _128
        now = ((high << 64 | low) * _OF_SEED + inc * _OF_INC) & _128
        turn, word = now >> 122, (now >> 64 ^ now) & _64
        raw = (word >> turn | word << (64 - turn)) & _64
        seeds.append(raw * SEED_RANGE >> 64)
    return seeds


def _state(entropy: Sequence[Words]) -> list[NDArray[np.uint64]]:
    """``SeedSequence(entropy).generate_state(4, uint64)`` for each column of words."""
    hashed = _Hash(_INIT_A, _MULT_A)
    nothing = np.zeros_like(entropy[0])
    pool = [hashed(entropy[i] if i < len(entropy) else nothing) for i in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = _mix(pool[target], hashed(pool[source]))
    for word in entropy[_POOL:]:
        for target in range(_POOL):
            pool[target] = _mix(pool[target], hashed(word))
    hashed = _Hash(_INIT_B, _MULT_B)
    words = [hashed(pool[i % _POOL]).astype(np.uint64) for i in range(2 * _POOL)]
    return [low | high << np.uint64(32) for low, high in zip(words[::2], words[1::2], strict=True)]


def _mix(left: Words, right: Words) -> Words:
    mixed: Words = _MIX_LEFT * left - _MIX_RIGHT * right
    return mixed ^ (mixed >> _SHIFT)


class OrderSeeds:
    """Seeds of the silos' orders, derived ahead in batches. Nothing but a cache: what is asked decides the answer.

    A silo's next order is its last plus one, so whoever took a seed since the last batch is in the next.

    Args:
        seed: of the run.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._ready: dict[str, tuple[int, int]] = {}
        self._taken: dict[str, int] = {}

    def take(self, rounds: Mapping[str, int]) -> list[int]:
        """Seeds of the orders that ``rounds`` names by silo and round."""
        ready = self._ready
        missing = {silo: round for silo, round in rounds.items() if ready.get(silo, (0, 0))[0] != round}
        if missing:
            wanted = self._taken | missing
            seeds = derive_seeds(self._seed, Stream.ORDER, list(wanted), list(wanted.values()))
            ready.update(zip(wanted, zip(wanted.values(), seeds, strict=True), strict=True))
            self._taken = {}
        taken = []
        for silo, round in rounds.items():
            taken.append(ready.pop(silo)[1])
            self._taken[silo] = round + 1
        return taken
