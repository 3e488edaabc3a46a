"""What tests of a server that lies about what was added share: rounds, and what a refusal has to leave as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.cipher.encoding.catch_up import CatchUp, Link, LinkEntry, LinkKind, Start
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.common.errors import ProtocolError
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload
from tests.cipher.make import Federation

THREE = {"a": 10, "b": 10, "c": 10}
ADD, UNDO, EMPTY = LinkKind.ADD, LinkKind.UNDO, LinkKind.EMPTY


def holding(federation: Federation, tmp_path: Path, version: int) -> EncryptedReplica:
    """A silo that holds this version."""
    silo = federation.copy("c", tmp_path / f"{version}.bin")
    whole = federation.all_for("c")
    silo.receive(replace(whole, version=version, links=whole.links[:version]).encode(), version)
    return silo


def to(version: int, *links: Link) -> Payload:
    """What leads from ``version`` on."""
    return CatchUp(Start.HELD, version, version + len(links), links).encode()


@contextmanager
def refused(
    silo: EncryptedReplica, check: str, *, opened: bool = False, by: type[ProtocolError] = ProtocolError
) -> Iterator[None]:
    """The check fails, nothing is decrypted unless it may be, and the silo is as before, also on disk."""
    calls = []
    opens, before, kept = (
        silo._sealer.open,
        silo._state,
        silo._file.read_bytes() if silo._file and silo.holds >= 0 else b"",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silo._sealer, "open", lambda *given: calls.append(1) or opens(*given))
        with pytest.raises(by) as caught:
            yield
    assert caught.value.check == check, str(caught.value)
    assert bool(calls) == opened
    assert silo._state is before
    if kept and silo._file is not None:
        assert silo._file.read_bytes() == kept


def without_opening(silo: EncryptedReplica, payload: Payload, version: int) -> Vector:
    """The model that the silo then has; it decrypts nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(silo._sealer, "open", lambda *given: pytest.fail("it was opened"))
        return silo.receive(payload, version)


def undo(*entries: LinkEntry) -> Link:
    return Link(UNDO, entries)
