"""Messages for the tests of the wire, and what their receiver expects."""

import hashlib
from dataclasses import replace
from functools import cache

import numpy as np

from fedsync.cipher.encoding.packing import Packing
from fedsync.cipher.encoding.sealed_wire import Expected, Head, Kind, encode
from fedsync.cipher.keys.material import SiloKeys
from fedsync.cipher.suites.suite import FORMS, Member, Words
from tests.cipher.sealers import member

FINGERPRINT, GRID = bytes(range(16)), bytes(range(32))
TAG = (1, 2)
KEYS = SiloKeys("silo0", bytes(range(32)), bytes(range(1, 33)))


def head(
    kind: str = "pad", chunks: int = 2, members: tuple[Member, ...] | None = None, what: Kind = Kind.UPDATE
) -> Head:
    form = FORMS[kind]
    named = members or (member(0, round_=7),)
    return Head(what, form, Packing(16, form.slot_bits), "silo0", 7, 3, 5, FINGERPRINT, GRID, chunks, named)


def expected(of: Head) -> Expected:
    """Exactly this message, signed."""
    update_id = of.members[0].update_id if of.kind is Kind.UPDATE else None
    return Expected(
        of.kind, of.form, of.packing, of.sender, of.round, of.attempt, of.epoch, of.fingerprint, of.grid, of.chunks,
        update_id, KEYS.public.signing,
    )  # fmt: skip


@cache
def message(of: Head) -> bytes:
    return encode(of, _words(of), TAG, KEYS.signing)


def _words(of: Head) -> Words:
    return np.random.default_rng(1).integers(0, 2**30, (of.chunks, of.form.words), dtype=np.uint64)


def as_read(of: Head) -> Head:
    """The head that a receiver has: of an update with the digest of its words, which are not in the header."""
    if of.kind is Kind.AGGREGATE:
        return of
    digest = hashlib.sha256(_words(of).astype("<u8").tobytes()).digest()
    return replace(of, members=(replace(of.members[0], digest=digest),))


def unsigned(of: Expected) -> Expected:
    """The same where only the transport vouches for the sender, so that what is behind the signature is reached."""
    return replace(of, public=None)
