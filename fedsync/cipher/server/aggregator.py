"""The server's side under encryption: it adds sealed updates, keeps the sums, and has no key.

The model lives at the silos. The server keeps what was committed since some version as a chain of *links*, each of
which leads from one version to a later one, and sends a silo the links that it lacks. Neighbouring links are added
up once no silo stands between them, so the chain is about as long as there are versions that silos hold.

A sum can be opened only if all in it were quantised on one grid. Silos agree on the next grid whenever the updates
of a *quorum* were committed since the last time; what was sealed before that and committed later makes a sum of
its own, and no link leads across such a point.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedsync.cipher.encoding import catch_up, wire
from fedsync.cipher.encoding.catch_up import CatchUp, Start
from fedsync.cipher.keys.keywrap import ServerKeys
from fedsync.cipher.masking.masks import MIN_SURVIVORS
from fedsync.cipher.masking.unmask import Unmasking
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.server.chain import Adding, Link, LinkGroup, Sum
from fedsync.cipher.server.inbox import Inbox
from fedsync.cipher.suites.suite import Adder
from fedsync.core.actions import Commit
from fedsync.core.errors import PolicyError, ProtocolError
from fedsync.core.layout import Vector
from fedsync.core.saved import Names, fill, named
from fedsync.core.transfer import Payload

logger = logging.getLogger(__name__)

MAX_LINKS = 48
"""Links kept before a silo is asked for a snapshot, which replaces those before it."""

_NAMES: Names = {
    "version": "_version",
    "links": "_links",
    "where": "_where",
    "snapshot": "_snapshot",
    "initial": "_initial",
    "calibrations": "_calibrations",
    "calibration": "_calibration",
    "scale": "_scale",
    "since_scale": "_since_scale",
    "savepoint": "_savepoint",
}
"""What a checkpoint holds: what comes from silos, and not what was given at the start."""

MAX_SNAPSHOT_EXTRA = 2**20
"""Bytes that a sealed snapshot may have beside the model's."""


@dataclass(slots=True)
class _Where:
    """Which versions a silo may hold: the one it is known to, and those that were sent since."""

    known: int
    sent: set[int] = field(default_factory=set)


