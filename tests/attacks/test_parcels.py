"""Large payloads as files: a silo that is after the server's files, and a server that is after a silo's machine.

Both know the code, the format and each other's addresses. The gate and the client are the real ones, over sockets.
"""

import contextlib
import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from flwr.common.constant import NOOP_FLWR_AID

from fedsync.config.gate import GateConfig
from fedsync.core.errors import ProtocolError, RunError
from fedsync.core.spans import SPAN_BYTES, map_file
from fedsync.core.transfer import MAX_SEALED_BYTES, Payload
from fedsync.core.wire import FP32, Wire, WireFormat
from fedsync.core.wire_formats import Bf16, Fp16, Int8, TopK
from fedsync.flower import messages
from fedsync.flower.internals import access_middleware, callers, parcel_client, parcel_routes
from fedsync.flower.internals.parcel_client import ParcelClient
from fedsync.flower.internals.parcel_routes import PREFIX
from fedsync.flower.internals.shares import MOST_AT_ONCE
from fedsync.flower.parcels import Parcel, ParcelStore, Ticket, Uploaded, node_folder, upload_path
from fedsync.policies.aggregate.aggregator import PlainAggregator
from tests.flower.internals.superlink import Silo, SuperLink, noise, serving

LARGE = 2 * SPAN_BYTES + 5
SLACK = 4096
"""A sealed update may be smaller than the largest one that is expected."""

CONTENT = "c" * 32


