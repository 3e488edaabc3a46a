"""The suite ``ckks``: approximate sums, with the parameters that users of NVFLARE know.

CKKS with N = 8192, a coefficient modulus of 60, 40 and 40 bits and a scale of 2^40. It takes eight times the bytes of
`bfv` and much more time, and is here so that the two can be compared on equal terms: the same wire rules hold, so the
server adds words modulo each prime and no peer's bytes are parsed. A slot carries one value; sums are rounded to whole
numbers, from which the noise is far away.

As in every use of CKKS, what is decrypted must stay among those who have the key: together with the ciphertext it
tells the key (Li and Micciancio 2021, "On the security of homomorphic encryption on approximate numbers").

Source: Cheon et al. 2017 (eprint 2016/421).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tenseal

from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.suites.contexts import opened, secret_of
from fedsync.cipher.suites.seal_format import (
    CiphertextShape,
    FormatError,
    made_prefix,
    seal_bytes,
    vector_head,
    vector_tail,
)
from fedsync.cipher.suites.suite import CKKS, Adder, Form, Member, Words, check_additions
from fedsync.core.errors import ProtocolError

_SCALE = 2.0**40
_SHAPE = CiphertextShape(degree=8192, primes=2, ntt=True, scale=_SCALE, slots=SLOTS)
_VECTOR = tenseal._ts_cpp.CKKSVector
# Slots are 24 bits wide, those of the header 32; more is no sum of slots.
_LARGEST = 2.0**34


def new_context() -> bytes:
    """A fresh context with its secret key: the group's secret."""
    context = tenseal.context(
        tenseal.SCHEME_TYPE.CKKS,
        8192,
        coeff_mod_bit_sizes=[60, 40, 40],
        encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
        n_threads=1,
    )
    context.global_scale = _SCALE
    return secret_of(context)


class Ckks:
    """Seals and opens with the group's context.

    Args:
        context: from `new_context`. The library parses it, so it must come from the administrator, signed.

    Raises:
        ConfigError: it is no such context.
        RunError: the library writes ciphertexts otherwise than this version knows.
    """

    def __init__(self, context: bytes) -> None:
        self._context, (self._head, self._tail) = opened(context, _probe)
        self._adder = Adder(CKKS)

    @property
    def form(self) -> Form:
        """The public numbers of CKKS."""
        return CKKS

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        """One ciphertext a chunk, uint64 [chunks, 32768].

        Args:
            slots: int64 [chunks, 4096], within +-2^24.
            member: not used.
            first: not used.
        """
        words = np.empty((len(slots), CKKS.words), dtype=np.uint64)
        for into, row in zip(words, slots, strict=True):
            into[:] = _words(_VECTOR(self._context, row.astype(np.float64).tolist(), _SCALE))
        return words

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        """Sums of slots, int64 [chunks, 4096]; see `Sealer.open`.

        Raises:
            ProtocolError: words not below their primes, more members than are allowed, or no sum of slots.
        """
        check_additions(members, CKKS.additions, sender)
        # Nothing may come between this and the library.
        self._adder.check(words, sender)
        slots = np.empty((len(words), SLOTS), dtype=np.int64)
        for into, row in zip(slots, words, strict=True):
            data = self._head + row.astype("<u8", copy=False).tobytes() + self._tail
            values = np.array(_VECTOR(self._context, data).decrypt())
            if not (np.abs(values) < _LARGEST).all():
                raise ProtocolError(sender, "range", "what was decrypted is no sum of updates")
            into[:] = np.rint(values)
        return slots


def _probe(context: Any) -> tuple[bytes, bytes]:
    """What stands before and after a vector's words, after a test that words survive."""
    values = [float((-1) ** slot * slot) for slot in range(SLOTS)]
    vector = _VECTOR(context, values, _SCALE)
    sample = vector.serialize()
    parameters = b"".join(word.to_bytes(8, "little") for word in vector.ciphertext()[0].parms_id())
    versions = bytes(seal_bytes(sample, SLOTS)[3:5])
    head = vector_head(sample, made_prefix(parameters, versions, _SHAPE), _SHAPE)
    tail = vector_tail(sample, SLOTS)
    words = _words(vector)
    Adder(CKKS).check(words.reshape(1, -1), "TenSEAL")
    found = _VECTOR(context, head + words.tobytes() + tail).decrypt()
    if not np.allclose(found, values, rtol=0, atol=1e-3):
        raise FormatError("words do not survive taking out and putting back")
    return head, tail


def _words(vector: tenseal.CKKSVector) -> Words:
    """Words of a vector of one ciphertext. What the library serialises is compressed, so they are asked for singly."""
    (ciphertext,) = vector.ciphertext()
    return np.fromiter((ciphertext[index] for index in range(CKKS.words)), dtype=np.uint64, count=CKKS.words)
