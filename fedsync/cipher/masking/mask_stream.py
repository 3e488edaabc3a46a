"""Expansion of seeds to masks, added to slots or subtracted, modulo the suite's t."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import numpy as np

from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.suites.pad import Numbers
from fedsync.cipher.suites.suite import BFV_PLAIN


def masked(slots: Slots, masks: Sequence[tuple[bytes, bool]], first: int) -> Slots:
    """Add (True) or subtract (False) the masks of seeds, modulo t and centred."""
    streams = [(_stream(seed, first), added) for seed, added in masks]
    half, plain = BFV_PLAIN // 2, np.int64(BFV_PLAIN)
    out = np.empty_like(slots)
    # One chunk at a time stays in the cache for any number of masks.
    for into, chunk in zip(out, slots, strict=True):
        total = np.remainder(chunk, plain).view(np.uint64)
        for stream, added in streams:
            words = stream.chunk()
            # Fewer than 2^16 numbers below 2^48: no overflow.
            np.add(total, words if added else np.uint64(BFV_PLAIN) - words, out=total)
        np.remainder(total, np.uint64(BFV_PLAIN), out=total)
        np.copyto(into, total.view(np.int64))
        np.subtract(into, plain, out=into, where=into > half)
    return out


def _stream(seed: bytes, first: int) -> Numbers:
    return Numbers(hmac.digest(seed, b"fedsync mask 1\0slots", "sha256"), BFV_PLAIN, first)
