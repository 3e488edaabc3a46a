"""Interface of an encryption scheme (*suite*): silos encrypt, and the server adds ciphertexts.

A *slot* is an integer that holds one or several quantised values. A suite encrypts slots to *words*. The sum of words,
modulo the suite's modulus, decrypts to the sum of slots. The server has only the `Form`: public numbers. It checks that
every word is below the modulus and adds with NumPy. The server has no secret, and passes no peer's bytes to native
code. A silo passes peers' words to native code only after the same check, and writes the words' headers itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding.packing import SLOTS, Packing, Slots
from fedsync.common.errors import ConfigError, PolicyError, ProtocolError
from fedsync.model.chunked_arrays import Hash, give_back, spans

Words = NDArray[np.uint64]  # sealed chunks, uint64 [chunks, words of a chunk], little-endian on the wire

NONCE_BYTES = 16  # length of the fresh random number that names every upload

DIGEST_BYTES = 32
NO_DIGEST = bytes(DIGEST_BYTES)

# Chunks that are checked or added together; they fit the cache.
_GROUP = 4


@dataclass(frozen=True, slots=True)
class Form:
    """Public numbers of a suite; all that the server needs. ``modulus``, a prime, is that of a chunk's ``words``.

    Args:
        code: number on the wire; never reuse a number, nor 2, which belonged to a removed suite.
        slot_bits: bits of a slot, sign included, that `Packing` may fill.
        additions: updates that may be summed before decryption could fail; with masks, silos of a run.
    """

    kind: str
    code: int
    slot_bits: int
    modulus: int
    words: int
    additions: int

    @property
    def chunk_bytes(self) -> int:
        return 8 * self.words

    def limit(self, packing: Packing) -> int:
        """Updates that one sum may hold: bounded by the suite's noise and by the lanes."""
        return min(self.additions, packing.additions)


BFV_MODULUS = 1152921504606830593  # q: the largest prime of 60 bits that is 1 modulo 8192

BFV_PLAIN = 281474976694273  # t: the largest prime of 48 bits that is 1 modulo 8192

PAD_MODULUS = 2**64 - 59  # the largest prime below 2^64: the lanes of every `Packing` stay within half of it

BFV = Form("bfv", 1, 48, BFV_MODULUS, 2 * SLOTS, 200)
PAD = Form("pad", 3, 64, PAD_MODULUS, SLOTS, 255)
# What removes the masks of n updates has n^2 shares of up to n seeds, some 33 n^3 bytes. A message between silos has
# `fedsync.cipher.encoding.fields.MAX_BYTES` at most, which is enough for 75 silos, whatever their names.
MASKED = Form("masked", 4, 48, BFV_MODULUS, 2 * SLOTS, 75)

FORMS = {form.kind: form for form in (BFV, PAD, MASKED)}


def form_of(kind: str) -> Form:
    if kind not in FORMS:
        raise ConfigError("cipher.kind", f"there is no suite {kind!r}", f"Choose one of {', '.join(FORMS)}")
    return FORMS[kind]


@dataclass(frozen=True, slots=True)
class Member:
    """Public description of one update in a sum; `ValueError` if a byte string has the wrong length.

    Args:
        update_id: id in the order; ``<silo>/0`` for a calibration.
        round: base version of the update.
        nonce: 16 random bytes, fresh for every upload, also for a repeated upload.
        chain: digest of the history that led the sender to its base, 32 bytes; for a calibration, the run's digest.
        digest: SHA-256 of the update's words; `NO_DIGEST` until the update is sealed.
        annex: digest of the annex that came with the update; `NO_DIGEST` without an annex.
    """

    update_id: str
    round: int
    nonce: bytes
    chain: bytes
    digest: bytes = NO_DIGEST
    annex: bytes = NO_DIGEST

    def __post_init__(self) -> None:
        if len(self.nonce) != NONCE_BYTES:
            raise ValueError(f"a nonce has {NONCE_BYTES} bytes")
        if not len(self.chain) == len(self.digest) == len(self.annex) == DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes")

    @property
    def silo(self) -> str:
        return self.update_id.rpartition("/")[0]


