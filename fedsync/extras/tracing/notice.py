"""Notice: the list of one version's updates, for owners who consent to an examination and for the examiners.

    magic [8] | frames: run, numbers [5 x 8], group fingerprint, suite, values in the clear, roster, seeds, updates
    numbers: version, fewest updates of a version, bits, chunks of an update, key epoch
    each update: its id, base version [8], slip (the update without its words)

The notice has no words of any update, so it discloses nothing that the server does not know. The server writes the
notice and can write anything. But each slip is signed by its silo, and the content C of the version follows from the
slips. Silos that reached the version remember C (`fedsync.cipher.silo.history`), so another C shows a false notice.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.fields import pack_frames, pack_named, unpack_frames, unpack_named
from fedsync.cipher.encoding.packing import Packing
from fedsync.cipher.keys.material import FINGERPRINT_BYTES, KEY_BYTES
from fedsync.cipher.silo.history import History, added_content
from fedsync.cipher.suites.suite import FORMS, Form, Member
from fedsync.common.errors import SERVER, ConfigError, ProtocolError

_MAGIC = b"FSNOTE2\0"
_NUMBERS = struct.Struct("<5Q")
_ROUND = struct.Struct("<Q")
_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class TraceSubject:
    """Subject of a consent: one version of one run.

    Args:
        group: fingerprint of the group key.
        epoch: epoch of the group key.
        run: the run's identity.
        content: C of the version's additions, 32 bytes.
    """

    group: bytes
    epoch: int
    run: str
    version: int
    content: bytes


@dataclass(frozen=True)
class Notice:
    """Notice of one version; the module describes its content.

    Args:
        run: the run's identity.
        version: version that the updates led to.
        members: least number of updates of a version in the run.
        updates: slips, in the order in which the server added them.
        clear: change of the values in the clear, float32 bytes.
        roster: silos' announcements for masks; empty without masks.
        seeds: revealed seeds of the silos' own masks, by name.
    """

    run: str
    version: int
    members: int
    updates: tuple[wire.Envelope, ...]
    clear: bytes = b""
    roster: bytes = b""
    seeds: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def head(self) -> wire.Head:
        """Head of the first update; epoch, suite and chunks are the same for all."""
        return self.updates[0].head

    @cached_property
    def matter(self) -> TraceSubject:
        by_grid: dict[bytes, list[Member]] = {}
        heads: dict[bytes, wire.Head] = {}
        for update in self.updates:
            heads.setdefault(update.head.grid, update.head)
            by_grid.setdefault(update.head.grid, []).append(update.head.members[0])
        # The same sums as the server's: one for each grid, in order.
        sums = [replace(heads[grid], members=tuple(members)) for grid, members in sorted(by_grid.items())]
        content = added_content(sums, self.clear)
        return TraceSubject(self.head.fingerprint, self.head.epoch, self.run, self.version, content)

    def slip(self, silo: str) -> wire.Envelope | None:
        return next((update for update in self.updates if update.head.sender == silo), None)

    def known(self, history: History) -> bool:
        """Whether a silo reached this version with these very updates; False if it has not reached the version. Raises
        `ProtocolError` if the silo reached the version with others, or the version does not follow on the silo's
        history. Raises `ConfigError` if the silo has forgotten the version.
        """
        records = history.records
        if self.version > records.newest:
            if any(update.head.round > records.newest for update in self.updates) or self.version > records.newest + 1:
                detail = f"of version {self.version}, but this silo is at version {records.newest}"
                raise ProtocolError(SERVER, "notice", detail)
            return False
        at = self.version - records.newest - 1
        if at < -len(records.last):
            problem = f"this silo no longer stores what version {self.version} added"
            raise ConfigError("notice", problem, f"It remembers the last {len(records.last)} versions")
        if records.last[at].content != self.matter.content:
            raise ProtocolError(SERVER, "notice", f"these updates are not those that made version {self.version}")
        return True

    def encode(self) -> bytes:
        """Encode; raise `ProtocolError` if the notice would be too long to be read."""
        head, packing = self.head, self.head.packing
        numbers = _NUMBERS.pack(self.version, self.members, packing.bits, head.chunks, head.epoch)
        slips = [
            pack_frames([update.head.members[0].update_id.encode(), _ROUND.pack(update.head.round), wire.slip(update)])
            for update in self.updates
        ]
        frames = [self.run.encode(), numbers, head.fingerprint, head.form.kind.encode(), self.clear, self.roster]
        body = pack_frames([*frames, pack_named(self.seeds), pack_frames(slips)])
        unpack_frames(body, SERVER)
        return _MAGIC + body

    @classmethod
    def read(cls, data: bytes, senders: Mapping[str, bytes]) -> Notice:
        """Decode; raises `ProtocolError` if malformed, of another group, or with a slip not signed by its silo."""
        if not data.startswith(_MAGIC):
            raise ProtocolError(SERVER, "notice", "it is none")
        run, packed, group, kind, clear, roster, seeds, slips = unpack_frames(data[len(_MAGIC) :], SERVER, 8)
        if len(packed) != _NUMBERS.size or len(group) != FINGERPRINT_BYTES or not 1 <= len(run) <= _MAX_NAME:
            raise ProtocolError(SERVER, "notice", "numbers, fingerprint or name of another length")
        version, members, bits, chunks, epoch = _NUMBERS.unpack(packed)
        form, packing = _form(kind, bits)
        found = []
        for one in unpack_frames(slips, SERVER):
            name, base, slip = unpack_frames(one, SERVER, 3)
            if len(base) != _ROUND.size:
                raise ProtocolError(SERVER, "notice", "a base of another length")
            update_id, (round_,) = name.decode("utf-8", "replace"), _ROUND.unpack(base)
            silo = update_id.rpartition("/")[0]
            if silo not in senders:
                raise ProtocolError(SERVER, "notice", f"{update_id[:80]!r} is of no silo that has a key")
            expected = wire.Expected(
                wire.Kind.UPDATE, form, packing, silo, round_, None, epoch, group, None, chunks, update_id,
                senders[silo],
            )  # fmt: skip
            found.append(wire.read_slip(slip, expected))
        ids = {one.head.members[0].update_id for one in found}
        if not 1 <= len(ids) <= wire.MAX_MEMBERS or len(ids) < len(found):
            raise ProtocolError(SERVER, "notice", f"{len(found)} updates, or one of them twice")
        told = unpack_named(seeds, SERVER, KEY_BYTES)
        return cls(run.decode("utf-8", "replace"), version, members, tuple(found), clear, roster, told)


def _form(kind: bytes, bits: int) -> tuple[Form, Packing]:
    try:
        form = FORMS[kind.decode()]
        return form, Packing(bits, form.slot_bits)
    except (KeyError, ValueError, ConfigError):
        raise ProtocolError(SERVER, "notice", "of an unknown suite") from None
