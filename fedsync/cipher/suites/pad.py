"""The suite ``pad``: a one-time pad modulo 2^64.

Each chunk is the slots plus a keystream of the group's key and the upload's nonce; a sum opens by subtracting the
keystreams of all its members. It is the fastest suite with the shortest words, under the same trust as `bfv`: silos
share a key, the server has none. Opening takes time in proportion to the number of members.

A nonce must never be used twice: the difference of two uploads under one is the difference of two updates.

Source: Castelluccia, Mykletun and Tsudik 2005, "Efficient aggregation of encrypted data in wireless sensor networks".
"""

from __future__ import annotations

import hmac
import sys
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.suites.suite import PAD, Adder, Form, Member, Words, check_additions

_BLOCK = 16
_ZEROS = bytes(1 << 16)


class Keystream:
    """Words that look uniform to whoever does not have the key, and are the same for all who have it.

    AES-256 in counter mode: as fast as memory with AES instructions.

    Args:
        key: 32 bytes. One key, one use: the counter starts at a fixed value.
        start: words to pass over, an even number.
    """

    def __init__(self, key: bytes, start: int = 0) -> None:
        counter = (start * 8 // _BLOCK).to_bytes(_BLOCK, "big")
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()

    def words(self, count: int) -> Words:
        """The next ``count`` words, uint64 [count]."""
        words = np.empty(count, dtype=np.uint64)
        data = words.data.cast("B")
        for first in range(0, len(data), len(_ZEROS)):
            part = data[first : first + len(_ZEROS)]
            self._cipher.update_into(_ZEROS[: len(part)], part)
        return words if sys.byteorder == "little" else words.byteswap()


class Pad:
    """Seals and opens with a key of the group.

    Args:
        key: 32 bytes that the silos share and the server does not have, used for nothing else.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._adder = Adder(PAD)

    @property
    def form(self) -> Form:
        return PAD

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        stream = self._stream(member, first)
        words = stream.words(slots.size).reshape(slots.shape)
        return np.add(words, slots.view(np.uint64), out=words)

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        check_additions(members, PAD.additions, sender)
        self._adder.check(words, sender)
        sums = words.copy()
        # A chunk at a time stays in the cache, whatever the number of members.
        streams = [self._stream(member, first) for member in members]
        for chunk in sums:
            for stream in streams:
                np.subtract(chunk, stream.words(SLOTS), out=chunk)
        return sums.view(np.int64)

    def _stream(self, member: Member, first: int) -> Keystream:
        """The keystream of one upload from one chunk on."""
        name = member.round.to_bytes(8, "little") + member.update_id.encode()
        key = hmac.digest(self._key, b"fedsync pad 1\0" + member.nonce + name, "sha256")
        return Keystream(key, first * SLOTS)