class Sealer(Protocol):
    """Silo's half of a suite, with the group's secret. Chunks can be sealed and opened in any portions."""

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        """Hide chunks, int64 [chunks, 4096], each slot of at most ``form.slot_bits`` bits. The nonce of ``member`` must
        be fresh. ``first`` is the number of the first chunk; the header chunk is 0.
        """

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        """Decrypt sums of slots, int64 [chunks, 4096], from words that `Adder.add` summed; they are checked again.
        `ProtocolError` if words are out of range, or there are more members than can be added.
        """


def check_words(words: Words, form: Form, sender: str, number: int = 0) -> None:
    """Check that words can be sealed chunks, or raise `ProtocolError`; ``number`` of the first is for errors."""
    if words.dtype != np.uint64 or words.ndim != 2 or words.shape[1] != form.words:
        detail = f"{words.dtype} {words.shape}, a chunk has {form.words} words of 64 bits"
        raise ProtocolError(sender, "chunks", detail)
    for first in range(0, len(words), _GROUP):
        if words[first : first + _GROUP].max() >= np.uint64(form.modulus):
            detail = f"chunks {number + first}.. have words that are not below the modulus"
            raise ProtocolError(sender, "words", detail)


def words_fault(words: Words, form: Form, sender: str, hashed: Hash | None = None) -> ProtocolError | None:
    """First error of `check_words` in words that may lie in a file; reads them once, and feeds ``hashed``."""
    found: ProtocolError | None = None
    for start, stop in spans(len(words), form.chunk_bytes):
        span = words[start:stop]
        if hashed is not None:
            hashed.update(np.ascontiguousarray(span, dtype="<u8").data.cast("B"))
        try:
            check_words(span, form, sender, start)
        except ProtocolError as error:
            found = found or error
        give_back(words)
    return found


class Adder:
    """Server's half of every suite: adds without a secret. For one thread at a time."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self._modulus = np.uint64(form.modulus)
        # 2^64 modulo the modulus, where the modulus is so large that two words may overflow 64 bits.
        self._carried = np.uint64(2**64 % form.modulus if form.modulus > 2**63 else 0)
        self._spare = np.empty((_GROUP, form.words), dtype=np.uint64)
        self._carry = np.empty((_GROUP, form.words), dtype=np.bool_)

    def add(self, total: Words, words: Words) -> None:
        """Add ``words`` to ``total`` in place; both must have passed `check_words`. The caller counts the summands."""
        if total.shape != words.shape:
            raise PolicyError(f"words {words.shape} are to be added to {total.shape}")
        for first in range(0, len(total), _GROUP):
            into, more = total[first : first + _GROUP], words[first : first + _GROUP]
            spare, carry = self._spare[: len(into)], self._carry[: len(into)]
            np.add(into, more, out=into)
            if self._carried:
                # Where 2^64 was lost in the overflow, add its residue; the result is at most the modulus.
                np.less(into, more, out=carry)
                np.multiply(carry, self._carried, out=spare)
                np.add(into, spare, out=into)
            # Where the sum is already below the modulus, the subtraction wraps around and the minimum keeps the sum.
            np.subtract(into, self._modulus, out=spare)
            np.minimum(into, spare, out=into)


def check_additions(members: Sequence[Member], limit: int, sender: str) -> None:
    if not 1 <= len(members) <= limit:
        raise ProtocolError(sender, "additions", f"{len(members)} updates in one sum, at most {limit} can be decrypted")
    if len({member.update_id for member in members}) != len(members):
        raise ProtocolError(sender, "members", "an update is in the sum twice")
    if len({member.nonce for member in members}) != len(members):
        raise ProtocolError(sender, "members", "two updates have one nonce")
