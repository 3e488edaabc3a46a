"""Large payloads as files through a SuperLink's gate: what comes whole, and what is turned away."""

import contextlib
import errno
import hashlib
import http.client
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedsync.config.gate import GateConfig
from fedsync.core.array_keeper import ArrayKeeper
from fedsync.core.errors import ProtocolError
from fedsync.core.spans import SPAN_BYTES, file_part, map_file
from fedsync.flower.internals import parcel_client, parcel_routes
from fedsync.flower.internals.parcel_routes import MAX_PART_BYTES, PREFIX
from fedsync.flower.parcels import Parcel, ParcelStore, Ticket, Uploaded, node_folder, tidy_up, upload_path
from tests.flower.internals.superlink import SuperLink, noise, serving
from tests.flower.internals.transfers import LARGE, asked, client

QUOTA = 2**26


@pytest.fixture
def link(parcels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    with serving(monkeypatch, GateConfig(waiting_bytes=QUOTA), parcels=parcels) as found:
        yield found


def left(parcels: Path) -> list[str]:
    """Files of all sessions."""
    return sorted(file.name for file in parcels.rglob("*") if file.is_file() and file.name != "lock")


# There and back.


def test_a_model_comes_to_each_silo_as_a_file(link: SuperLink, store: ParcelStore, tmp_path: Path) -> None:
    model = noise(LARGE)
    parcel = store.publish(model)
    assert parcel == Parcel(store.session, hashlib.sha256(model).hexdigest(), LARGE)
    for name in ("berlin", "paris"):
        got = client(link.silo(name)).fetch(parcel, tmp_path / name)
        np.testing.assert_array_equal(got, model)
        assert [file.name for file in (tmp_path / name).iterdir()] == [f"{parcel.digest}.parcel"]


def test_transfers_of_several_silos_go_beside_each_other(link: SuperLink, store: ParcelStore, tmp_path: Path) -> None:
    """One silo's upload is half there and another's download half read: a third has its model and leaves its update."""
    berlin, paris, oslo = link.silo("berlin"), link.silo("paris"), link.join("oslo")
    model = noise(64 * SPAN_BYTES)  # more than sockets hold
    parcel = store.publish(model)
    tickets = [store.expect(silo.number, "update", LARGE) for silo in (berlin, oslo)]
    assert parcel is not None and tickets[0] is not None and tickets[1] is not None
    update, content = noise(LARGE), "c" * 32
    upload = f"PUT {PREFIX}{store.session}/uploads/{tickets[0].name}/{content} HTTP/1.1\r\nHost: x\r\n"
    told = {"Content-Range": f"bytes 0-{LARGE - 1}/{LARGE}", "Content-Length": str(LARGE), **berlin.headers}
    upload += "".join(f"{name}: {value}\r\n" for name, value in told.items())
    line = http.client.HTTPConnection("127.0.0.1", link.port, timeout=10)
    with link.connect() as uploading, contextlib.closing(line):
        uploading.sendall(upload.encode() + b"\r\n" + update[: LARGE // 2].tobytes())
        line.request("GET", f"{PREFIX}{store.session}/parcels/{parcel.digest}", headers=paris.headers)
        downloading = line.getresponse()
        begun = downloading.read(SPAN_BYTES)
        path = upload_path(node_folder(store._folder, berlin.number), tickets[0].name, content)
        while not (path.exists() and path.stat().st_size):
            time.sleep(0.01)
        np.testing.assert_array_equal(client(oslo).fetch(parcel, tmp_path / "oslo"), model)
        assert client(oslo).upload(tickets[1], update) is not None
        assert path.stat().st_size < LARGE, "the other is still on its way"
        uploading.sendall(update[LARGE // 2 :].tobytes())
        assert uploading.recv(12) == b"HTTP/1.1 200"
        assert begun + downloading.read() == model.tobytes()
    np.testing.assert_array_equal(store.arrived(berlin.number, tickets[0], Uploaded(content, LARGE), "berlin"), update)


def test_a_model_that_is_a_file_is_linked(store: ParcelStore, parcels: Path, tmp_path: Path) -> None:
    keeper = ArrayKeeper(tmp_path / "arrays")
    model = keeper.keep(noise(LARGE))
    for _ in range(2):  # as when it is needed again before its parcel has gone
        parcel = store.publish(model)
        assert parcel == Parcel(store.session, hashlib.sha256(model).hexdigest(), LARGE)
        (published,), lies = [each for each in store._folder.iterdir() if each.name != "lock"], file_part(model)
        assert lies is not None and published.samefile(lies.path)
    part = store.publish(model[:SPAN_BYTES])
    assert part == Parcel(store.session, hashlib.sha256(model[:SPAN_BYTES]).hexdigest(), SPAN_BYTES)
    assert (store._folder / part.digest).stat().st_size == SPAN_BYTES, "a part of a file is written"
    store.keep((), ())
    assert left(parcels) == [] and np.array_equal(model, noise(LARGE)), "the model stays"


def test_where_the_file_system_takes_no_link_a_model_is_written(
    store: ParcelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", across)
    parcel = store.publish(ArrayKeeper(tmp_path / "arrays").keep(noise(LARGE)))
    assert parcel is not None and (store._folder / parcel.digest).read_bytes() == noise(LARGE).tobytes()


def test_the_next_model_takes_the_place_of_the_last(link: SuperLink, store: ParcelStore, tmp_path: Path) -> None:
    """Once nobody here needs it: an order may be fetched while the one before it is handed to the trainer."""
    first, second, third = (store.publish(noise(size)) for size in (LARGE, LARGE + 1, LARGE + 2))
    assert first is not None and second is not None and third is not None
    berlin, folder = client(link.silo()), tmp_path / "silo"
    kept = berlin.fetch(first, folder)
    berlin.fetch(second, folder)
    assert {file.name for file in folder.iterdir()} == {f"{each.digest}.parcel" for each in (first, second)}
    del kept
    berlin.fetch(third, folder)
    assert [file.name for file in folder.iterdir()] == [f"{third.digest}.parcel"]


def test_what_is_there_is_not_fetched_again_unless_it_is_damaged(
    link: SuperLink, store: ParcelStore, tmp_path: Path
) -> None:
    parcel = store.publish(noise(LARGE))
    assert parcel is not None
    berlin, folder = client(link.silo()), tmp_path / "silo"
    berlin.fetch(parcel, folder)
    store.keep((), ())
    assert berlin.fetch(parcel, folder).size == LARGE
    (folder / f"{parcel.digest}.parcel").write_bytes(b"x" * LARGE)
    with pytest.raises(ProtocolError, match="404"):
        berlin.fetch(parcel, folder)
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("mapped", [False, True])
def test_an_update_comes_as_a_map_whose_file_goes_with_it(
    link: SuperLink, store: ParcelStore, parcels: Path, tmp_path: Path, mapped: bool
) -> None:
    berlin, update = link.silo(), noise(LARGE)
    if mapped:
        (tmp_path / "answer").write_bytes(b"head" + update.tobytes())
        update = map_file(tmp_path / "answer", offset=4)
    ticket = store.expect(berlin.number, "update a/1", LARGE)
    assert ticket is not None and ticket == store.expect(berlin.number, "update a/1", LARGE)
    uploaded = client(berlin).upload(ticket, update)
    assert uploaded is not None
    got = store.arrived(berlin.number, ticket, uploaded, "berlin")
    np.testing.assert_array_equal(got, update)
    assert len(left(parcels)) == 1
    with pytest.raises(ProtocolError, match="nobody expects"):
        store.arrived(berlin.number, ticket, uploaded, "berlin")
    del got
    assert left(parcels) == []


def test_an_update_of_several_requests(link: SuperLink, store: ParcelStore) -> None:
    berlin, update = link.silo(), noise(MAX_PART_BYTES + 5)
    ticket = store.expect(berlin.number, "update a/1", update.size)
    assert ticket is not None
    uploaded = client(berlin).upload(ticket, update)
    assert uploaded is not None
    np.testing.assert_array_equal(store.arrived(berlin.number, ticket, uploaded, "berlin"), update)


# What is turned away.


def test_nothing_is_there_without_a_registered_nodes_signature(link: SuperLink, store: ParcelStore) -> None:
    parcel, ticket = store.publish(noise(LARGE)), store.expect(link.silo().number, "update a/1", LARGE)
    assert parcel is not None and ticket is not None
    for path in (f"{store.session}/parcels/{parcel.digest}", f"{store.session}/uploads/{ticket.name}/{'0' * 32}"):
        assert asked(link.silo(), "GET", path, signed=False)[0] == 401
        assert asked(link.silo(), "GET", path)[0] == 200


def test_an_update_is_taken_of_the_node_alone_that_it_is_expected_of(
    link: SuperLink, store: ParcelStore, parcels: Path
) -> None:
    berlin, paris = link.silo("berlin"), link.silo("paris")
    ticket = store.expect(berlin.number, "update a/1", LARGE)
    assert ticket is not None
    with pytest.raises(ProtocolError, match="404"):
        client(paris).upload(ticket, noise(LARGE))
    assert len(left(parcels)) == 1, "the ticket"
    with pytest.raises(ProtocolError, match="nobody expects"):
        store.arrived(paris.number, ticket, Uploaded("0" * 32, 5), "paris")


@pytest.mark.parametrize(
    ("told", "size", "status"),
    [
        ("bytes 0-99/100", 100, 200),
        ("bytes 0-99/101", 100, 200),
        ("bytes 0-99/200", 100, 413),
        ("bytes 1-100/101", 100, 409),
        ("bytes 0-98/100", 100, 400),
        ("bytes 0-100/101", 100, 400),
        ("bytes 0-99/99", 100, 400),
        ("bytes 0-99/*", 100, 400),
        ("", 100, 400),
    ],
)
def test_a_part_says_truly_what_it_is(link: SuperLink, store: ParcelStore, told: str, size: int, status: int) -> None:
    """101 bytes are expected, and none is there."""
    ticket = store.expect(link.silo().number, "update a/1", 101)
    assert ticket is not None
    path = f"{ticket.session}/uploads/{ticket.name}/{'0' * 32}"
    assert asked(link.silo(), "PUT", path, b"x" * size, content_range=told)[0] == status


def test_requests_are_bounded_by_their_heads(link: SuperLink, store: ParcelStore) -> None:
    parcel, ticket = store.publish(noise(LARGE)), store.expect(link.silo().number, "update a/1", 2**40)
    assert parcel is not None and ticket is not None
    upload = f"{ticket.session}/uploads/{ticket.name}/{'0' * 32}"
    told = {"content_range": f"bytes 0-{MAX_PART_BYTES}/{2**40}", "content_length": str(MAX_PART_BYTES + 1)}
    assert asked(link.silo(), "PUT", upload, **told)[0] == 413
    quota = {"content_range": f"bytes 0-{MAX_PART_BYTES - 1}/{2**40}", "content_length": str(MAX_PART_BYTES)}
    for each in range(3):  # two of them are as much as may wait
        folder = store._folder / f"node-{link.silo().number}"
        if each:
            os.truncate(os.open(folder / f"{each}.{each}", os.O_CREAT | os.O_RDWR), MAX_PART_BYTES)
    assert asked(link.silo(), "PUT", upload, **quota)[0] == 503
    download = f"{parcel.session}/parcels/{parcel.digest}"
    assert asked(link.silo(), "GET", download, range="bytes=5-")[0] == 206
    assert asked(link.silo(), "GET", download, range=f"bytes={LARGE + 1}-")[0] == 416
    assert asked(link.silo(), "GET", download, range="bytes=-5")[0] == 416
    assert asked(link.silo(), "POST", download)[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        *("lock", "{session}/lock", "{session}/parcels/lock", "{session}/parcels/../lock", "{session}/node-1/x"),
        *("{session}/parcels/" + "0" * 64, "{session}/uploads/../../x", "../v1/control/"),
    ],
)
def test_nothing_else_is_served(link: SuperLink, store: ParcelStore, path: str) -> None:
    assert asked(link.silo(), "GET", path.format(session=store.session))[0] == 404


def test_a_parcel_that_is_another_is_refused_and_nothing_of_it_stays(
    link: SuperLink, store: ParcelStore, tmp_path: Path
) -> None:
    parcel = store.publish(noise(LARGE))
    assert parcel is not None
    path = store._folder / parcel.digest
    path.write_bytes(b"x" * LARGE)
    with pytest.raises(ProtocolError, match="SHA-256"):
        client(link.silo()).fetch(parcel, tmp_path / "silo")
    path.write_bytes(b"x" * (LARGE - 1))
    with pytest.raises(ProtocolError, match="bytes of it"):
        client(link.silo()).fetch(parcel, tmp_path / "silo")
    assert [*(tmp_path / "silo").iterdir()] == []


@pytest.mark.parametrize("said", [LARGE - 1, LARGE + 1, 0, 2 * LARGE])
def test_an_update_that_is_not_as_long_as_its_silo_says_is_refused(
    link: SuperLink, store: ParcelStore, said: int
) -> None:
    berlin = link.silo()
    ticket = store.expect(berlin.number, "update a/1", 2 * LARGE - 1)
    assert ticket is not None
    uploaded = client(berlin).upload(ticket, noise(LARGE))
    assert uploaded is not None
    with pytest.raises(ProtocolError, match="length" if said in (0, 2 * LARGE) else "it says that it left"):
        store.arrived(berlin.number, ticket, Uploaded(uploaded.content, said), "berlin")


# Full disks.


def test_a_full_disk_at_the_server_sends_the_update_flowers_way(
    link: SuperLink, store: ParcelStore, parcels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    berlin = link.silo()
    ticket = store.expect(berlin.number, "update a/1", LARGE)
    assert ticket is not None
    monkeypatch.setattr(parcel_routes, "_write_at", full)
    assert client(berlin).upload(ticket, noise(LARGE)) is None
    assert left(parcels) == [ticket.name]


def test_where_nothing_can_be_written_nothing_is_published_or_expected(tmp_path: Path) -> None:
    store = ParcelStore(tmp_path / "gone", os.dup(1))
    assert store.publish(noise(LARGE)) is None
    assert store.expect(5, "update a/1", LARGE) is None


def test_a_full_disk_at_a_silo_is_said_so_and_nothing_stays(
    link: SuperLink, store: ParcelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    parcel = store.publish(noise(LARGE))
    assert parcel is not None
    monkeypatch.setattr(parcel_client, "_receive", full)
    with pytest.raises(OSError, match="No space"):
        client(link.silo()).fetch(parcel, tmp_path / "silo")
    assert [*(tmp_path / "silo").iterdir()] == []


# What stays, and what goes.


def test_what_no_message_speaks_of_goes(store: ParcelStore, parcels: Path) -> None:
    kept, gone = store.publish(noise(LARGE)), store.publish(noise(LARGE + 1))
    one, other = store.expect(7, "update a/1", 5), store.expect(7, "update a/2", 5)
    assert kept is not None and gone is not None and one is not None and other is not None
    store.keep({kept.digest}, {(7, other.name)})
    assert left(parcels) == sorted([kept.digest, other.name])
    store.end()
    assert [path.name for path in parcels.iterdir()] == ["lock"]


def test_a_session_whose_process_is_gone_goes_and_no_other(parcels: Path) -> None:
    mine = ParcelStore.begin(parcels)
    code = (
        "import pathlib, sys; from fedsync.flower import parcels; parcels.ParcelStore.begin(pathlib.Path(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, parcels], check=True)
    assert len([path for path in parcels.iterdir() if path.is_dir()]) == 2, "it ended without a word"
    tidy_up(parcels)
    assert [path.name for path in parcels.iterdir() if path.is_dir()] == [mine.session]
    other = Ticket(ParcelStore.begin(parcels).session, "")
    assert {path.name for path in parcels.iterdir() if path.is_dir()} == {mine.session, other.session}