class EncryptedAggregator:
    """A `fedsync.core.transfer.Aggregator` without a key.

    Args:
        plan: how updates are sealed.
        keys: what the server may know.
        initial: version 0 in the clear, where silos cannot build it themselves.
    """

    def __init__(self, plan: EncryptionPlan, keys: ServerKeys, initial: Vector | None = None) -> None:
        self._plan = plan
        self._keys = keys
        adder = Adder(plan.form)
        self._adding = Adding(plan, adder)
        self._inbox = Inbox(plan, keys, adder)
        self._version = 0
        self._links: list[Link] = []
        self._where: dict[str, _Where] = {}
        self._snapshot: tuple[int, Payload] | None = None
        self._initial = initial
        self._calibrations: dict[str, wire.Envelope] = {}
        self._calibration: bytes | None = None
        self._scale = 0
        self._since_scale = 0
        self._savepoint: int | None = None
        self._made: dict[tuple[int, int], Payload] = {}
        self._unmasking: tuple[Unmasking, LinkGroup] | None = None

    # Silos come, and are sent what they lack.

    @property
    def upload_bytes(self) -> int:
        """Largest update, in bytes: words, header, annex, and what travels in the clear."""
        annex = wire.MAX_ANNEX if self._plan.masked else 0
        return self._plan.chunks * self._plan.form.chunk_bytes + 4 * self._plan.clear_values + annex + 4096

    def greet(self, silo: str, version: int, greeting: Payload | None) -> None:
        """A silo is here. What it says of the size of its updates counts if no order has gone out yet.

        Raises:
            ProtocolError: the greeting is not one, or is missing while it counts; the silo has no key; or it cannot
                hold that version.
        """
        if self._calibration is not None:
            self.holds(silo, version)
            return
        if greeting is None:
            raise ProtocolError(silo, "greeting", "it does not say how large its updates are")
        envelope = self._inbox.greeting(silo, greeting)
        self.holds(silo, version)
        self._calibrations[silo] = envelope

    def holds(self, silo: str, version: int) -> None:
        """The silo holds this version, or a later one of those that were sent to it.

        A version that nothing leads on from, as after its disk was set back, is as good as none: it is sent the model
        from the beginning, or a snapshot.

        Raises:
            ProtocolError: there is no such version yet, or never, or no such silo.
        """
        self._inbox.key_of(silo)
        if not -1 <= version <= self._version:
            raise ProtocolError(silo, "version", f"it says that it holds {version}, the newest is {self._version}")
        known = version if version in self._bases else -1
        where = self._where.get(silo)
        sent = {one for one in where.sent if one > known} if where is not None else set()
        self._where[silo] = _Where(known, sent)

    @property
    def _bases(self) -> set[int]:
        """Versions from which links lead to the current one, which is one of them."""
        return {link.base for link in self._links} | {self._version}

    def outgoing(self, silo: str) -> Payload:
        """A `CatchUp`, uint8 [bytes], from the version that the silo holds to the current one."""
        if self._unmasking is not None:
            raise PolicyError("the newest sum waits for silos to reveal their masks")
        if self._calibration is None:
            self._calibrate()
        where = self._where.setdefault(silo, _Where(-1))
        where.sent.add(self._version)
        key = where.known, self._inbox.attempt(silo, self._version)
        if key not in self._made:
            self._made[key] = replace(self._catch_up(where.known), attempt=key[1]).encode()
        return self._made[key]

    def _calibrate(self) -> None:
        if not self._calibrations:
            raise PolicyError("no silo said how large its updates are")
        envelopes = [self._calibrations[name] for name in sorted(self._calibrations)]
        total = self._adding.total(envelopes)
        self._calibration = self._message(total, 0, chunks=1)
        self._calibrations.clear()

    def _catch_up(self, known: int) -> CatchUp:
        """From ``known``, or from a version that can be sent whole where no link begins there."""
        calibration = self._calibration or b""
        if known in self._bases:
            return CatchUp(Start.HELD, known, self._version, self._groups_from(known))
        if known == -1 and 0 in self._bases:
            whole = b"" if self._initial is None else self._initial.astype("<f4", copy=False).tobytes()
            start = Start.HELD if self._initial is None else Start.CLEAR
            return CatchUp(start, -1, self._version, self._groups_from(0), whole, calibration)
        if self._snapshot is None:
            raise PolicyError(f"version {known} leads nowhere, and there is no snapshot")
        version, sealed = self._snapshot
        return CatchUp(Start.SNAPSHOT, version, self._version, self._groups_from(version), sealed.tobytes())

    def _groups_from(self, base: int) -> tuple[catch_up.SumGroup, ...]:
        return tuple(
            catch_up.SumGroup(
                group.sign,
                group.versions,
                tuple(self._message(one, self._version, self._plan.chunks) for one in group.sums),
                group.clear.astype("<f4", copy=False).tobytes(),
                group.reveals,
            )
            for link in self._links
            if link.base >= base
            for group in link.groups
        )

    def _message(self, total: Sum, version: int, chunks: int) -> bytes:
        plan, keys = self._plan, self._keys
        head = wire.Head(
            wire.Kind.AGGREGATE, plan.form, plan.packing, "server", version, total.attempt, keys.epoch,
            keys.fingerprint, total.grid, chunks, total.members,
        )  # fmt: skip
        return wire.encode(head, total.words, total.tag, None)

    # Updates arrive and are committed.

    def begin(self, update_id: str) -> None:
        self._inbox.begin(update_id, self._version, self._scale)

    def put(self, silo: str, update_id: str, update: Payload) -> None:
        self._inbox.put(silo, update_id, update)

    def commit(self, commit: Commit) -> None:
        """Add the updates of a commit; their weights are inside already.

        What travels in the clear is weighed here.

        Raises:
            PolicyError: the commit is one that sums alone cannot make.
        """
        if commit.toward:
            raise PolicyError("a server without the model cannot move it towards the silos' models")
        updates = self._inbox.take(commit.weights)
        # Of what does not count the others make up the weight.
        share = sum(commit.weights[update_id] for update_id in updates) / sum(commit.weights.values())
        clear = np.zeros(self._plan.clear_values, dtype=np.float32)
        by_grid: dict[bytes, list[wire.Envelope]] = {}
        for update_id, update in updates.items():
            by_grid.setdefault(update.envelope.head.grid, []).append(update.envelope)
            clear += np.float32(commit.weights[update_id] / share) * update.clear
        sums = tuple(self._adding.total(envelopes) for _, envelopes in sorted(by_grid.items()))
        group = LinkGroup(1, 1, len(updates), sums, clear)
        if self._plan.masked:
            self._begin_unmasking(group, next(iter(updates.values())).attempt)
        else:
            self._add_group(group)

    def _add_group(self, group: LinkGroup) -> None:
        """The next version, and where enough silos have voted, the next grid."""
        self._since_scale += group.updates
        last = self._since_scale >= self._plan.quorum
        if last:
            self._since_scale, self._scale = 0, self._scale + 1
        self._extend((group,), last=last)

    # Masks have to come off before a sum can be opened.

    def _begin_unmasking(self, group: LinkGroup, attempt: int) -> None:
        members = [member for one in group.sums for member in one.members]
        bases = {member.round for member in members}
        silos = tuple(sorted(member.update_id.rpartition("/")[0] for member in members))
        if len(bases) != 1 or len(set(silos)) != len(silos):
            raise PolicyError(f"masks come off sums of one round only, and the commit has updates of {sorted(bases)}")
        if len(silos) < MIN_SURVIVORS:
            logger.warning(
                "a sum of %d silos would tell too much: it stays closed, and the commit brings nothing", len(silos)
            )
            self._extend((), last=False)
            return
        self._unmasking = Unmasking(bases.pop(), attempt, silos), group

    @property
    def blocked(self) -> bool:
        return self._unmasking is not None

    def questions(self) -> dict[str, Payload]:
        return {} if self._unmasking is None else self._unmasking[0].questions()

    def answer(self, silo: str, answer: Payload) -> None:
        if self._unmasking is None:
            raise ProtocolError(silo, "answer", "nobody asked")
        unmasking, group = self._unmasking
        unmasking.answer(silo, answer)
        if unmasking.done:
            self._unmasking = None
            self._add_group(replace(group, reveals=unmasking.reveals()))

    def give_up(self, silo: str) -> None:
        """A silo that is in the sum does not answer: the sum stays closed, and the version is as the one before."""
        if self._unmasking is None or silo not in self._unmasking[0].survivors:
            return
        logger.warning("%s was lost before it revealed its masks: the commit brings nothing, and silos go on", silo)
        self._unmasking = None
        self._extend((), last=False)

    def _extend(self, groups: tuple[LinkGroup, ...], *, last: bool) -> None:
        self._links.append(Link(self._version, self._version + 1, groups, last))
        self._version += 1
        self._made.clear()
        self._shorten()

    def savepoint(self) -> None:
        self._savepoint = self._version

    def rollback(self) -> None:
        """The next version takes back all that was added since the savepoint."""
        back_to = self._savepoint or 0
        if back_to != self._version and all(link.base != back_to for link in self._links):
            raise PolicyError(f"version {back_to} is to come back, and what was added since is forgotten")
        added = [group for link in self._links if link.base >= back_to for group in link.groups]
        self._extend(tuple(replace(group, sign=-group.sign) for group in reversed(added)), last=False)
        self._savepoint = self._version

    def discard(self, update_id: str) -> None:
        self._inbox.discard(update_id)

    # The chain stays short.

    @property
    def wants_snapshot(self) -> bool:
        """Whether there are so many links that a snapshot is worth more."""
        return len(self._links) > max(MAX_LINKS, 3 * len(self._where))

    def put_snapshot(self, silo: str, version: int, snapshot: Payload) -> None:
        """Keep a sealed model for silos that hold none of the versions that links begin with.

        Raises:
            ProtocolError: too large, or of a version that no link begins with.
        """
        most = self._plan.layout.nbytes + MAX_SNAPSHOT_EXTRA
        if snapshot.dtype != np.uint8 or len(snapshot) > most:
            raise ProtocolError(silo, "snapshot", f"{len(snapshot)} bytes, at most {most}")
        if version not in self._bases:
            raise ProtocolError(silo, "snapshot", f"of version {version}, which is not among those kept")
        self._snapshot = version, snapshot
        # What the savepoint needs must stay, or there would be no way back.
        keep = version if self._savepoint is None else min(version, self._savepoint)
        self._links = [link for link in self._links if link.base >= keep]
        self._made.clear()

    def _shorten(self) -> None:
        """Add up what no silo stands between."""
        between = {version for where in self._where.values() for version in (where.known, *where.sent)}
        if self._savepoint is not None:
            between.add(self._savepoint)
        if self._snapshot is not None:
            between.add(self._snapshot[0])
        self._links = self._adding.shortened(self._links, between)

    def state(self) -> Mapping[str, Any]:
        """Sums and pending updates, for `restore` in another process; nothing in it needs a key to be made."""
        return {**named(self, _NAMES), "unmasking": self._unmasking is not None, "inbox": self._inbox.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from another aggregator's `state`. A sum whose masks were to come off stays closed."""
        fill(self, _NAMES, state)
        if state["unmasking"]:
            self._extend((), last=False)
        self._inbox.restore(state["inbox"], self._version)

    def links(self) -> Iterator[tuple[int, int]]:
        """Versions that each link leads from and to, for people and tests."""
        return ((link.base, link.version) for link in self._links)
