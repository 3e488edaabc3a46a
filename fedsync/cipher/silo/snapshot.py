"""Snapshots: a silo's state, sealed for silos that join, and signed by who made it.

The server stores snapshots and cannot read them; a silo may lie in one. So the author signs what it sealed, which the
server checks, too: whatever turns out to be wrong behind a good signature is the author's lie, and no forgery of the
server's. The state's digest must be the newest D of its own history, and who begins with it wants updates of other
silos whose D builds on that: see `fedsync.cipher.silo.reading`.

    `fedsync.cipher.encoding.signed_snapshot`, and in it under AES-GCM with a key of the group:
    bytes of the state [8], `ReplicaState.whole`, zeros

Zeros make all snapshots of a run equally long: digits of exponents and losses are not for the server.
"""

from __future__ import annotations

import struct

from fedsync.cipher.encoding.signed_snapshot import SignedSnapshot
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import Purpose, open_blob, seal_blob
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.replica_state import ReplicaState
from fedsync.common.errors import SERVER, ProtocolError, SpoiledSum

_LENGTH = struct.Struct("<Q")


def seal_snapshot(ring: Ring, plan: EncryptionPlan, state: ReplicaState) -> bytes:
    """A silo's state for other silos."""
    pieces = state.whole
    length = sum(map(len, pieces))
    most = ReplicaState.most_bytes(plan, ring.group.members)
    filled = b"".join((_LENGTH.pack(length), *pieces, bytes(max(most - length, 0))))
    sealed = seal_blob(ring.group, Purpose.SNAPSHOT, _about(plan), filled)
    return SignedSnapshot.make(ring.own, state.history.run, state.version, sealed)


def open_snapshot(ring: Ring, plan: EncryptionPlan, run: bytes, data: bytes, version: int) -> tuple[str, ReplicaState]:
    """Name of the author, and the state; that the run came to it is not known before others stand for it.

    Args:
        ring: the silo's keys.
        plan: of the run.
        run: R.
        data: what `seal_snapshot` made.
        version: that it is said to be of.

    Raises:
        ProtocolError: no silo of this group made it.
        SpoiledSum: one did, and not for this run and version, or it is no state.
    """
    read = SignedSnapshot.read(data, SERVER)
    author = ring.group.members.get(read.author)
    if author is None or not read.is_of(author.signing):
        raise ProtocolError(SERVER, "snapshot", f"not signed by {read.author!r}, whose it is said to be")
    try:
        content = open_blob(ring.group, Purpose.SNAPSHOT, _about(plan), bytes(read.sealed), read.author)
        (length,) = _LENGTH.unpack_from(content)
        end = _LENGTH.size + length
        body = memoryview(content)[_LENGTH.size : end]
        state = ReplicaState.from_bytes(body, plan.layout.size, plan.header, optimizer=plan.optimizer)
    except (ProtocolError, ValueError, struct.error) as error:
        raise SpoiledSum(read.author, "snapshot", str(error)) from error
    found = state.history.run, state.version, read.run, read.version
    if found != (run, version, run, version) or not state.history.fits(ring.group.conceal(state.digest)):
        detail = f"of version {state.version}, announced as {version}, or not what its history led to"
        raise SpoiledSum(read.author, "snapshot", detail)
    return read.author, state


def _about(plan: EncryptionPlan) -> bytes:
    """What a snapshot is bound to: the model's layout and how it is sealed."""
    return plan.grid(plan.first_exponents).digest
