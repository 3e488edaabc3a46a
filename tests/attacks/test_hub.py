"""Strangers and lying silos at the hub's door, and a lying server's join."""

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.model.chunked_arrays import SPAN_BYTES
from fedsync.transport.hub import door, hub
from fedsync.transport.hub_line import HubLine, JoinRefused, ReceivedQuestion
from fedsync.transport.join import Join, digest_of, new_secret
from fedsync.transport.port import BESIDE_BYTES, MOST_TEXT_BYTES, Blob, FrameHead, SiloQuestion
from tests.e2e.deployed import wait_for
from tests.transport.hubs import Served, asked, served

HOST = "Host: hub\r\n"


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


@contextmanager
def opened(up: Served, text: str, body: bytes = b"", wait_s: float = 5.0) -> Iterator[ssl.SSLSocket]:
    """A connection of one's own, on which this is written."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=up.authority)
    with (
        socket.create_connection(("127.0.0.1", up.port), wait_s) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as line,
    ):
        line.sendall(text.encode() + body)
        yield line


def spoken(up: Served, text: str, body: bytes = b"", wait_s: float = 5.0) -> str:
    """Head of the answer to what is written on a connection; empty where it is closed without one."""
    found = b""
    try:
        with opened(up, text, body, wait_s) as line:
            while b"\r\n\r\n" not in found and (more := line.recv(65536)):
                found += more
    except (TimeoutError, ConnectionError):
        return "timeout"
    return found.decode(errors="replace")


def head_of(line: HubLine, method: str, path: str, **more: object) -> str:
    names = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in more.items())
    return f"{method} /v1/fedsync{path} HTTP/1.1\r\n{HOST}authorization: Bearer {line._secret}\r\n{names}\r\n"


def status(up: Served, line: HubLine, method: str, path: str, body: bytes = b"", **more: object) -> str:
    """Status of the response to a silo's request."""
    return spoken(up, head_of(line, method, path, **more), body)[9:12]


def answered(up: Served, line: HubLine, head: FrameHead | str, body: bytes = b"", **more: object) -> str:
    """Status of the response to a silo's answer."""
    text = head if isinstance(head, str) else head.dump()
    return status(up, line, "POST", "/answers", body, fedsync_head=text, **more)


@pytest.mark.parametrize("path", ["/join", "/answers", "/uploads/" + "0" * 32])
@pytest.mark.parametrize("who", ["", "authorization: Bearer guess\r\n", "authorization: Basic YTpi\r\n"])
def test_of_a_stranger_no_body_is_read(path: str, who: str, up: Served) -> None:
    """It announces a gigabyte, sends the head alone, and has its answer."""
    method = "PUT" if "uploads" in path else "POST"
    session = f"fedsync-session: {'0' * 64}\r\n" if path == "/join" else ""
    size = 0 if path == "/join" else 10**9
    found = spoken(up, f"{method} /v1/fedsync{path} HTTP/1.1\r\n{HOST}{who}{session}content-length: {size}\r\n\r\n")
    assert found.startswith("HTTP/1.1 401") and "connection: close" in found.lower()


@pytest.mark.parametrize("path", ["/", "/v1/fedsync", "/v1/fedsync/", "/docs", "/openapi.json", "/v1/fedsync/orders/x"])
def test_there_is_nothing_else_to_find(path: str, up: Served) -> None:
    assert spoken(up, f"GET {path} HTTP/1.1\r\n{HOST}\r\n").startswith("HTTP/1.1 404")


