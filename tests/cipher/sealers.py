"""What the tests of sealing share: keys, suites and small updates. Suites are made once, for contexts take a while."""

import hashlib
from functools import cache

import numpy as np

from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.keys.material import GroupKey
from fedsync.cipher.suites import open_suite
from fedsync.cipher.suites.bfv import new_context
from fedsync.cipher.suites.suite import FORMS, NO_DIGEST, Adder, Member, Sealer, Words, check_words

KINDS = tuple(FORMS)


@cache
def group(kind: str = "bfv") -> GroupKey:
    """A group key with the context that the suite needs."""
    return GroupKey(1, b"none" if kind == "pad" else new_context(), bytes(range(32)), {}, bytes(32))


@cache
def sealer(kind: str = "bfv") -> Sealer:
    return open_suite(kind, group(kind))


def member(index: int, round_: int = 0) -> Member:
    """Update number ``index``; nonces of different updates differ."""
    return Member(f"silo{index}/1", round_, index.to_bytes(16, "little"), hashlib.sha256(b"chain").digest())


def member_of(silo: str, base: int) -> Member:
    """An update that started from version ``base``."""
    return Member(f"{silo}/1", base, bytes(16), NO_DIGEST)


def slots_of(chunks: int, bits: int, seed: int = 0) -> Slots:
    """Random slots of so many bits, sign included."""
    return np.random.default_rng(seed).integers(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1), (chunks, SLOTS))


def summed(kind: str, words: list[Words]) -> Words:
    """What the server makes of words."""
    adder = Adder(FORMS[kind])
    total = words[0].copy()
    for one in words[1:]:
        check_words(one, adder.form, "silo")
        adder.add(total, one)
    return total
