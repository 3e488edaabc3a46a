"""What a suite is: sealing at the silos, adding at the server.

A suite turns slots into *words* that hide them, so that the sum of words, taken modulo the suite's modulus, opens to
the sum of slots. The server has the `Form` only: numbers that everybody may know. It checks that every word is below
its modulus and adds with NumPy; it has no secret, and no peer's bytes reach native code there. At a silo they reach
it only as words that passed the same check, behind headers that the silo itself wrote.
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

Words = NDArray[np.uint64]
"""Sealed chunks, uint64 [chunks, words of a chunk], little-endian on the wire."""

NONCE_BYTES = 16
"""A fresh random number of this length names every upload."""

DIGEST_BYTES = 32
NO_DIGEST = bytes(DIGEST_BYTES)
"""Stands where there is nothing to digest, or not yet."""

# Chunks that are checked or added together: they fit the cache.
_GROUP = 4


@dataclass(frozen=True, slots=True)
class Form:
    """The public numbers of a suite; all that the server needs.

    Args:
        kind: name in configuration files.
        code: number on the wire; never reuse one, nor 2, which a suite had that is gone.
        slot_bits: bits of a slot, sign included, that `Packing` may fill.
        modulus: of a chunk's words, a prime.
        words: of a chunk.
        additions: updates that may be summed before decryption could fail.
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


BFV_MODULUS = 1152921504606830593
"""q: the largest prime of 60 bits that is 1 modulo 8192."""

BFV_PLAIN = 281474976694273
"""t: the largest prime of 48 bits that is 1 modulo 8192."""

PAD_MODULUS = 2**64 - 59
"""The largest prime below 2^64: the lanes of every `Packing` stay within half of it."""

BFV = Form("bfv", 1, 48, BFV_MODULUS, 2 * SLOTS, 200)
PAD = Form("pad", 3, 64, PAD_MODULUS, SLOTS, 255)
MASKED = Form("masked", 4, 48, BFV_MODULUS, 2 * SLOTS, 200)

FORMS = {form.kind: form for form in (BFV, PAD, MASKED)}
"""Every suite by its name."""


def form_of(kind: str) -> Form:
    """The form of a suite by its name in configuration files.

    Raises:
        ConfigError: there is none of that name.
    """
    if kind not in FORMS:
        raise ConfigError("cipher.kind", f"there is no suite {kind!r}", f"Choose one of {', '.join(FORMS)}")
    return FORMS[kind]


@dataclass(frozen=True, slots=True)
class Member:
    """One update in a sum, as far as everybody may know it.

    Args:
        update_id: as in the order; ``<silo>/0`` of a calibration.
        round: base version of the update.
        nonce: 16 random bytes, fresh for every upload, a repeated one included.
        chain: digest of all that led the sender to its base, 32 bytes; of a calibration: the run's digest.
        digest: SHA-256 of its words; `NO_DIGEST` until it is sealed.
        annex: digest of the annex that it was sent with; `NO_DIGEST` if there was none.

    Raises:
        ValueError: one of the bytes has another length.
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
        """Whose update it is."""
        return self.update_id.rpartition("/")[0]


class Sealer(Protocol):
    """The silo's half of a suite: it has the group's secret. Chunks can be sealed and opened in any portions."""

    @property
    def form(self) -> Form: ...

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        """Hide chunks.

        Args:
            slots: int64 [chunks, 4096], each of at most ``form.slot_bits`` bits.
            member: the update they belong to; its nonce must be fresh.
            first: number of the first of the chunks within the update; the header chunk is 0.
        """

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        """Sums of slots, int64 [chunks, 4096].

        Args:
            words: uint64 [chunks, words of a chunk], summed by `Adder.add`; they are checked here again.
            members: every update in the sum.
            first: number of the first of the chunks.
            sender: who sent them, for errors.

        Raises:
            ProtocolError: words out of range, or more members than can be added.
        """


class Adder:
    """The server's half of every suite: checks and adds, without a secret. For one thread at a time.

    Args:
        form: of the suite.
    """

    def __init__(self, form: Form) -> None:
        self.form = form
        self._modulus = np.uint64(form.modulus)
        # What 2^64 is modulo a modulus so large that two words may add up to more.
        self._carried = np.uint64(2**64 % form.modulus if form.modulus > 2**63 else 0)
        self._spare = np.empty((_GROUP, form.words), dtype=np.uint64)
        self._carry = np.empty((_GROUP, form.words), dtype=np.bool_)

    def check(self, words: Words, sender: str, number: int = 0) -> None:
        """Check that these can be sealed chunks.

        Args:
            words: of some chunks.
            sender: who sent them, for errors.
            number: of the first of them in its message, likewise.

        Raises:
            ProtocolError: a wrong type or shape, or a word that is not below its modulus.
        """
        if words.dtype != np.uint64 or words.ndim != 2 or words.shape[1] != self.form.words:
            raise ProtocolError(
                sender, "chunks", f"{words.dtype} {words.shape}, a chunk has {self.form.words} words of 64 bits"
            )
        for first in range(0, len(words), _GROUP):
            if words[first : first + _GROUP].max() >= self._modulus:
                raise ProtocolError(
                    sender, "words", f"chunks {number + first}.. have words that are not below the modulus"
                )

    def fault(self, words: Words, sender: str, hashed: Hash | None = None) -> ProtocolError | None:
        """What `check` has against words that may lie in a file: all of them are read once, and hashed on the way.

        Args:
            words: of some chunks.
            sender: as for `check`.
            hashed: takes their bytes.
        """
        found: ProtocolError | None = None
        for start, stop in spans(len(words), self.form.chunk_bytes):
            span = words[start:stop]
            if hashed is not None:
                hashed.update(np.ascontiguousarray(span, dtype="<u8").data.cast("B"))
            try:
                self.check(span, sender, start)
            except ProtocolError as error:
                found = found or error
            give_back(words)
        return found

    def add(self, total: Words, words: Words) -> None:
        """Add ``words`` to ``total`` in place; both must have passed `check`.

        How many updates are in a sum the words do not tell: the caller counts, see `check_additions`.
        """
        if total.shape != words.shape:
            raise PolicyError(f"words {words.shape} are to be added to {total.shape}")
        for first in range(0, len(total), _GROUP):
            into, more = total[first : first + _GROUP], words[first : first + _GROUP]
            spare, carry = self._spare[: len(into)], self._carry[: len(into)]
            np.add(into, more, out=into)
            if self._carried:
                # Where 2^64 was lost, what it stands for comes back; that makes no more than the modulus.
                np.less(into, more, out=carry)
                np.multiply(carry, self._carried, out=spare)
                np.add(into, spare, out=into)
            # Where the sum is below the modulus already, subtracting wraps round and the minimum keeps it.
            np.subtract(into, self._modulus, out=spare)
            np.minimum(into, spare, out=into)


def check_additions(members: Sequence[Member], limit: int, sender: str) -> None:
    """Check that a sum holds some updates, none of them twice, and no more than can be added.

    Args:
        members: every update in the sum.
        limit: `Form.limit`.
        sender: who sent the sum, for errors.

    Raises:
        ProtocolError: it does not.
    """
    if not 1 <= len(members) <= limit:
        raise ProtocolError(sender, "additions", f"{len(members)} updates in one sum, at most {limit} open")
    if len({member.update_id for member in members}) != len(members):
        raise ProtocolError(sender, "members", "an update is in the sum twice")
    if len({member.nonce for member in members}) != len(members):
        raise ProtocolError(sender, "members", "two updates have one nonce")