def test_heads_are_bounded_and_end_in_time(up: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    long = f"GET /v1/fedsync/orders HTTP/1.1\r\n{HOST}x: {'a' * 3_000_000}\r\n\r\n"
    # Read in pieces, of which the first are no whole head; it is closed while it is still being sent.
    assert spoken(up, long)[:12] in ("HTTP/1.1 400", "HTTP/1.1 431", "timeout", "")
    monkeypatch.setattr(hub, "STRANGER_S", 0.4)
    begin_s = time.monotonic()
    assert spoken(up, f"GET /v1/fedsync/orders HTTP/1.1\r\n{HOST}x: a") == "", "it never ends, and is closed"
    assert spoken(up, "") == "", "nor is one without a request kept"
    assert time.monotonic() - begin_s < 4


def test_idle_strangers_keep_no_silo_out(up: Served) -> None:
    """Connections without a request held all places, for ten seconds each."""
    assert up.hub._server is not None
    up.hub._server.config.limit_concurrency = 16
    with ExitStack() as held:
        for _ in range(20):
            held.enter_context(opened(up, ""))
        line = up.joined("a")
        assert up.hub.send("a", SiloQuestion("hello")) is not None
        assert asked(line).text == "hello"


def test_bodies_are_bounded_by_what_is_asked(up: Served) -> None:
    line, body = up.joined("a"), b"12345"
    for number, size in [(1, 111), (2, 10**9), (99, BESIDE_BYTES + 11)]:
        name = up.hub.send("a", SiloQuestion("how far", most=100)) if number < 99 else None
        assert answered(up, line, FrameHead(10, number), content_length=size) == "413"
        ended = [(each.name, each.check, each.payload) for each in up.hub.receive(0.1)]
        assert ended == ([] if name is None else [(name, "length", None)]), "nobody waits for another answer"
    up.hub.send("a", SiloQuestion("how far", most=100))
    numbers = ({"text": MOST_TEXT_BYTES + 1}, {"text": -1}, {"number": 1e3})
    for bad in ["", "x", "[]", "{}x", *map(json.dumps, numbers)]:
        assert answered(up, line, bad, body, content_length=5) == "400", bad
    chunked = b"5\r\n12345\r\n0\r\n\r\n"
    assert answered(up, line, FrameHead(5, 3), chunked, transfer_encoding="chunked") == "411"
    both = answered(up, line, FrameHead(5, 3), chunked, transfer_encoding="chunked", content_length=5)
    assert both in ("400", "411")
    assert answered(up, line, FrameHead(10, 3), body, content_length=5) == "400", "less than its head says"
    assert up.hub.receive(0.1) == []


def test_a_slow_body_is_given_up(up: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BODY_S", 0.2)
    line = up.joined("a")
    up.hub.send("a", SiloQuestion("how far"))
    assert answered(up, line, FrameHead(10, 1), b"123", content_length=10) == "408"


def test_one_silo_holds_no_more_than_its_requests(up: Served) -> None:
    line, other = up.joined("a"), up.joined("b")
    up.hub.send("a", SiloQuestion("train"))
    head = head_of(line, "POST", "/answers", fedsync_head=FrameHead(10, 1).dump(), content_length=10)
    with ExitStack() as held:
        for _ in range(door.MOST_OPEN):
            held.enter_context(opened(up, head, b"1"))
        asks = head_of(line, "GET", "/orders?after=0")
        wait_for(lambda: spoken(up, asks, wait_s=0.5)[9:12] == "429", "all places of a silo are taken", 10.0)
        up.hub.send("b", SiloQuestion("train"))
        assert other.asked(0) is not None, "others are served"


@pytest.mark.parametrize("digest", ["..%2f..%2fsessions.json", "%2e%2e/sessions.json", "0" * 64, "A" * 64, "*"])
def test_no_file_is_reached_by_its_name(digest: str, up: Served) -> None:
    line = up.joined("a")
    for method, path in [("GET", f"/blobs/{digest}"), ("HEAD", f"/uploads/{digest}")]:
        assert status(up, line, method, path) == "404"


def test_an_upload_is_its_silo_s_and_no_larger_than_it_may_be(up: Served, tmp_path: Path) -> None:
    line, other = up.joined("a"), up.joined("b")
    most = 2 * BESIDE_BYTES
    up.hub.send("a", SiloQuestion("train", most=most))
    ticket = asked(line).ticket
    assert ticket
    place = f"/uploads/{ticket}"

    def put(length: int, sent: int, body: bytes = b"", offset: int = 0) -> str:
        told = {"upload_offset": offset, "upload_sha256": "0" * 64, "upload_length": length, "content_length": sent}
        return status(up, line, "PUT", place, body, **told)

    assert status(up, other, "HEAD", place) == "404"
    assert [put(*sizes) for sizes in [(most, most + 1), (100, 50), (50, 100)]] == ["413"] * 3
    assert put(5, 5, offset=3) == "409"
    assert put(5, 5, b"12345") == "422", "its digest is another one"
    assert not list((tmp_path / "hub" / "uploads").iterdir())
    assert answered(up, line, FrameHead(1, 1, ticket=ticket), b"x", content_length=1) == "409", "it is not whole"
    assert up.hub.receive(0.1) == []
    assert put(most + 1, most + 1) == "413"
    (answer,) = up.hub.receive(1)
    assert answer.check == "length" and answer.payload is None, "nobody waits for another answer"
    assert status(up, line, "HEAD", place) == "404"


def begun(up: Served, line: HubLine, nbytes: int) -> tuple[ReceivedQuestion, str]:
    """A question whose answer is an upload of so many bytes, and the head of the request that begins it."""
    up.hub.send("a", SiloQuestion("train", most=nbytes))
    question = asked(line)
    told = {"upload_offset": 0, "upload_length": nbytes, "content_length": nbytes, "upload_sha256": "0" * 64}
    return question, head_of(line, "PUT", f"/uploads/{question.ticket}", **told)


def test_an_earlier_connection_of_an_upload_writes_no_more(up: Served, tmp_path: Path) -> None:
    line, nbytes, uploads = up.joined("a"), 2 * SPAN_BYTES, tmp_path / "hub" / "uploads"
    question, head = begun(up, line, nbytes)
    with opened(up, head, bytes(nbytes - 1)) as earlier:
        wait_for(lambda: any(uploads.iterdir()), "the upload has begun", 10.0)
        status(up, line, "HEAD", f"/uploads/{question.ticket}")
        (file,) = uploads.iterdir()
        there = file.stat().st_size
        earlier.sendall(b"0")
        assert earlier.recv(65536)[9:12] == b"409"
    assert 0 < there == file.stat().st_size


def test_of_two_connections_that_send_one_upload_the_later_counts(up: Served, tmp_path: Path) -> None:
    line, data = up.joined("a"), np.arange(3 * BESIDE_BYTES, dtype=np.uint32).view(np.uint8)
    uploads = tmp_path / "hub" / "uploads"
    question, head = begun(up, line, data.nbytes)
    with opened(up, head, bytes(data.nbytes - 1)):
        wait_for(lambda: any(uploads.iterdir()), "the upload has begun", 10.0)
        line.answer(question, "done", data)
        (answer,) = up.hub.receive(5)
        assert answer.payload is not None
        assert answer.payload[-1000:].tobytes() == data[-1000:].tobytes()
        del answer
    time.sleep(0.5)
    assert not list(uploads.iterdir()), "what it had sent is written nowhere"


def test_an_answer_is_only_to_one_s_own_questions(up: Served) -> None:
    line, other = up.joined("a"), up.joined("b")
    up.hub.send("a", SiloQuestion("train"))
    question = asked(line)
    other.answer(question, "I am a")
    assert up.hub.receive(0.1) == []
    other.answer(replace(question, number=2**50), "later")
    line.answer(question, "I am")
    assert [each.text for each in up.hub.receive(5)] == ["I am"]


def test_numbers_that_a_silo_makes_up_harm_itself_alone(up: Served) -> None:
    line = up.joined("a")
    for after in ("-1", "1e3", "9" * 16, "x", ""):
        assert status(up, line, "GET", f"/orders?after={after}") == "400"
    up.hub.send("a", SiloQuestion("one"))
    assert spoken(up, head_of(line, "GET", f"/orders?after={'9' * 15}"), wait_s=0.3) == "timeout"
    up.hub.send("a", SiloQuestion("two"))
    found = asked(line, 1)
    assert (found.number, found.text) == (2, "two")


def test_a_session_has_a_secret_of_its_own(up: Served) -> None:
    join, secret = up.invited("a"), new_secret()
    up.line(join, secret).join()
    other = up.invited("b")
    for taken in (secret, other.secret):
        with pytest.raises(JoinRefused):
            up.line(other, taken).join()
    up.line(other).join()
    kept = (up.hub._sessions._file).read_text()
    assert join.secret not in kept and secret not in kept and digest_of(secret) in kept
    assert up.hub._sessions._file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ["http://10.0.0.1"]},
        {"addresses": ["https://user:word@hub.example"]},
        {"addresses": ["https://hub.example?x=1"]},
        {"addresses": ["file:///etc/passwd"]},
        {"addresses": []},
        {"addresses": ["https://h"] * 9},
        {"secret": "short"},
        {"secret": "x\r\ny" + "a" * 40},
        {"authority": "x" * 40_000},
        {"silo": 3},
        {"more": 1},
    ],
)
def test_a_join_that_is_none_is_refused(change: dict[str, Any]) -> None:
    join = Join(("https://hub.example:8443",), new_secret(), "PEM", "run", "a")
    assert Join.parse(join.dump()) == join
    with pytest.raises(ProtocolError):
        Join.parse(json.dumps({**json.loads(join.dump()), **change}))


