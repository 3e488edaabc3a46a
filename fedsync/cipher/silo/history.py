"""History of an encrypted run at a silo: for each model version, digests of all that led to it (H is SHA-256).

    R    digest of the run: its name, its specification as the server sent it, key epoch and group
    C_v  digest of the link (change of the model) that led to version v; see `added_content` and `link_content`
    A_v  digest of the silo's state at v: model, moments, exponents, votes, added updates. It is computed with a key of
         the group: otherwise the server could guess the exponents of a small model from D
    S_v  set of the link's sums that were added: spoiled sums are skipped, see `fedsync.cipher.silo.opening`
    D_0 = H(R, C_0, A_0)            C_0 is the digest of the calibration
    D_v = H(R, kinds, C, S and D of the last versions before v, v, C_v, S_v, A_v)

Each update names the D of the version that it starts from, and its tag covers this D. So a silo that accepts another
silo's update knows that both silos added the same sums in the same order. So both have the same model to the last bit.
A silo remembers the last `WINDOW` versions. It refuses older updates, and refuses to undo older links. Only ADD links
can be undone, the newest first, each once. D covers all that a silo remembers, so a snapshot brings the same memory.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedsync.cipher.encoding.catch_up import WINDOW, LinkKind
from fedsync.cipher.encoding.sealed_wire import Head, member_context
from fedsync.cipher.suites.suite import DIGEST_BYTES
from fedsync.common.errors import SERVER, ProtocolError

_HEAD = struct.Struct(f"<qI{DIGEST_BYTES}s")
_RECORD = struct.Struct(f"<BQ{DIGEST_BYTES}s{DIGEST_BYTES}s")


def digest_of(*parts: bytes | memoryview) -> bytes:
    """SHA-256 of parts with their lengths, so that no part can pass for a part of its neighbour."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()


def run_digest(run: str, specification: bytes, epoch: int, fingerprint: bytes) -> bytes:
    """R: the same at every silo of a run, and different for every other run. ``specification`` is the SHA-256 of the
    run's specification as the server sent it.
    """
    return digest_of(b"fedsync run 1", run.encode(), specification, epoch.to_bytes(8, "little"), fingerprint)


def added_content(sums: Sequence[Head], clear: bytes | memoryview) -> bytes:
    """C of an ADD link, from everything that the senders of its updates knew, and the values in the clear."""
    parts = [digest_of(*(member_context(head, member) for member in head.members)) for head in sums]
    return digest_of(b"fedsync link 1", LinkKind.ADD.name.encode(), *parts, hashlib.sha256(clear).digest())


def link_content(kind: LinkKind, entries: Sequence[tuple[int, bytes]]) -> bytes:
    """C of a link; ``entries`` are version and `added_content` of each entry, in the link's order."""
    if kind is LinkKind.ADD:
        ((_, content),) = entries
        return content
    parts = [version.to_bytes(8, "little") + content for version, content in entries]
    return digest_of(b"fedsync link 1", kind.name.encode(), *parts)


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """Effect of one version: its link's kind (EMPTY for version 0), C, and S: bit i for sum i of an ADD link."""

    kind: LinkKind
    content: bytes
    counted: int = 0


