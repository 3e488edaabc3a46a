"""A catch-up is refused before anything is made of it, whatever a server writes into its numbers."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from fedsync.cipher.encoding import catch_up
from fedsync.cipher.encoding.catch_up import MAX_ENTRIES, MAX_LINKS, MAX_SUMS, CatchUp, Link, LinkEntry, LinkKind, Start
from fedsync.common.errors import ProtocolError

SUM = bytes(range(20))
EMPTY = Link(LinkKind.EMPTY)


def adding(*versions: int, sums: int = 1, kind: LinkKind = LinkKind.ADD) -> Link:
    return Link(kind, tuple(LinkEntry(version, (SUM,) * sums, b"clear", b"reveal") for version in versions))


def message(*links: Link, base: int = 3, to: int | None = None, attempt: int = 0) -> bytes:
    version = base + len(links) if to is None else to
    return CatchUp(Start.HELD, base, version, links, b"model", b"calibration", attempt, b"roster").encode().tobytes()


def refuses(data: bytes) -> bool:
    try:
        catch_up.decode(np.frombuffer(data, dtype=np.uint8))
    except ProtocolError as error:
        assert error.check == "catch-up"
        return True
    return False


def with_field(data: bytes, form: str, at: int, value: object) -> bytes:
    whole = bytearray(data)
    struct.pack_into(form, whole, at, value)
    return bytes(whole)


def test_what_is_written_is_read() -> None:
    links = (adding(4), EMPTY, adding(4, kind=LinkKind.UNDO), adding(7, sums=MAX_SUMS))
    assert not refuses(message(*links))
    read = catch_up.decode(np.frombuffer(message(*links), dtype=np.uint8))
    assert (read.model, read.calibration, read.roster) == (b"model", b"calibration", b"roster")
    assert [len(link.entries) for link in read.links] == [1, 0, 1, 1]
    assert not refuses(message(*[EMPTY] * MAX_LINKS))
    assert not refuses(message(base=-1, to=0)) and not refuses(message(attempt=2**32 - 1))


HONEST = message(adding(4))
# Places of fields in the head: magic 0, version 4, start 6, from 8, to 16, attempt 24.
CHANGED = {
    "magic": with_field(HONEST, "<4s", 0, b"FSYM"),
    "version of the form": with_field(HONEST, "<H", 4, 4),
    "start": with_field(HONEST, "<H", 6, 3),
    "more links than a silo remembers": message(*[EMPTY] * (MAX_LINKS + 1)),
    "from before the beginning": message(base=-2, to=0),
    "from after where it leads": message(base=3, to=2),
    "attempt": message(attempt=2**32),
    "one link for two versions": message(adding(4), to=5),
    "one version for two links": message(adding(4), EMPTY, to=4),
    "kind of a link": HONEST.replace(struct.pack("<QQ", 1, 1), struct.pack("<QQ", 4, 1)),
    "more entries than there may be": message(adding(*[1] * (MAX_ENTRIES + 1), kind=LinkKind.UNDO)),
    "two versions in one link": message(adding(4, 4)),
    "nothing to add": message(adding()),
    "nothing to take back": message(adding(kind=LinkKind.UNDO)),
    "something in an empty link": message(adding(4, kind=LinkKind.EMPTY)),
    "version 0 is added": message(adding(0)),
    "a later version is added": message(adding(5)),
    "no sums": message(adding(4, sums=0)),
    "too many sums": message(adding(4, sums=MAX_SUMS + 1)),
    "a tail": HONEST + bytes(8),
    "no form": b"",
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_no_server_writes_is_refused(what: str) -> None:
    assert refuses(CHANGED[what])


@pytest.mark.parametrize("cut", range(8, len(HONEST), 8))
def test_half_of_it_is_refused(cut: int) -> None:
    assert refuses(HONEST[:cut])


@pytest.mark.parametrize("dtype", [np.int8, np.float32])
def test_what_is_no_bytes_is_refused(dtype: type) -> None:
    whole = np.frombuffer(HONEST, dtype=np.uint8)
    with pytest.raises(ProtocolError, match="instead of bytes"):
        catch_up.decode(whole.view(dtype))
    with pytest.raises(ProtocolError, match="instead of bytes"):
        catch_up.decode(whole[np.newaxis])


@pytest.mark.parametrize(("silos", "least"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (40, 20), (41, 21)])
def test_half_of_all_who_have_a_key_stand_for_a_snapshot(silos: int, least: int) -> None:
    assert catch_up.attesters(silos) == least
