"""Snapshots: a silo's state, sealed for silos that join, and signed by its author.

The server stores snapshots and cannot read them; a silo may lie in a snapshot. So the author signs what it sealed, and
the server checks the signature, too. An error behind a valid signature is then the author's lie, and no forgery of the
server's. The state's digest must be the newest D of its own history. A silo that begins with the state requires updates
of other silos whose D builds on it: see `fedsync.cipher.silo.reading`.

    `fedsync.cipher.encoding.signed_snapshot`, and in it under AES-GCM with a key of the group:
    bytes of the state [8], `ReplicaState.whole`, zeros

Zeros make all snapshots of a run equally long: the number of digits of exponents and losses would disclose something to
the server.
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
    pieces = state.whole
    length = sum(map(len, pieces))
    most = ReplicaState.most_bytes(plan, ring.group.members)
    filled = b"".join((_LENGTH.pack(length), *pieces, bytes(max(most - length, 0))))
    sealed = seal_blob(ring.group, Purpose.SNAPSHOT, _about(plan), filled)
    return SignedSnapshot.make(ring.own, state.history.run, state.version, sealed)


def open_snapshot(ring: Ring, plan: EncryptionPlan, run: bytes, data: bytes, version: int) -> tuple[str, ReplicaState]:
    """Open a snapshot of ``version``; return author and state. Other silos must still attest that the run reached it.

    Raises:
        ProtocolError: no silo of this group made the snapshot.
        SpoiledSum: a silo made it, but for another run or version, or it is malformed.
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
    """Data that a snapshot is bound to: the model's layout and its sealing."""
    return plan.grid(plan.first_exponents).digest