@dataclass(frozen=True, slots=True)
class LinkRecords:
    """Effects of the last versions, at most `WINDOW`, the ``newest`` last."""

    newest: int
    last: tuple[LinkRecord, ...]

    def after(self, kind: LinkKind, entries: Sequence[tuple[int, bytes]], counted: int = 0) -> LinkRecords:
        """Append one version; arguments as for `link_content` and `LinkRecord`. Raise `ProtocolError` if an UNDO link
        reverts something other than the last remaining additions, or reverts twice.
        """
        if kind is LinkKind.UNDO:
            self._check_undo(entries)
        record = LinkRecord(kind, link_content(kind, entries), counted)
        return LinkRecords(self.newest + 1, (*self.last, record)[-WINDOW:])

    def counted(self, version: int) -> int:
        return self.last[version - self.newest - 1].counted

    def _check_undo(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Check that the entries are the last additions, newest first. An UNDO record is never skipped, so versions
        that it reverted can never be reverted again.
        """
        records, at = self.last, len(self.last) - 1
        for version, content in entries:
            # Empty versions have nothing to revert.
            while at >= 0 and records[at].kind is LinkKind.EMPTY:
                at -= 1
            if at < 0 or version != self.newest - (len(records) - 1 - at):
                detail = f"version {version} cannot be undone: it is not the last version, or is no longer stored"
                raise ProtocolError(SERVER, "undo", detail)
            if (records[at].kind, records[at].content) != (LinkKind.ADD, content):
                detail = f"version {version} cannot be undone: it added other updates, or itself undid a version"
                raise ProtocolError(SERVER, "undo", detail)
            at -= 1


@dataclass(frozen=True, slots=True)
class History:
    """Memory of a run R at a silo; ``chains`` are the D of ``records``, and both are empty before the first model."""

    MOST_BYTES: ClassVar = _HEAD.size + WINDOW * _RECORD.size  # upper bound of the length of `to_bytes`

    run: bytes
    records: LinkRecords = LinkRecords(-1, ())
    chains: tuple[bytes, ...] = ()

    def begin(self, calibration: bytes, state: bytes) -> History:
        chain = digest_of(b"fedsync chain 2", self.run, calibration, state)
        return History(self.run, LinkRecords(0, (LinkRecord(LinkKind.EMPTY, calibration),)), (chain,))

    def after(self, kind: LinkKind, entries: Sequence[tuple[int, bytes]], state: bytes, counted: int = 0) -> History:
        """History one version later, with A_v (``state``); other arguments and errors as in `LinkRecords.after`."""
        records = self.records.after(kind, entries, counted)
        kept = len(records.last) - 1
        return History(self.run, records, self.chains[-kept:])._led_to(state)

    def fits(self, state: bytes) -> bool:
        """Whether the newest D is that of a state with this A, as far as the history goes back."""
        records, chains = self.records, self.chains
        if not chains or len(chains) != len(records.last):
            return False
        if records.newest == 0:
            return chains[-1] == self.begin(records.last[-1].content, state).chains[-1]
        return len(chains) > 1 and self == History(self.run, records, chains[:-1])._led_to(state)

    def _led_to(self, state: bytes) -> History:
        *behind, newest = self.records.last
        before = _packed(behind, self.chains)
        version, counted = (number.to_bytes(8, "little") for number in (self.records.newest, newest.counted))
        chain = digest_of(b"fedsync chain 2", self.run, before, version, newest.content, counted, state)
        return History(self.run, self.records, (*self.chains, chain))

    def chain(self, version: int) -> bytes | None:
        """D of a version; None if the version is forgotten or was not reached."""
        at = version - self.records.newest - 1
        return self.chains[at] if -len(self.chains) <= at < 0 else None

    def known(self) -> dict[int, bytes]:
        return dict(enumerate(self.chains, self.records.newest + 1 - len(self.chains)))

    def to_bytes(self) -> bytes:
        packed = _packed(self.records.last, self.chains)
        return _HEAD.pack(self.records.newest, len(self.chains), self.run) + packed

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> tuple[History, int]:
        """Decode what `to_bytes` wrote; return history and bytes read. `ValueError` if malformed."""
        if len(data) < _HEAD.size:
            raise ValueError("it ends within its history")
        newest, count, run = _HEAD.unpack_from(data)
        end = _HEAD.size + count * _RECORD.size
        if count > WINDOW or len(data) < end or not count <= newest + 1:
            raise ValueError(f"a history of {count} versions up to {newest}")
        records, chains = [], []
        for kind, counted, content, chain in _RECORD.iter_unpack(data[_HEAD.size : end]):
            records.append(LinkRecord(LinkKind(kind), content, counted))
            chains.append(chain)
        return cls(run, LinkRecords(newest, tuple(records)), tuple(chains)), end


def _packed(records: Sequence[LinkRecord], chains: Sequence[bytes]) -> bytes:
    return b"".join(
        _RECORD.pack(one.kind, one.counted, one.content, chain) for one, chain in zip(records, chains, strict=True)
    )
