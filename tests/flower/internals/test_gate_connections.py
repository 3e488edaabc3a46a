"""What strangers and silos can hold of a SuperLink's connections, over real sockets."""

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.supercore.primitives.asymmetric import generate_key_pairs
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import serving as serving_module
from fedsync.flower.internals.access_middleware import MAX_REQUEST_BYTES
from fedsync.flower.internals.lines import MOST_OF_ONE
from tests.flower.internals.superlink import Silo, SuperLink, serving

PATIENCE_S = 0.6
MOST, OF_ONE_ADDRESS = 40, 20
MUCH = 6 * 2**20


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    with serving(monkeypatch, limits(PATIENCE_S)) as found:
        yield found


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    """One that waits longer than the tests do."""
    with serving(monkeypatch, limits(300.0)) as found:
        yield found


def limits(patience_s: float) -> GateConfig:
    return GateConfig(connections=MOST, connections_per_address=OF_ONE_ADDRESS, patience_s=patience_s)


def head(path: str, length: int, headers: dict[str, str] | None = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Type: {PROTOBUF_MEDIA_TYPE}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join([*lines, "", ""]).encode()


def ended(line: socket.socket, within_s: float) -> float:
    """Seconds until the other side has ended the connection."""
    begin = time.monotonic()
    line.settimeout(within_s)
    try:
        while line.recv(2**16):
            pass
    except ConnectionError:
        pass
    return time.monotonic() - begin


def status(line: socket.socket) -> int:
    """Status of the answer; 0 if the connection was ended without one."""
    try:
        answer = line.recv(2**16)
    except ConnectionError:
        return 0
    return int(answer.split()[1]) if answer else 0


def test_a_connection_that_says_nothing_ends(link: SuperLink) -> None:
    assert PATIENCE_S / 2 < ended(link.connect(), 5) < 5 * PATIENCE_S
    assert link.lines == 0


def test_a_head_that_does_not_end_ends_the_connection(link: SuperLink) -> None:
    line = link.connect()
    begin = time.monotonic()
    with pytest.raises(OSError):
        for _ in range(50):
            line.sendall(b"X")
            time.sleep(0.1)
    assert time.monotonic() - begin < 5 * PATIENCE_S, "a byte at a time gives no more time"


def test_an_endless_head_is_not_kept(patient: SuperLink) -> None:
    line = patient.connect()
    line.sendall(b"GET /health HTTP/1.1\r\nX: ")
    with pytest.raises(OSError):
        for _ in range(64):
            line.sendall(b"x" * 2**20)
            time.sleep(0.001)


def test_a_connection_ends_when_the_next_head_does_not_come(link: SuperLink) -> None:
    line = link.connect()
    line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status(line) == 200
    line.sendall(b"G")  # by which uvicorn would wait for ever
    assert ended(line, 5) < 5 * PATIENCE_S


def test_who_sends_more_and_more_requests_at_once_is_cut_off(link: SuperLink) -> None:
    line = link.connect()
    with pytest.raises(OSError):
        for _ in range(100):
            line.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
            time.sleep(0.005)


def test_what_a_stranger_sends_is_not_read(link: SuperLink) -> None:
    line = link.connect()
    line.sendall(head("/v1/fleet/push-object", MAX_REQUEST_BYTES))
    assert status(line) == 401
    line = link.connect()
    line.sendall(head("/v1/fleet/push-object", MAX_REQUEST_BYTES, link.silo().headers | {"flwr-signature": "AAAA"}))
    assert status(line) == 401
    assert ended(line, 5) < 4


def test_a_slow_body_of_a_silo_ends(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_module, "GRACE_S", 0.2)
    monkeypatch.setattr(serving_module, "SLOWEST", 2**20)
    line = link.connect()
    line.sendall(head("/v1/fleet/push-object", 2**19, link.silo().headers))
    begin = time.monotonic()
    with pytest.raises(OSError):
        for _ in range(100):
            line.sendall(b"x")
            time.sleep(0.1)
    assert 0.5 < time.monotonic() - begin < 5


def ask_for_much(link: SuperLink, before: Callable[[], None] = lambda: None) -> socket.socket:
    """A connection on which a silo has asked for 6 MiB, which it has not begun to read.

    Args:
        link: has them from the silo.
        before: what happens between the two.
    """
    berlin = link.silo()
    assert berlin.push(berlin.answer(link.order(berlin), MUCH)) == 3
    before()
    parts = [name for name in link.state.object_store.store if len(link.state.object_store.get(name)) > MUCH / 2]
    body = PullObjectRequest(node=berlin.node, run_id=link.run, object_id=parts[0]).SerializeToString()
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    line.connect(("127.0.0.1", link.port))
    line.sendall(head("/v1/fleet/pull-object", len(body), berlin.headers) + body)
    return line


def test_an_answer_that_nobody_takes_ends(patient: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    def hurry() -> None:
        monkeypatch.setattr(serving_module, "GRACE_S", 0.3)
        monkeypatch.setattr(serving_module, "SLOWEST", 2**27)

    line = ask_for_much(patient, hurry)
    end = time.monotonic() + 20
    for wanted in (True, False):
        while any(other.busy for other in list(patient.server.lines._all)) is not wanted:
            assert time.monotonic() < end, "6 MiB are kept for who does not read them"
            time.sleep(0.01)
    line.close()


def test_a_slow_line_has_its_answer(link: SuperLink) -> None:
    line = ask_for_much(link)
    time.sleep(3 * PATIENCE_S)
    line.settimeout(20)
    got = 0
    while got < MUCH:
        there = line.recv(2**16)
        assert there, "the answer was cut"
        got += len(there)


def test_strangers_who_fill_all_places_do_not_keep_a_silo_out(patient: SuperLink) -> None:
    held = [patient.connect(f"127.0.0.{number % 5 + 2}") for number in range(3 * MOST)]
    patient.silo().pull()
    assert patient.lines <= MOST
    for line in held:
        line.close()


def test_strangers_at_a_silos_address_do_not_keep_it_out(patient: SuperLink) -> None:
    stop, held = threading.Event(), []

    def flood() -> None:
        while not stop.wait(0.01):
            held.append(patient.connect())

    strangers = threading.Thread(target=flood)
    strangers.start()
    try:
        while len(held) < 2 * OF_ONE_ADDRESS:
            patient.silo().pull()
    finally:
        stop.set()
        strangers.join()
    assert patient.lines <= OF_ONE_ADDRESS + 2


def test_one_silo_does_not_have_all_places(patient: SuperLink) -> None:
    paris = patient.silo("paris")
    held = []
    for _ in range(2 * MOST_OF_ONE):
        line = patient.connect()
        line.sendall(head("/v1/fleet/push-object", 2**16, paris.headers))  # and no body
        held.append(line)
    answered, _, _ = select.select(held, [], [], 20)
    assert {status(line) for line in answered} <= {503, 0}
    assert len([line for line in list(patient.server.lines._all) if line.owner == paris.number]) <= MOST_OF_ONE
    patient.silo().pull()


def test_silos_of_a_node_that_has_just_been_registered_are_known_at_once(link: SuperLink) -> None:
    link.silo().pull()
    begin = time.monotonic()
    for name in ("rome", "oslo"):
        link.join(name).pull()
    assert time.monotonic() - begin < 5


def test_nodes_are_read_once_a_second_whoever_asks(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []
    ask = link.state.get_node_info

    def counted(**filters: object) -> object:
        read.append(time.monotonic())
        return ask(**filters)

    monkeypatch.setattr(link.state, "get_node_info", counted)
    lines, begin = [], time.monotonic()
    for _ in range(10):
        stranger = Silo(link, 5, link.silo().client, NodeAuthHttpInterceptor(*generate_key_pairs()))
        line = link.connect()
        line.sendall(head("/v1/fleet/pull-messages", 0, stranger.headers))
        lines.append(line)
    assert [status(line) for line in lines] == [401] * 10
    assert len(read) <= 2 + (time.monotonic() - begin)
