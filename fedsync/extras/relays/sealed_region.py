"""Adder of encrypted updates at a relay: like the server, it adds silos' updates and has no key.

Updates may be in one sum if they have the same quantisation, base version, history, and attempt (number of the try at
this sum). With masks, they also need the same context and roster. Other updates form separate sums, and spoil no other
sum. The server decides which sums count, as it does for single updates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.fields import clear_values
from fedsync.cipher.keys.keywrap import ServerKeys
from fedsync.cipher.masking.annex import Annex
from fedsync.cipher.masking.masked_work import most_comparable
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.server.chain import total
from fedsync.cipher.server.inbox import work_of
from fedsync.cipher.server.sealed_aggregator import upload_bytes
from fedsync.cipher.suites.suite import Adder
from fedsync.common.errors import ProtocolError
from fedsync.extras.relays import sealed_sum
from fedsync.extras.relays.region_sums import RegionSum
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload


@dataclass(frozen=True, slots=True, eq=False)
class _Single:
    """Update that waits for its sum."""

    message: Payload
    envelope: wire.Envelope
    clear: Vector
    share: float

    @property
    def beside(self) -> tuple[object, ...]:
        """Properties that all updates in one sum share."""
        head = self.envelope.head
        names = None
        if head.annex:
            annex = Annex.unpack(head.annex, head.sender, head.sender)
            names = annex.context, frozenset(annex.pairs.keys() | {head.sender})
        return head.round, head.attempt, head.grid, head.members[0].chain, names


class SealedRegion:
    """`fedsync.extras.relays.region_sums.RegionAdder` without a key.

    ``folder`` holds waiting updates, and its content is removed; None keeps them in memory.
    """

    def __init__(self, plan: EncryptionPlan, keys: ServerKeys, folder: Path | None = None) -> None:
        self._plan = plan
        self._keys = keys
        self._adder = Adder(plan.form)
        self._files = ArrayKeeper(folder)
        self._kept: dict[str, _Single] = {}

    @property
    def upload_bytes(self) -> int:
        return upload_bytes(self._plan)

    def put(self, silo: str, update_id: str, base: int, share: float, update: Payload) -> None:
        plan, keys, cut = self._plan, self._keys, len(update) - 4 * self._plan.clear_values
        if update.dtype != np.uint8 or update.ndim != 1 or cut < 0:
            raise ProtocolError(silo, "update", f"{update.dtype} {update.shape} instead of bytes")
        public = keys.senders.get(silo)
        if public is None:
            raise ProtocolError(silo, "sender", "the administrator issued no key to a silo of this name")
        # Only the server knows the attempt, and checks it.
        expected = wire.Expected(
            wire.Kind.UPDATE, plan.form, plan.packing, silo, base, None, keys.epoch, keys.fingerprint,
            None, plan.chunks, update_id, public,
        )  # fmt: skip
        update = self._files.keep(update)
        envelope = wire.decode(update[:cut].data, expected)
        clear = clear_values(update[cut:], plan.clear_values, silo)
        nonce = envelope.head.members[0].nonce
        if any(one.envelope.head.members[0].nonce == nonce for one in self._kept.values()):
            raise ProtocolError(silo, "nonce", "that of another update: silos would not decrypt a sum of both")
        kept = _Single(update, envelope, clear, share)
        _ = kept.beside  # raises if the annex is invalid
        self._kept[update_id] = kept

    def discard(self, update_id: str) -> None:
        self._kept.pop(update_id, None)

    def sums(self, update_ids: Collection[str]) -> list[RegionSum]:
        together: dict[tuple[object, ...], dict[str, _Single]] = {}
        for update_id in sorted(update_ids):
            kept = self._kept.pop(update_id)
            together.setdefault(kept.beside, {})[update_id] = kept
        return [self._sum(part) for updates in together.values() for part in self._parts(updates)]

    def _parts(self, updates: dict[str, _Single]) -> list[dict[str, _Single]]:
        """Updates of one sum each. With masks, an update of much more or less work than most travels alone."""
        if not self._plan.masked:
            return [updates]
        works = {update_id: [work_of(kept.envelope.head)] for update_id, kept in updates.items()}
        alike = most_comparable(works, self._plan.work_ratio)
        others = [{update_id: kept} for update_id, kept in updates.items() if update_id not in alike]
        return [{update_id: updates[update_id] for update_id in updates if update_id in alike}, *others]

    def _sum(self, updates: dict[str, _Single]) -> RegionSum:
        if len(updates) == 1:
            ((update_id, alone),) = updates.items()
            return RegionSum((update_id,), alone.message)
        envelopes = [kept.envelope for kept in updates.values()]
        whole = sum(kept.share for kept in updates.values())
        clear = np.zeros(self._plan.clear_values, dtype=np.float32)
        for kept in updates.values():
            clear += np.float32(kept.share / whole) * kept.clear
        words, _ = total(envelopes, self._adder, self._plan.limit)
        parts = list(sealed_sum.parts(envelopes, (), clear))
        nbytes = sum(map(len, parts)) + envelopes[0].words.nbytes
        return RegionSum(tuple(updates), self._files.write(nbytes, sealed_sum.parts(envelopes, words, clear)))
