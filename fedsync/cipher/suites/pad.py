"""Encryption scheme (suite) ``pad``: a one-time pad modulo the prime m = 2^64 - 59.

A chunk is encrypted by adding a keystream to its slots; the keystream is derived from the group's key and the upload's
nonce. A sum is decrypted by subtracting the keystreams of all its updates, so decryption takes longer for more updates.
Sums have tags as in `bfv`. This suite is the fastest, and its uploads are the smallest. As in `bfv`, silos share a key
and the server has none. A nonce must never be used twice: the difference of two uploads under one nonce is the
difference of two updates.

Source: Castelluccia, Mykletun and Tsudik 2005, "Efficient aggregation of encrypted data in wireless sensor networks".
"""

from __future__ import annotations

import hmac
import sys
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.suites.suite import PAD, PAD_MODULUS, Adder, Member, Words, check_additions, check_words

_BLOCK = 16
# 2^64 minus the modulus.
_BEYOND = 2**64 - PAD_MODULUS
_ZEROS = bytes(1 << 16)


class Keystream:
    """Pseudorandom words, by AES-256 in counter mode: uniform to anyone without the key, the same for all who have it.
    Each key, of 32 bytes, has one use only: the counter starts at a fixed value. ``start`` is an even number of words
    to skip.
    """

    def __init__(self, key: bytes, start: int = 0) -> None:
        counter = (start * 8 // _BLOCK).to_bytes(_BLOCK, "big")
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()

    def words(self, count: int) -> Words:
        words = np.empty(count, dtype=np.uint64)
        data = words.data.cast("B")
        for first in range(0, len(data), len(_ZEROS)):
            part = data[first : first + len(_ZEROS)]
            self._cipher.update_into(_ZEROS[: len(part)], part)
        return words if sys.byteorder == "little" else words.byteswap()


class Numbers:
    """Chunks of numbers that look uniform below a modulus, slightly below a power of 256, to anyone without the key.
    ``first`` is the number of the first chunk; ``key`` is as for `Keystream`.
    """

    def __init__(self, key: bytes, modulus: int, first: int) -> None:
        self._key, self._modulus, self._next = key, modulus, first
        self._bits = np.uint64((1 << modulus.bit_length()) - 1)
        self._stream = Keystream(key, first * SLOTS)

    def chunk(self) -> Words:
        numbers = self._stream.words(SLOTS)
        if self._modulus.bit_length() < 64:
            np.bitwise_and(numbers, self._bits, out=numbers)
        if numbers.max() >= np.uint64(self._modulus):
            redraw(numbers, self._modulus, self._key, self._next)
        self._next += 1
        return numbers


def redraw(numbers: Words, modulus: int, key: bytes, chunk: int) -> None:
    """Replace numbers at or above the modulus, about 1 of 2^34, in place by other numbers of the same key."""
    for slot in np.flatnonzero(numbers >= np.uint64(modulus)).tolist():
        number, attempt = modulus, 0
        while number >= modulus:
            text = b"again" + b"".join(each.to_bytes(8, "little") for each in (chunk, slot, attempt))
            number = int.from_bytes(hmac.digest(key, text, "sha256")[: modulus.bit_length() // 8], "little")
            attempt += 1
        numbers[slot] = number


class Pad:
    """Sealer of the suite ``pad``; the silos share the key, the server does not have it, and it has no other use."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._adder = Adder(PAD)

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        stream = self._stream(member, first)
        words = np.empty(slots.shape, dtype=np.uint64)
        for into, chunk in zip(words, slots, strict=True):
            # A negative slot is represented by itself plus the modulus.
            np.subtract(chunk, (chunk >> 63) & _BEYOND, out=into.view(np.int64))
            self._adder.add(into[None], stream.chunk()[None])
        return words

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        check_additions(members, PAD.additions, sender)
        check_words(words, PAD, sender)
        sums = words.copy()
        # One chunk at a time stays in the cache for any number of members.
        streams = [self._stream(member, first) for member in members]
        for chunk in sums:
            borrowed = np.zeros(SLOTS, dtype=np.uint8)
            for stream in streams:
                numbers = stream.chunk()
                np.add(borrowed, chunk < numbers, out=borrowed)
                np.subtract(chunk, numbers, out=chunk)
            _settle(chunk, borrowed)
        return sums.view(np.int64)

    def _stream(self, member: Member, first: int) -> Numbers:
        name = member.round.to_bytes(8, "little") + member.update_id.encode()
        key = hmac.digest(self._key, b"fedsync pad 2\0" + member.nonce + member.chain + name, "sha256")
        return Numbers(key, PAD_MODULUS, first)


def _settle(chunk: Words, borrowed: NDArray[np.uint8]) -> None:
    """Convert differences that wrapped around ``borrowed`` times to slots, as int64 bits. Each wrap added 2^64, which
    is `_BEYOND` more than the modulus. A value above half of the modulus is a negative slot, in 64 bits `_BEYOND`
    higher.
    """
    excess = borrowed.astype(np.uint64) * np.uint64(_BEYOND)
    short = chunk < excess
    np.subtract(chunk, excess, out=chunk)
    np.subtract(chunk, np.uint64(_BEYOND), out=chunk, where=short)
    np.add(chunk, np.uint64(_BEYOND), out=chunk, where=chunk > np.uint64(PAD_MODULUS // 2))
