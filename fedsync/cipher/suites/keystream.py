"""Long pseudo-random words from a short key: AES-256 in counter mode, as fast as memory with AES instructions."""

from __future__ import annotations

import sys

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

_BLOCK = 16
_ZEROS = bytes(1 << 16)


class Keystream:
    """Words that look uniform to whoever does not have the key, and are the same for all who have it.

    Args:
        key: 32 bytes. One key, one use: the counter starts at a fixed value.
        start: words to pass over, an even number.
    """

    def __init__(self, key: bytes, start: int = 0) -> None:
        counter = (start * 8 // _BLOCK).to_bytes(_BLOCK, "big")
        self._cipher = Cipher(algorithms.AES256(key), modes.CTR(counter)).encryptor()

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next ``count`` words, uint64 [count]."""
        words = np.empty(count, dtype=np.uint64)
        data = words.data.cast("B")
        for first in range(0, len(data), len(_ZEROS)):
            part = data[first : first + len(_ZEROS)]
            self._cipher.update_into(_ZEROS[: len(part)], part)
        return words if sys.byteorder == "little" else words.byteswap()