@pytest.fixture
def link(parcels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    with serving(monkeypatch, GateConfig(), parcels=parcels) as found:
        yield found


def path_of(ticket: Ticket, content: str = CONTENT) -> str:
    return f"{PREFIX}{ticket.session}/uploads/{ticket.name}/{content}"


def put(silo: Silo, ticket: Ticket, start: int, data: bytes, total: int, announced: int | None = None) -> socket.socket:
    """Begin to send a part of an upload, of which more bytes may be announced than come."""
    length = len(data) if announced is None else announced
    told = {"Content-Range": f"bytes {start}-{start + length - 1}/{total}", "Content-Length": str(length), "Host": "x"}
    head = f"PUT {path_of(ticket)} HTTP/1.1\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in {**silo.headers, **told}.items())
    line = silo.link.connect()
    line.sendall(head.encode() + b"\r\n" + data)
    return line


def status(line: socket.socket) -> int:
    with contextlib.closing(line):
        return int(line.recv(12).split()[1])


def get(silo: Silo, path: str) -> int:
    line = http.client.HTTPConnection("127.0.0.1", silo.link.port, timeout=5)
    with contextlib.closing(line):
        line.request("GET", path, headers=silo.headers)
        return line.getresponse().status


# A silo against the server: what was taken, and checked, does not change.


def test_what_was_taken_does_not_grow(link: SuperLink, store: ParcelStore, parcels: Path) -> None:
    """The silo announces more than its update has, hangs, says that it is done, and goes on when it was taken.

    Whoever linked the file into a checkpoint, or keeps it to find out who spoiled a version, has more than was checked.
    """
    berlin, update = link.silo(), noise(SPAN_BYTES)
    ticket = store.expect(berlin.number, "update a/1", SPAN_BYTES + SLACK)
    assert ticket is not None
    hanging = put(berlin, ticket, 0, update.tobytes(), SPAN_BYTES + SLACK, SPAN_BYTES + SLACK)
    folder = node_folder(store._folder, berlin.number)
    partial = upload_path(folder, ticket.name, CONTENT)
    end_s = time.monotonic() + 5
    while not (partial.exists() and partial.stat().st_size == SPAN_BYTES):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    got = store.arrived(berlin.number, ticket, Uploaded(CONTENT, SPAN_BYTES), "berlin")
    (kept,) = folder.glob("kept-*")
    hanging.sendall(b"x" * SLACK)
    assert status(hanging) == 409
    assert kept.read_bytes() == update.tobytes()
    np.testing.assert_array_equal(got, update)


def test_what_was_checked_does_not_change(link: SuperLink, store: ParcelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write of an earlier connection is late; a later connection has left the whole update meanwhile."""
    berlin, update = link.silo(), noise(SPAN_BYTES)
    ticket = store.expect(berlin.number, "update a/1", SPAN_BYTES)
    assert ticket is not None
    honest, late, taken = parcel_routes._write_at, threading.Event(), threading.Event()

    def write_at(*given: Any) -> None:
        if not late.is_set():
            late.set()
            taken.wait(10)
        honest(*given)

    monkeypatch.setattr(parcel_routes, "_write_at", write_at)
    first = put(berlin, ticket, 0, b"x" * SPAN_BYTES, SPAN_BYTES)
    assert late.wait(5)
    try:
        assert status(put(berlin, ticket, 0, update.tobytes(), SPAN_BYTES)) == 200
        got = store.arrived(berlin.number, ticket, Uploaded(CONTENT, SPAN_BYTES), "berlin")
        np.testing.assert_array_equal(got, update)
    finally:
        taken.set()
    refused = status(first)
    np.testing.assert_array_equal(got, update)
    assert refused == 409


def test_a_revoked_node_is_a_stranger_at_the_gate_too(
    link: SuperLink, store: ParcelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower asks again who it is; what the gate answers itself nobody asked for again."""
    for limit in ("_STALE_S", "_REREAD_S"):
        monkeypatch.setattr(callers, limit, 0.0)
    berlin, parcel = link.silo(), store.publish(noise(LARGE))
    ticket = store.expect(berlin.number, "update a/1", LARGE)
    assert parcel is not None and ticket is not None
    asked = [f"{PREFIX}{parcel.session}/parcels/{parcel.digest}", path_of(ticket)]
    assert [get(berlin, path) for path in asked] == [200, 200]
    link.state.delete_node(NOOP_FLWR_AID, berlin.number)
    assert [get(berlin, path) for path in asked] == [401, 401]


@pytest.mark.parametrize("start", [0, 50, 99, 101])
def test_parts_neither_overlap_nor_leave_holes(link: SuperLink, store: ParcelStore, start: int) -> None:
    berlin = link.silo()
    ticket = store.expect(berlin.number, "update a/1", 300)
    assert ticket is not None
    assert status(put(berlin, ticket, 0, b"a" * 100, 200)) == 200
    assert status(put(berlin, ticket, start, b"b" * 99, 200)) == 409
    assert status(put(berlin, ticket, 100, b"c" * 100, 200)) == 200
    got = store.arrived(berlin.number, ticket, Uploaded(CONTENT, 200), "berlin")
    assert got.tobytes() == b"a" * 100 + b"c" * 100


def test_a_ticket_ends_with_its_answer_and_with_its_server_app(
    link: SuperLink, store: ParcelStore, parcels: Path
) -> None:
    berlin = link.silo()
    ticket, other = (store.expect(berlin.number, name, 100) for name in ("update a/1", "update a/2"))
    assert ticket is not None and other is not None
    assert status(put(berlin, ticket, 0, b"a" * 100, 100)) == 200
    got = store.arrived(berlin.number, ticket, Uploaded(CONTENT, 100), "berlin")
    assert status(put(berlin, ticket, 0, b"b" * 100, 100)) == 404
    assert got.tobytes() == b"a" * 100
    store.end()
    later = ParcelStore.begin(parcels)
    assert later.expect(berlin.number, "update a/2", 100) != other
    assert status(put(berlin, other, 0, b"b" * 100, 100)) == 404


def put_as(silo: Silo, ticket: Ticket, content: str, announced: int, data: bytes = b"") -> socket.socket:
    """Begin an upload of which all is announced."""
    told = {"Content-Range": f"bytes 0-{announced - 1}/{announced}", "Content-Length": str(announced), "Host": "x"}
    head = f"PUT {path_of(ticket, content)} HTTP/1.1\r\n"
    line = silo.link.connect()
    line.sendall((head + "".join(f"{key}: {value}\r\n" for key, value in {**silo.headers, **told}.items())).encode())
    line.sendall(b"\r\n" + data)
    return line


def test_requests_at_one_time_take_no_more_than_the_quota(
    store: ParcelStore, parcels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has begun before the first byte of any has come."""
    part = 400_000
    with serving(monkeypatch, GateConfig(waiting_bytes=2**20), parcels=parcels) as link:
        berlin = link.silo()
        tickets = [store.expect(berlin.number, f"update a/{number}", part) for number in range(MOST_AT_ONCE)]
        lines = [put_as(berlin, ticket, CONTENT, part) for ticket in tickets if ticket is not None]
        time.sleep(0.5)
        for line in lines:
            with contextlib.suppress(OSError):  # those that were refused are closed
                line.sendall(b"x" * part)
        answers = [status(line) for line in lines]
        assert sorted(answers) == [200] * 2 + [503] * (MOST_AT_ONCE - 2)
        there = [each for each in node_folder(store._folder, berlin.number).iterdir() if each.suffix]
        assert sum(each.stat().st_size for each in there) == 2 * part


def test_nothing_of_an_upload_is_in_the_one_that_takes_its_place(link: SuperLink, store: ParcelStore) -> None:
    berlin = link.silo()
    ticket = store.expect(berlin.number, "update a/1", 100)
    assert ticket is not None
    assert status(put_as(berlin, ticket, "a" * 32, 100, b"a" * 100)) == 200
    assert status(put_as(berlin, ticket, "b" * 32, 60, b"b" * 60)) == 200
    assert store.arrived(berlin.number, ticket, Uploaded("b" * 32, 60), "berlin").tobytes() == b"b" * 60


def test_an_upload_that_another_takes_the_place_of_holds_no_disk(
    store: ParcelStore, parcels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection hangs with most of it there: the file is gone at once, and so is its part of the quota."""
    most = 2**20
    with serving(monkeypatch, GateConfig(waiting_bytes=most + 100), parcels=parcels) as link:
        berlin = link.silo()
        ticket = store.expect(berlin.number, "update a/1", most)
        assert ticket is not None
        folder = node_folder(store._folder, berlin.number)
        contents = [f"{number:032x}" for number in range(4)]
        hanging = []
        for content in contents:
            first = most - 1000
            assert status(put_as(berlin, ticket, content, first, b"x" * first)) == 200
            told = {"Content-Range": f"bytes {first}-{most - 1}/{most}", "Content-Length": "1000", "Host": "x"}
            line = link.connect()
            fields = "".join(f"{key}: {value}\r\n" for key, value in {**berlin.headers, **told}.items())
            line.sendall(f"PUT {path_of(ticket, content)} HTTP/1.1\r\n{fields}\r\n".encode() + b"x")
            hanging.append(line)
            time.sleep(0.2)
        assert [each.name for each in folder.iterdir() if each.suffix] == [f"{ticket.name}.{contents[-1]}"]
        opened = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        assert not [each for each in opened if str(folder) in each]
        for line in hanging:
            line.sendall(b"x" * 999)
        assert [status(line) for line in hanging] == [409, 409, 409, 200]


@pytest.mark.parametrize("name", ["Content-Range", "Range", "Content-Length", "Flwr-Signature"])
def test_what_is_said_twice_is_said_once_too_often(link: SuperLink, store: ParcelStore, name: str) -> None:
    """Or whoever stands before the gate may read the first, and the gate the last."""
    berlin = link.silo()
    ticket = store.expect(berlin.number, "update a/1", 100)
    assert ticket is not None
    told = {"Content-Range": "bytes 0-99/100", "Range": "bytes=0-", "Content-Length": "100", **berlin.headers}
    told = {key.lower(): value for key, value in told.items()}
    fields = [*told.items(), (name.lower(), told[name.lower()])]
    head = f"PUT {path_of(ticket)} HTTP/1.1\r\nHost: x\r\n"
    line = link.connect()
    line.sendall((head + "".join(f"{key}: {value}\r\n" for key, value in fields)).encode() + b"\r\n" + b"x" * 100)
    assert status(line) == 400


def test_a_body_that_does_not_come_holds_no_place(
    link: SuperLink, store: ParcelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a silo may have at a time hang; they are cut, and what they left does not keep the next one out."""
    monkeypatch.setattr(access_middleware, "time_for", lambda size: 0.3)
    berlin = link.silo()
    ticket = store.expect(berlin.number, "update a/1", 100)
    assert ticket is not None
    hanging = [put(berlin, ticket, 0, b"", 100, 100) for _ in range(MOST_AT_ONCE)]
    for line in hanging:
        with line, contextlib.suppress(ConnectionResetError):
            assert line.recv(1) == b""
    assert status(put(berlin, ticket, 0, b"a" * 100, 100)) == 200


VALUES = 3000
FORMATS: dict[str, WireFormat] = {
    "fp32": FP32, "bf16": Bf16(), "fp16": Fp16(), "int8": Int8(), "topk": TopK(0.1), "topk int8": TopK(0.1, Int8()),
}  # fmt: skip


def spoiled(wire: WireFormat, lie: float) -> Payload:
    """An update whose first value, or scale of values, is another."""
    data = np.array(wire.encode(np.ones(VALUES, np.float32))).view(np.uint8)
    at = 4 + 4 * wire.count(VALUES) if isinstance(wire, TopK) else 0
    said = np.array([lie], np.float32).view(np.uint8)[2 if isinstance(wire, Bf16) else 0 :]
    data[at : at + said.size] = said
    return data


@pytest.mark.parametrize("lie", [np.nan, np.inf, -np.inf, 1e38, -1e38])
@pytest.mark.parametrize("wire", FORMATS)
def test_no_file_brings_values_that_spoil_a_model(wire: str, lie: float, tmp_path: Path) -> None:
    aggregator = PlainAggregator(np.zeros(VALUES, np.float32), wire=Wire(up=FORMATS[wire]))
    (tmp_path / "update").write_bytes(spoiled(FORMATS[wire], lie).tobytes())
    with pytest.raises(ProtocolError, match="finite"):
        aggregator.put("berlin", "berlin/1", map_file(tmp_path / "update"))
    assert aggregator.pending == ()


# A server against a silo: what it answers is bounded, and nothing of a lie stays.


class LyingServer:
    """Answers each request with the next of some bytes, the last one again and again; endless ones go on for ever.

    Counts the requests, and the bytes either way.
    """

    def __init__(self, *answers: bytes, endless: bool = False) -> None:
        self._answers, self._endless = answers, endless
        self.requests = self.came = self.went = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            line, _ = self._listener.accept()
            with contextlib.suppress(OSError), line, line.makefile("rb") as said:
                line.settimeout(1)
                while head := said.readline():
                    while (field := said.readline()).strip():
                        head += field
                    length = re.search(rb"(?i)content-length: (\d+)", head)
                    self.came += len(said.read(int(length[1]) if length else 0))
                    self.requests += 1
                    line.sendall(self._answers[min(self.requests, len(self._answers)) - 1])
                    while self._endless:
                        self.went += line.send(b"9" * 65536)

    def client(self) -> ParcelClient:
        return ParcelClient(self.address, None, dict)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel_client, "PATIENCE_S", 0.3)


def answer(said: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {said}", *headers, "", ""]).encode() + body


DIGEST = "d" * 64
DOWNLOADS: dict[str, tuple[bytes, bool]] = {
    "other bytes": (answer("206 x", "Content-Length: 100", body=b"x" * 100), False),
    "too many": (answer("206 x", f"Content-Length: {2**62}"), True),
    "too few": (answer("206 x", "Content-Length: 99", body=b"x" * 99), False),
    "no length": (answer("206 x"), True),
    "in chunks": (answer("206 x", "Transfer-Encoding: chunked", "Content-Length: 100", "", "ffffff"), True),
    "from the start": (answer("200 x", "Content-Length: 100", body=b"x" * 100), False),
    "an endless refusal": (answer("404 x"), True),
    "nothing": (answer("206 x", "Content-Length: 100", "Connection: close"), False),
}


@pytest.mark.parametrize("lie", DOWNLOADS)
def test_a_model_is_what_was_said_or_nothing_stays(lie: str, tmp_path: Path) -> None:
    said, endless = DOWNLOADS[lie]
    server = LyingServer(said, endless=endless)
    with pytest.raises((ProtocolError, RunError)):
        server.client().fetch(Parcel("0" * 16, DIGEST, 100), tmp_path)
    left = [file for file in tmp_path.iterdir() if file.stat().st_size]
    assert left == []
    assert server.went < 2**24, "what sockets hold"


@pytest.mark.parametrize("upload", [False, True])
def test_a_silo_s_proof_goes_to_its_server_alone(upload: bool, tmp_path: Path) -> None:
    other = LyingServer(answer("206 x", "Content-Length: 0"))
    server = LyingServer(answer("307 x", f"Location: http://{other.address}/", "Content-Length: 0"))
    with pytest.raises(ProtocolError, match="307"):
        if upload:
            server.client().upload(Ticket("0" * 16, "0" * 32), noise(100))
        else:
            server.client().fetch(Parcel("0" * 16, DIGEST, 100), tmp_path)
    assert other.requests == 0


def counted(number: object) -> bytes:
    return answer("200 x", f"Content-Length: {len(str(number))}", body=str(number).encode())


UPLOADS: dict[str, tuple[tuple[bytes, ...], bool]] = {
    "an endless number": ((answer("200 x"),), True),
    "an endless number after a part": ((counted(0), answer("200 x")), False),
    "no number": ((counted("all"),), False),
    "fewer than none": ((counted(-5),), False),
    "more than all": ((counted(LARGE + 1),), False),
    "never one more": ((counted(0),), False),
    "an endless refusal": ((answer("404 x"),), True),
}


@pytest.mark.parametrize("lie", UPLOADS)
def test_an_upload_that_the_server_counts_wrongly_ends(lie: str) -> None:
    answers, endless = UPLOADS[lie]
    server = LyingServer(*answers, endless=endless)
    outcome: list[object] = []

    def upload() -> None:
        try:
            outcome.append(server.client().upload(Ticket("0" * 16, "0" * 32), noise(LARGE)))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=upload, daemon=True)
    thread.start()
    thread.join(10)
    assert outcome and isinstance(outcome[0], ProtocolError | RunError), outcome
    assert server.went < 2**24, "what sockets hold"


def test_a_server_that_names_many_runs_fills_no_disk(link: SuperLink, store: ParcelStore, tmp_path: Path) -> None:
    """The folder of a trainer is called after the run's specification, which is the server's to choose."""
    way = ParcelClient(f"127.0.0.1:{link.port}", None, lambda: link.silo().headers)
    for run in range(4):
        parcel = store.publish(noise(LARGE + run % 2))
        assert parcel is not None
        assert way.fetch(parcel, tmp_path / f"run-{run}").size == LARGE + run % 2
    files = [file for file in tmp_path.glob("run-*/*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) == LARGE + 1


NAMES: list[tuple[str, str]] = [
    *(("parcel", name) for name in ("../../keys/silo.key/5", f"{'0' * 16}/../{'0' * 61}/5", f"/etc/{DIGEST}/5")),
    *(("parcel", f"{'0' * 16}/{DIGEST}/{size}") for size in (MAX_SEALED_BYTES + 1, 10**15, "-1", "5\n", "\u0665", "")),
    *(("parcel", name) for name in (f"{'0' * 16}/{'D' * 64}/5", f"{'0' * 16}/{DIGEST}0/5", f"{'0' * 16}\n/{DIGEST}/5")),
    *(("ticket", name) for name in ("../../x", f"{'0' * 16}/{'0' * 32}/../x", f"{'0' * 16}/{'0' * 32}\r\nX: y", "")),
]


@pytest.mark.parametrize(("key", "name"), NAMES)
def test_names_are_numbers_and_no_paths(key: str, name: str) -> None:
    content = RecordDict({"fedsync": ConfigRecord({"spec": "{}", "text": "x", key: name})})
    message: Any = SimpleNamespace(content=content)
    read: Callable[[Any], object] = messages.read_ticket if key == "ticket" else messages.read_request
    with pytest.raises(ProtocolError):
        read(message)
