"""Store of encrypted updates at the server until their commit. It makes every check that needs no key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import WINDOW
from fedsync.cipher.encoding.fields import clear_values
from fedsync.cipher.keys.keywrap import ServerKeys
from fedsync.cipher.masking.annex import Annex
from fedsync.cipher.masking.masked_work import WorkDone, most_comparable
from fedsync.cipher.masking.unmask import Attempts
from fedsync.cipher.plan import EncryptionPlan
from fedsync.common import foreign
from fedsync.common.errors import ProtocolError
from fedsync.common.names import told
from fedsync.core.state import Names, fill, named
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Vector
from fedsync.model.running_statistics import Ranges
from fedsync.model.transfer import Payload

logger = foreign.logger(__name__)

_NAMES: Names = {"ordered": "_ordered", "spoiled": "_spoiled", "left_out": "_left_out"}  # checkpoint, besides updates

Masks = tuple[bytes, frozenset[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Sealed update that waits for its commit, or a region's sum.

    Args:
        envelope: sealed part; for a region's sum, the aggregate that names all members.
        clear: values in the clear; for a region's sum, the members' mean.
        scale: number of the grid on which its silos had to seal.
        singles: slips of the members for a region's sum; else the envelope itself.
        masks: context and roster of the masks: updates with equal values may be added up; None without masks.
    """

    message: Payload
    envelope: wire.Envelope
    clear: Vector
    scale: int
    singles: tuple[wire.Envelope, ...]
    update_ids: tuple[str, ...]
    masks: Masks | None = None


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Start of an order: version, number of the grid, attempt."""

    base: int
    scale: int
    attempt: int


class Inbox:
    """Checks and store of ordered updates."""

    def __init__(self, plan: EncryptionPlan, keys: ServerKeys, files: ArrayKeeper) -> None:
        self._plan, self._keys, self._files = plan, keys, files
        self._attempts = Attempts()
        self._ordered: dict[str, _Ordered] = {}
        self._pending: dict[str, Update] = {}
        self._spoiled: set[str] = set()
        self._left_out: dict[str, Counter[str]] = {}  # updates that did not count: by reason, by silo

    def begin(self, update_id: str, version: int, scale: int) -> None:
        silo = update_id.rpartition("/")[0]
        attempt = self._attempts.begin(silo, version) if self._plan.masked else 0
        self._ordered[update_id] = _Ordered(version, scale, attempt)

    def attempt(self, silo: str, version: int) -> int:
        return self._attempts.of(silo, version) if self._plan.masked else 0

    def put(self, silo: str, update_id: str, update: Payload) -> None:
        """Keep a sealed update after every check that needs no key; raise `ProtocolError` at the first failure."""
        ordered = self._order_of(silo, update_id)
        cut = len(update) - 4 * self._plan.clear_values
        if update.dtype != np.uint8 or update.ndim != 1 or cut < 0:
            raise ProtocolError(silo, "update", f"{update.dtype} {update.shape} instead of bytes")
        update = self._files.keep(update)
        envelope = self._read(silo, update_id, ordered, update[:cut], self._plan.chunks)
        clear = clear_values(update[cut:], self._plan.clear_values, silo)
        self._check_nonces(silo, envelope)
        masks = self._masks(silo, envelope.head.annex) if self._plan.masked else None
        self._pending[update_id] = Update(update, envelope, clear, ordered.scale, (envelope,), (update_id,), masks)

    def put_sum(self, relay: str, update_ids: Sequence[str], payload: Payload) -> None:
        """Keep the sum of a region's updates, after every check that needs no key. Raise `ProtocolError` if a member
        was not ordered, is present already, or is not its silo's; or members cannot be in one sum.
        """
        if not update_ids or len(set(update_ids)) != len(update_ids):
            raise ProtocolError(relay, "members", f"{len(update_ids)} updates: none, or one occurs twice")
        orders = [self._order_of(relay, update_id) for update_id in update_ids]
        expected = [
            self._expected(update_id.rpartition("/")[0], update_id, ordered, self._plan.chunks)
            for update_id, ordered in zip(update_ids, orders, strict=True)
        ]

        payload = self._files.keep(payload)
        from fedsync.extras.relays import sealed_sum

        found = sealed_sum.read(payload, relay, expected, self._plan.clear_values)
        self._check_nonces(relay, found.envelope)
        masks: Masks | None = None
        if self._plan.masked:
            each = {self._masks(slip.head.sender, slip.head.annex) for slip in found.slips}
            if len(each) > 1:
                raise ProtocolError(relay, "members", "updates with other masks are in one sum")
            (masks,) = each
        members = tuple(member.update_id for member in found.envelope.head.members)
        whole = Update(payload, found.envelope, found.clear, orders[0].scale, found.slips, members, masks)
        self._pending.update(dict.fromkeys(update_ids, whole))

    def _order_of(self, sender: str, update_id: str) -> _Ordered:
        if update_id in self._pending:
            raise ProtocolError(sender, "update id", f"{update_id!r} is here already")
        if update_id not in self._ordered or update_id in self._spoiled:
            raise ProtocolError(sender, "update id", f"{update_id!r} was not ordered")
        return self._ordered[update_id]

    def _check_nonces(self, sender: str, envelope: wire.Envelope) -> None:
        here = {member.nonce for one in set(self._pending.values()) for member in one.envelope.head.members}
        if any(member.nonce in here for member in envelope.head.members):
            raise ProtocolError(sender, "nonce", "that of another update: silos would not decrypt a sum of both")

    def _masks(self, silo: str, annex: bytes) -> Masks:
        read = Annex.unpack(annex, silo, silo)
        roster = frozenset(read.pairs.keys() | {silo})
        if not roster <= self._keys.senders.keys():
            raise ProtocolError(silo, "annex", "it has masks with silos that the administrator issued no key to")
        return read.context, roster

    def greeting(self, silo: str, greeting: Payload) -> wire.Envelope:
        return self._read(silo, f"{silo}/0", _Ordered(0, 0, 0), greeting, 1)

    def key_of(self, silo: str) -> bytes:
        if silo not in self._keys.senders:
            raise ProtocolError(silo, "sender", "the administrator issued no key to a silo of this name")
        return self._keys.senders[silo]

    def _read(self, silo: str, update_id: str, ordered: _Ordered, message: Payload, chunks: int) -> wire.Envelope:
        if message.dtype != np.uint8 or message.ndim != 1:
            raise ProtocolError(silo, "sealed message", f"{message.dtype} {message.shape} instead of bytes")
        return wire.decode(message.data, self._expected(silo, update_id, ordered, chunks))

    def _expected(self, silo: str, update_id: str, ordered: _Ordered, chunks: int) -> wire.Expected:
        plan, keys = self._plan, self._keys
        return wire.Expected(
            wire.Kind.UPDATE, plan.form, plan.packing, silo, ordered.base, ordered.attempt, keys.epoch,
            keys.fingerprint, None, chunks, update_id, self.key_of(silo),
        )  # fmt: skip

    def take(self, update_ids: Iterable[str], newest: int) -> dict[str, Update]:
        """Remove and return the updates for a commit that follows on version ``newest``.

        The server does not know the grid that silos agreed on, nor the history of a version. So the majority of the
        updates decides. Under masks, only the largest set of updates of one context and roster counts; of equal sets
        the first.
        """
        named = tuple(update_ids)
        here = {update_id: self._pending[update_id].update_ids for update_id in named if update_id in self._pending}
        for update_id in [update_id for update_id, members in here.items() if not set(members) <= set(named)]:
            self._spoil(update_id)
        for update_id in self._spoiled.intersection(named):
            self.leave_out(update_id, "is in a region's sum with one that does not count")
        taken = {update_id: self._pending.pop(update_id) for update_id in named if update_id not in self._spoiled}
        self._spoiled.difference_update(named)
        for update_id in named:
            self._ordered.pop(update_id, None)
        self._drop(taken, lambda one: one.envelope.head.round <= newest - WINDOW, "started from a forgotten version")
        if self._plan.masked and taken:
            ((chosen, _),) = Counter(update.masks for update in taken.values()).most_common(1)
            self._drop(taken, lambda update: update.masks != chosen, "has masks of another attempt, work or past")
            works = {one: [work_of(single.head) for single in update.singles] for one, update in taken.items()}
            alike = [taken[one] for one in most_comparable(works, self._plan.work_ratio)]
            much = f"is more than {self._plan.work_ratio:g} times more or less work than most (cipher.work_ratio)"
            self._drop(taken, lambda update: update not in alike, much)
        past, grid = "has another history than the others", "was sealed on another grid than the others"
        self._agree(taken, lambda one: (one.envelope.head.round, one.envelope.head.members[0].chain), past)
        self._agree(taken, lambda one: (one.scale, one.envelope.head.grid), grid)
        self._fit(taken, newest)
        return taken

    def _fit(self, taken: dict[str, Update], newest: int) -> None:
        """Drop updates beyond the limit of one sum, each time of other silos."""
        names, added, fitting = list(taken), Counter[bytes](), set[Update]()
        first = newest % max(len(names), 1)
        for update in dict.fromkeys(taken[name] for name in (*names[first:], *names[:first])):
            grid, count = update.envelope.head.grid, len(update.update_ids)
            if added[grid] + count <= self._plan.limit:
                added[grid] += count
                fitting.add(update)
        most = f"is beyond the {self._plan.limit} updates that a sum of {self._plan.bits} bits holds"
        self._drop(taken, lambda update: update not in fitting, most)

    def _agree(self, taken: dict[str, Update], statement: Callable[[Update], tuple[int, bytes]], why: str) -> None:
        """Keep updates with the most frequent statement on each number, and ties unless masks must be removed."""
        said = Counter(map(statement, taken.values()))
        most = {number: max(said[pair] for pair in said if pair[0] == number) for number, _ in said}
        usual = {pair for pair, count in said.items() if count == most[pair[0]]}
        if self._plan.masked:
            usual = {min(pair for pair in usual if pair[0] == number) for number in most}
        self._drop(taken, lambda update: statement(update) not in usual, why)

    def _drop(self, updates: dict[str, Update], out: Callable[[Update], bool], why: str) -> None:
        for update_id in [update_id for update_id, update in updates.items() if out(update)]:
            self.leave_out(update_id, why)
            del updates[update_id]

    def leave_out(self, update_id: str, why: str) -> None:
        logger.warning("%s %s: it does not count", update_id, why)
        self._left_out.setdefault(why, Counter())[update_id.rpartition("/")[0]] += 1

    def notes(self) -> list[str]:
        return [f"updates that did not count: {told(silos)}; each {why}" for why, silos in self._left_out.items()]

    def _spoil(self, update_id: str) -> None:
        update = self._pending.get(update_id)
        for other in () if update is None else update.update_ids:
            self._spoiled.add(other)
            del self._pending[other]

    def discard(self, update_id: str) -> None:
        self._spoil(update_id)
        self._spoiled.discard(update_id)
        self._ordered.pop(update_id, None)

    def state(self) -> Mapping[str, Any]:
        pending = {one.update_ids: (one.envelope.head.sender, one.message) for one in self._pending.values()}
        return {**named(self, _NAMES), "pending": pending}

    def restore(self, state: Mapping[str, Any], version: int) -> None:
        fill(self, _NAMES, state)
        for update_ids, (sender, message) in state["pending"].items():
            if len(update_ids) > 1:
                self.put_sum(sender, update_ids, message)
            else:
                self.put(sender, update_ids[0], message)
        if self._plan.masked:
            self._attempts.restart(version)


def work_of(head: wire.Head) -> WorkDone:
    return Annex.unpack(head.annex, head.sender, head.sender).work


def usual_greetings(greetings: Mapping[str, wire.Envelope]) -> list[wire.Envelope]:
    """Greetings of the model and run that most silos have: no silo would open a sum with the others."""
    grids = Counter(one.head.grid for _, one in sorted(greetings.items()))
    ((grid, _),) = grids.most_common(1)
    chains = Counter(one.head.members[0].chain for one in greetings.values() if one.head.grid == grid)
    usual = []
    for name, one in sorted(greetings.items()):
        if one.head.grid == grid and chains[one.head.members[0].chain] == max(chains.values()):
            usual.append(one)
        else:
            logger.warning("%s has another model, run or specification than most: its greeting is ignored", name)
    return usual


@dataclass(frozen=True, slots=True)
class Gathered:
    """Updates of a commit, grouped for addition; ``summed`` says whether a region's sum is among them.

    ``by_grid`` has the envelopes that may be added up. ``singles`` has all updates; updates from a region's sum have no
    words. ``clear`` is the change of the values in the clear, float32 [clear values].
    """

    by_grid: Mapping[bytes, list[wire.Envelope]]
    singles: tuple[wire.Envelope, ...]
    clear: Vector
    summed: bool

    @classmethod
    def of(
        cls, updates: Mapping[str, Update], weights: Mapping[str, float], clear_values: int, averages: Ranges = ()
    ) -> Gathered:
        """Group the updates that count; scale their clear values up for the weight of updates that do not count. A
        region's sum is in ``updates`` under the id of each member. ``averages`` are running statistics in the clear,
        see `fedsync.model.plain_aggregator`.
        """
        share = sum(weights[update_id] for update_id in updates) / sum(weights.values())
        clear = np.zeros(clear_values, dtype=np.float32)
        by_grid: dict[bytes, list[wire.Envelope]] = {}
        singles: list[wire.Envelope] = []
        apart = list(dict.fromkeys(updates.values()))
        for update in apart:
            by_grid.setdefault(update.envelope.head.grid, []).append(update.envelope)
            singles += update.singles
            weight = sum(weights[update_id] for update_id in update.update_ids)
            clear += np.float32(weight / share) * update.clear
        for start, stop in averages:
            clear[start:stop] /= np.float32(max(sum(weights.values()), 1.0))
        return cls(by_grid, tuple(singles), clear, len(apart) < len(singles))
