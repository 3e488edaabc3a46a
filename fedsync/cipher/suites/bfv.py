"""Suite ``bfv``: exact sums under a secret key that the silos share.

BFV with N = 4096, a coefficient modulus of 60 and 16 bits, a plain modulus t of 48 bits, symmetric encryption and no
evaluation keys. 76 bits are far below the 109 bits that the HomomorphicEncryption.org standard allows for 128-bit
security at this degree. Each chunk is one ciphertext of 2 x 4096 words below q.

The noise of a sum grows with the number of summands. Past the limit, decryption fails silently and totally, so the code
bounds the number.

Source: Fan and Vercauteren 2012 (eprint 2012/144); Microsoft SEAL; TenSEAL.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tenseal

from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.suites.seal_format import (
    PREFIX_BYTES,
    CompressedError,
    FormatError,
    checked_prefix,
    copy_words,
    seal_bytes,
    unpacked,
    vector_head,
)
from fedsync.cipher.suites.suite import BFV, BFV_PLAIN, Adder, Form, Member, Words, check_additions
from fedsync.common.errors import ConfigError, RunError

_VECTOR = tenseal._ts_cpp.BFVVector
_ATTEMPTS = 8


def new_context() -> bytes:
    """Create a context with its secret key and nothing else, 43 KB: the group's secret."""
    context = tenseal.context(
        tenseal.SCHEME_TYPE.BFV,
        SLOTS,
        BFV_PLAIN,
        coeff_mod_bit_sizes=[60, 16],
        encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
        n_threads=1,
    )
    secret: bytes = context.serialize(
        save_public_key=False, save_secret_key=True, save_galois_keys=False, save_relin_keys=False
    )
    return secret


class Bfv:
    """Sealer with the group's BFV context.

    Args:
        context: context of `new_context`. The library parses it, so it must come from the administrator, signed.
        form: `BFV`, or `MASKED` where the slots are already masked.

    Raises:
        ConfigError: ``context`` is no such context.
        RunError: the library writes ciphertexts in a format that this version does not know.
    """

    def __init__(self, context: bytes, form: Form = BFV) -> None:
        self._context, self._head = _opened(context)
        self._form = form
        self._adder = Adder(form)

    @property
    def form(self) -> Form:
        return self._form

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        """Encrypt one ciphertext a chunk, uint64 [chunks, 8192], with fresh randomness from the library.

        ``slots`` are int64 [chunks, 4096], within +-2^47; the other arguments are not used.
        """
        words = np.empty((len(slots), BFV.words), dtype=np.uint64)
        for into, row in zip(words, slots, strict=True):
            self._encrypt(row.tolist(), into)
        return words if sys.byteorder == "little" else words.byteswap()

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        check_additions(members, BFV.additions, sender)
        # This check must directly precede the library call.
        self._adder.check(words, sender)
        slots = np.empty((len(words), SLOTS), dtype=np.int64)
        for into, row in zip(slots, words, strict=True):
            into[:] = _VECTOR(self._context, self._head + row.astype("<u8", copy=False).tobytes()).decrypt()
        return slots

    def _encrypt(self, values: list[int], into: Words) -> None:
        for _ in range(_ATTEMPTS):
            try:
                pieces = unpacked(seal_bytes(_VECTOR(self._context, values).serialize()))
            except CompressedError:
                continue
            return copy_words(pieces, into.data.cast("B"))
        raise RunError("TenSEAL compressed a ciphertext again and again: its words are not random")


def _opened(secret: bytes) -> tuple[Any, bytes]:
    """Load the library's context and the constant head of its vectors; errors as in `Bfv`."""
    try:
        # One thread: the library's thread pool would not survive a fork.
        loaded = tenseal.context_from(secret, n_threads=1)
        if not loaded.is_private() or loaded.has_galois_keys():
            raise ValueError("a context with the secret key and no others is needed")
        return loaded.data, _probe(loaded.data)
    except FormatError as error:
        raise RunError(f"TenSEAL {tenseal.__version__} writes ciphertexts in an unknown way: {error}") from None
    except (ValueError, RuntimeError, TypeError) as error:
        raise ConfigError(
            "group secret", f"no context of this suite: {error}", "Ask the administrator for a new one"
        ) from None


def _probe(context: Any) -> bytes:
    """Constant head of a vector, after a test that words survive extraction and reinsertion."""
    values = [(-1) ** slot * (slot << 34) for slot in range(SLOTS)]
    sample = _VECTOR(context, values).serialize()
    body = b"".join(unpacked(seal_bytes(sample)))
    head = vector_head(sample, checked_prefix(body))
    words = np.frombuffer(body, dtype="<u8", offset=PREFIX_BYTES).reshape(1, -1)
    if int(words.max()) >= BFV.modulus:
        raise FormatError("words are not below the modulus")
    if list(_VECTOR(context, head + words.tobytes()).decrypt()) != values:
        raise FormatError("words do not survive taking out and putting back")
    return head
