"""Transfers whose line breaks go on where they were, and a server that does not come back is given up."""

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedsync.config.gate import GateConfig
from fedsync.core.errors import RunError
from fedsync.core.spans import SPAN_BYTES
from fedsync.flower.internals import parcel_client
from fedsync.flower.internals.parcel_client import ParcelClient, Progress
from fedsync.flower.internals.parcel_routes import PREFIX
from fedsync.flower.parcels import Parcel, ParcelStore, Uploaded, node_folder, upload_path
from tests.flower.internals.superlink import Cutting, SuperLink, noise, serving
from tests.flower.internals.transfers import LARGE, asked, client


@pytest.fixture
def link(parcels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    with serving(monkeypatch, GateConfig(), parcels=parcels) as found:
        yield found


def test_a_download_goes_on_where_its_line_broke(link: SuperLink, store: ParcelStore, tmp_path: Path) -> None:
    model = noise(40 * SPAN_BYTES)
    parcel = store.publish(model)
    assert parcel is not None
    line = Cutting(link.port, model.size // 2)
    np.testing.assert_array_equal(client(link.silo(), line.port).fetch(parcel, tmp_path / "silo"), model)
    assert line.lines == 2
    assert line.carried < 1.1 * model.size, "at most a tenth was sent again"


def test_an_upload_goes_on_where_its_line_broke(link: SuperLink, store: ParcelStore) -> None:
    berlin, update = link.silo(), noise(40 * SPAN_BYTES)
    ticket = store.expect(berlin.number, "update a/1", update.size)
    assert ticket is not None
    line = Cutting(link.port, update.size // 2)
    uploaded = client(berlin, line.port).upload(ticket, update)
    assert uploaded is not None and line.lines == 2
    assert line.carried < 1.1 * update.size, "at most a tenth was sent again"
    np.testing.assert_array_equal(store.arrived(berlin.number, ticket, uploaded, "berlin"), update)


def test_another_process_goes_on_with_what_is_there(link: SuperLink, store: ParcelStore, tmp_path: Path) -> None:
    """A SuperNode that was killed has left a part of a model, and at the gate a part of an update."""
    berlin, model = link.silo(), noise(LARGE)
    parcel, ticket = store.publish(model), store.expect(berlin.number, "update a/1", LARGE)
    assert parcel is not None and ticket is not None
    (tmp_path / f"{parcel.digest}.part").write_bytes(model[:SPAN_BYTES].tobytes())
    line = Cutting(link.port, sys.maxsize)
    np.testing.assert_array_equal(client(berlin, line.port).fetch(parcel, tmp_path), model)
    assert line.carried < LARGE - SPAN_BYTES + 4096
    content = parcel_client._content(model)
    status, there = asked(
        berlin,
        "PUT",
        f"{ticket.session}/uploads/{ticket.name}/{content}",
        model[:1000].tobytes(),
        content_range=f"bytes 0-999/{LARGE}",
    )
    assert (status, there) == (200, b"1000")
    assert client(berlin).upload(ticket, model) == Uploaded(content, LARGE)
    np.testing.assert_array_equal(store.arrived(berlin.number, ticket, Uploaded(content, LARGE), "berlin"), model)


def test_a_server_that_does_not_come_back_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel_client, "PATIENCE_S", 0.3)
    nobody = ParcelClient("127.0.0.1:9", None, dict)
    with pytest.raises(RunError, match="nothing moved"):
        nobody.fetch(Parcel("0" * 16, "0" * 64, 5), tmp_path)


@pytest.mark.parametrize("taken", [False, True])
def test_of_two_connections_for_one_upload_the_later_one_counts(
    link: SuperLink, store: ParcelStore, taken: bool
) -> None:
    """The earlier one hangs, and then says something else, before or after the update is taken."""
    berlin, update = link.silo(), noise(3 * SPAN_BYTES)
    ticket = store.expect(berlin.number, "update a/1", update.size)
    assert ticket is not None
    content = parcel_client._content(update)
    head = f"PUT {PREFIX}{ticket.session}/uploads/{ticket.name}/{content} HTTP/1.1\r\nHost: x\r\n"
    told = {"Content-Range": f"bytes 0-{update.size - 1}/{update.size}", "Content-Length": str(update.size)}
    head += "".join(f"{name}: {value}\r\n" for name, value in {**berlin.headers, **told}.items())
    with link.connect() as hanging:
        hanging.sendall(head.encode() + b"\r\n" + b"x" * 1000)
        path = upload_path(node_folder(store._folder, berlin.number), ticket.name, content)
        while not path.exists():
            time.sleep(0.01)
        uploaded = client(berlin).upload(ticket, update)
        assert uploaded is not None
        got = store.arrived(berlin.number, ticket, uploaded, "berlin") if taken else None
        with contextlib.suppress(OSError):
            hanging.sendall(b"x" * (update.size - 1000))
        assert hanging.recv(12) == b"HTTP/1.1 409"
        got = store.arrived(berlin.number, ticket, uploaded, "berlin") if got is None else got
        np.testing.assert_array_equal(got, update)


def test_what_is_there_is_neither_written_again_nor_mixed_with_another_update(
    link: SuperLink, store: ParcelStore, parcels: Path
) -> None:
    ticket = store.expect(link.silo().number, "update a/1", LARGE)
    assert ticket is not None

    def put(content: str, data: bytes) -> tuple[int, bytes]:
        path = f"{ticket.session}/uploads/{ticket.name}/{content}"
        return asked(link.silo(), "PUT", path, data, content_range=f"bytes 0-{len(data) - 1}/{LARGE}")

    one, other = "0" * 32, "1" * 32
    assert put(one, b"a" * 1000) == (200, b"1000")
    assert put(one, b"b" * 1000)[0] == 409
    assert (
        kept := upload_path(node_folder(store._folder, link.silo().number), ticket.name, one)
    ).read_bytes() == b"a" * 1000
    assert put(other, b"c" * 10) == (200, b"10")
    assert not kept.exists(), "a silo sends one update for a ticket"


def test_a_long_transfer_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """By hand: 30 of 100 MB after 20 s, of which 10 were there; 70 MB are left at 1 MB/s."""
    now_s = [0.0]
    monkeypatch.setattr(parcel_client, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    told = Progress("model", 100_000_000)
    with caplog.at_level("INFO", "fedsync"):
        for now_s[0], done in ((0.0, 10_000_000), (9.0, 15_000_000), (20.0, 30_000_000), (25.0, 35_000_000)):
            told.at(done)
    assert [record.getMessage() for record in caplog.records] == ["model: 30.0 of 100.0 MB, 1.00 MB/s, 70 s left"]