def test_a_server_steers_no_silo_to_a_host_that_its_owner_has_not_named() -> None:
    join = Join(("https://10.0.0.7:9", "https://hub.example:8443"), new_secret(), "PEM", "run", "a")
    kept = join.trusted(["hub.example"], "OWN PEM")
    assert (kept.addresses, kept.authority) == (("https://hub.example:8443",), "OWN PEM")
    assert join.trusted(["hub.example"], None).authority == "PEM"
    with pytest.raises(ConfigError, match=r"the server names 10\.0\.0\.7, hub\.example"):
        join.trusted(["other.example"], None)


class LyingHub(threading.Thread):
    """Answers each request with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        super().__init__(daemon=True)
        self._answer, self._listener = answer, socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        while True:
            try:
                line = self._listener.accept()[0]
            except OSError:
                return
            with line, suppress(ConnectionError):
                line.recv(65536)
                line.sendall(self._answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def reply(head: str, body: bytes = b"") -> bytes:
    told = f"fedsync-head: {head}\r\ncontent-length: {len(body)}\r\nconnection: close"
    return f"HTTP/1.1 200 OK\r\n{told}\r\n\r\n".encode() + body


@contextmanager
def lying(answer: bytes) -> Iterator[HubLine]:
    """A silo's line to a hub that answers so."""
    liar = LyingHub(answer)
    line = HubLine(Join((liar.address,), new_secret(), "", "run", "a"), new_secret())
    try:
        yield line
    finally:
        line.close()
        liar.close()


@pytest.mark.parametrize(
    "answer",
    [
        reply("nonsense", b"x"),
        reply(FrameHead(5, 1).dump(), b"x"),
        reply(FrameHead(1, 0).dump(), b"x"),
        reply(FrameHead(2, 1).dump(), b"\xff\xfe"),
        reply('{"text":1,"number":1,"blob":"../../etc"}', b"x"),
        reply('{"text":1,"number":1,"ticket":"../../etc"}', b"x"),
        reply(FrameHead(1, 1, "0" * 64, 2**40).dump(), b"x"),
        reply(FrameHead(1, 1).dump(), bytes(MOST_TEXT_BYTES + BESIDE_BYTES + 1)),
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    ],
)
def test_a_lying_hub_s_question_is_refused_and_no_redirection_followed(answer: bytes) -> None:
    with lying(answer) as line, pytest.raises(ProtocolError):
        line.asked(0)


def test_a_blob_with_no_end_fills_no_disk(tmp_path: Path) -> None:
    endless = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + bytes(5_000_000)
    with lying(endless) as line, pytest.raises(ProtocolError, match="more than its 10000 bytes"):
        line.fetch(Blob("0" * 64, 10_000), tmp_path / "model")
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 10_000
