"""Digest of everything that defines an update; masks are bound to it.

The server's statements about the run are in R (`fedsync.silo.run_text`). Its statements in an order are here: every
field of the order, except fields that differ by design between silos of one round.

| field | reason why it is not bound |
|---|---|
| update_id, seed, round | each silo has its own; `round` is a number for people, and training code does not get it |
| base_version | D of that version is bound |
| batch_size, max_steps | balancers choose them; the work done is bounded (`fedsync.cipher.masking.masked_work`) |
| budget_s | likewise; whether there is a budget is bound |
| behind | it is a name; whether there is a name is bound |
"""

from __future__ import annotations

import dataclasses
import hashlib

from fedsync.cipher.masking.frames import pack, pack_named
from fedsync.cipher.masking.mask_roster import MaskRoster
from fedsync.core.orders import WorkOrder

OWN = {"update_id", "seed", "round", "base_version", "batch_size", "max_steps", "budget_s", "behind"}
"""Fields of an order that are not bound as they are."""


def mask_context(run: bytes, order: WorkOrder, chain: bytes, attempt: int, roster: MaskRoster) -> bytes:
    """Compute the digest that masks are bound to, 32 bytes.

    Args:
        run: the run's digest.
        chain: digest of the history that led to the order's base version, 32 bytes.
        attempt: attempt of the round from this version.
    """
    names = [field.name for field in dataclasses.fields(order) if field.name not in OWN]
    # A float's repr is exact.
    said = {name: repr(getattr(order, name)).encode() for name in names}
    said |= {"budget": str(order.budget_s is None).encode(), "behind": str(order.behind == "").encode()}
    bound = [b"fedsync mask context 2", run, chain, attempt.to_bytes(8, "little"), roster.digest, pack_named(said)]
    return hashlib.sha256(pack(bound)).digest()
