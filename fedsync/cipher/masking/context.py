"""The digest that masks are bound to: of all that decides what an update is.

What the server says of the run is in R (`fedsync.silo.run_text`). What it says in an order is here: every field of
the order, but for those that differ between silos of one round by design.

| field | is not bound, for |
|---|---|
| update_id, seed, round | each silo has its own; `round` is a number for people, and training code is not told it |
| base_version | D of that version is bound |
| batch_size, max_steps | balancers choose them; the work that was done is bounded (`fedsync.cipher.masking.masked_work`) |
| budget_s | likewise; whether there is a budget is bound |
| behind | it is a name; whether there is one is bound |
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
    """The digest that masks are bound to, 32 bytes.

    Args:
        run: the run's digest.
        order: of the update.
        chain: digest of all that led to the version that it starts from, 32 bytes.
        attempt: of the round from this version.
        roster: who takes part.
    """
    names = [field.name for field in dataclasses.fields(order) if field.name not in OWN]
    # A float's repr is exact.
    said = {name: repr(getattr(order, name)).encode() for name in names}
    said |= {"budget": str(order.budget_s is None).encode(), "behind": str(order.behind == "").encode()}
    bound = [b"fedsync mask context 2", run, chain, attempt.to_bytes(8, "little"), roster.digest, pack_named(said)]
    return hashlib.sha256(pack(bound)).digest()
