"""What tests of a server that lies about what was added share: rounds, and what a refusal has to leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.cipher.encoding.catch_up import CatchUp, Link, LinkEntry, LinkKind, Start
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.silo.history import History
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.cipher.silo.replica_state import ReplicaState
from fedsync.common.errors import ProtocolError
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload
from tests.cipher.make import Federation

THREE = {"a": 10, "b": 10, "c": 10}
ADD, UNDO, EMPTY = LinkKind.ADD, LinkKind.UNDO, LinkKind.EMPTY


def holding(federation: Federation, tmp_path: Path, version: int) -> EncryptedReplica:
    silo = federation.copy("c", tmp_path / f"{version}.bin")
    silo.receive(federation.up_to("c", version), version)
    return silo


def with_a_history(federation: Federation, state: ReplicaState) -> ReplicaState:
    """The state with the history that b, which has the code, would compute for it; others have built on another."""
    known, last = state.history, state.history.records.last[-1]
    records = replace(known.records, newest=state.version - 1, last=known.records.last[:-1])
    concealed = open_ring(federation.keys.silos["b"]).group.conceal(state.digest)
    history = History(known.run, records, known.chains[:-1]).after(
        last.kind, ((state.version, last.content),), concealed, last.counted
    )
    assert history.fits(concealed)
    return replace(state, history=history)


def to(version: int, *links: Link) -> Payload:
    """What leads from ``version`` on."""
    return CatchUp(Start.HELD, version, version + len(links), links).encode()


@contextmanager
def openings(silo: EncryptedReplica) -> Iterator[list[int]]:
    """Chunks of every call of the suite meanwhile."""
    calls, opens = list[int](), silo._sealer.open
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silo._sealer, "open", lambda words, *rest: calls.append(len(words)) or opens(words, *rest))
        yield calls


@contextmanager
def refused(
    silo: EncryptedReplica, *checks: str, opened: bool = False, by: type[ProtocolError] = ProtocolError
) -> Iterator[None]:
    """One of the checks fails, nothing is decrypted unless it may be, and the silo is as before, also on disk."""
    before, kept = silo._state, silo._file.read_bytes() if silo._file and silo.holds >= 0 else b""
    with openings(silo) as calls, pytest.raises(by) as caught:
        yield
    assert caught.value.check in checks, str(caught.value)
    assert bool(calls) == opened
    assert silo._state is before
    if kept and silo._file is not None:
        assert silo._file.read_bytes() == kept


def without_opening(silo: EncryptedReplica, payload: Payload, version: int) -> Vector:
    """The model that the silo then has; it decrypts nothing."""
    with openings(silo) as calls:
        model = silo.receive(payload, version)
    assert not calls
    return model


def undo(*entries: LinkEntry) -> Link:
    return Link(UNDO, entries)
