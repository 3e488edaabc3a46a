"""Snapshots: a silo's state, sealed for silos that join, and signed by who made it.

The server stores snapshots and cannot read them; a silo may lie in one. So its content begins with the author's name
and signature over run, version and state, the state's digest must be the newest D of its own history, and who begins
with it wants updates of other silos whose D builds on that: see `fedsync.cipher.silo.reading`.

    author: length [1], UTF-8 | Ed25519 signature [64] | `ReplicaState.to_bytes`

all under AES-GCM with a key of the group.
"""

from __future__ import annotations

import hashlib

from fedsync.cipher.encoding.fields import FieldCheck, read_name, write_name
from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.keys.material import SIGNATURE_BYTES, Purpose, is_signed, open_blob, seal_blob
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.replica_state import ReplicaState
from fedsync.core.errors import SERVER, ProtocolError

_SIGNED = b"snapshot 1"


def seal_snapshot(ring: Ring, plan: EncryptionPlan, state: ReplicaState) -> bytes:
    """A silo's state for other silos."""
    data = state.to_bytes()
    signature = ring.own.sign(_SIGNED, _signed(state, data))
    return seal_blob(ring.group, Purpose.SNAPSHOT, _about(plan), write_name(ring.own.name) + signature + data)


def open_snapshot(
    ring: Ring, plan: EncryptionPlan, run: bytes, sealed: bytes, version: int
) -> tuple[str, ReplicaState]:
    """Name of the author, and the state; that the run came to it is not known before others stand for it.

    Args:
        ring: the silo's keys.
        plan: of the run.
        run: R.
        sealed: what `seal_snapshot` made.
        version: that it is said to be of.

    Raises:
        ProtocolError: no silo of this group made it for this run and version, or it is no state.
    """
    content = memoryview(open_blob(ring.group, Purpose.SNAPSHOT, _about(plan), sealed, SERVER))
    check = FieldCheck(SERVER)
    name, at = read_name(content, 0, check)
    signature, data = bytes(content[at : at + SIGNATURE_BYTES]), bytes(content[at + SIGNATURE_BYTES :])
    try:
        state = ReplicaState.from_bytes(data, plan.layout.size, len(plan.sealed.names))
    except ValueError as error:
        raise ProtocolError(SERVER, "snapshot", str(error)) from error
    author = ring.group.members.get(name)
    if author is None or not is_signed(author.signing, _SIGNED, _signed(state, data), signature):
        check.fail("snapshot", f"not signed by {name!r}, whose it is said to be")
    concealed = ring.group.conceal(state.digest)
    if state.history.run != run or state.version != version or not state.history.fits(concealed):
        check.fail("snapshot", f"of version {state.version}, announced as {version}, or not what its history led to")
    return name, state


def _about(plan: EncryptionPlan) -> bytes:
    """What a snapshot is bound to: the model's layout and how it is sealed."""
    return plan.grid(plan.first_exponents).digest


def _signed(state: ReplicaState, data: bytes) -> bytes:
    return state.history.run + state.version.to_bytes(8, "little") + hashlib.sha256(data).digest()
