"""Who may ask a SuperLink for what, told from the head of a request; no stranger's body is read."""

import asyncio
import base64
import hashlib
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.runtime_pb2 import AcquireTaskRequest, GetNodesRequest
from flwr.supercore.auth import compute_superexec_signature, derive_auth_secret
from flwr.supercore.constant import NodeStatus
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedsync.common.proxies import Way
from fedsync.config.gate import GateConfig
from fedsync.flower.internals import callers
from fedsync.flower.internals.access_middleware import (
    MAX_REQUEST_BYTES,
    MAX_SMALL_BYTES,
    AccessMiddleware,
    Receive,
    Scope,
    Send,
)
from fedsync.flower.internals.callers import Headers
from fedsync.flower.internals.registration import node_public_key
from fedsync.flower.internals.shares import Shares
from fedsync.identity.node_keys import make_node_key
from fedsync.ops.doctor import network
from tests.flower.internals.superlink import SECRET, SUPEREXEC, SuperLink, serving

PUSH, POLL = "/v1/fleet/push-object", "/v1/fleet/pull-messages"
REGISTER, ACTIVATE = "/v1/fleet/register-node", "/v1/fleet/activate-node"
CONTROL, RUNTIME, ACQUIRE = "/v1/control/register-node", "/v1/runtime/get-nodes", "/v1/runtime/acquire-task"
ELSEWHERE, HERE = "203.0.113.9", "127.0.0.1"


class Believing:
    """Believes what a header says."""

    async def node(self, headers: Headers) -> int | None:
        return 7 if b"node" in headers else None

    async def is_app(self, headers: Headers) -> bool:
        return b"app" in headers

    def is_operator(self, headers: Headers) -> bool:
        return b"operator" in headers

    def is_superexec(self, headers: Headers) -> bool:
        return b"superexec" in headers


def ask(
    path: str, host: str | None, *headers: tuple[bytes, bytes], own: str | None = None, authenticated: bool = True
) -> int:
    """Status of the answer to a client that asks an application behind the gate, which answers 200."""
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nobody reads what a stranger sends")

    async def play() -> None:
        believing: Any = Believing()
        behind = AccessMiddleware(app, believing, Shares(2**30), authenticated=authenticated)
        server = None if own is None else (own, 9092)
        client = None if host is None else (host, 5)
        await behind({"type": "http", "path": path, "client": client, "server": server, "headers": list(headers)},
                     receive, send)  # fmt: skip

    asyncio.run(play())
    return int(sent[0]["status"])


@pytest.mark.parametrize("host", [HERE, ELSEWHERE, None])
def test_silos_reach_the_fleets_interface_from_anywhere(host: str | None) -> None:
    assert ask(POLL, host, (b"node", b"")) == 200
    assert ask("/health", host) == 200


@pytest.mark.parametrize(("path", "status"), [(POLL, 401), (PUSH, 401), (REGISTER, 412), (ACTIVATE, 412)])
@pytest.mark.parametrize("host", [HERE, ELSEWHERE])
def test_a_stranger_does_not(path: str, status: int, host: str) -> None:
    assert ask(path, host) == status
    assert ask(path, host, (b"operator", b""), (b"app", b"")) == status


def test_nodes_register_themselves_only_where_none_is_authenticated() -> None:
    assert ask(REGISTER, ELSEWHERE, authenticated=False) == 200
    assert ask(ACTIVATE, ELSEWHERE, authenticated=False) == 412
    assert ask(REGISTER, ELSEWHERE, (b"content-length", b"100000"), authenticated=False) == 413


@pytest.mark.parametrize(
    ("path", "proof"),
    [(CONTROL, b"operator"), (RUNTIME, b"app"), (ACQUIRE, b"superexec"), ("/docs", b"operator"),
     ("/v1/fleet", b"operator"), ("/v1/fleetx/", b"operator"), ("/", b"operator"), ("/v1/runtime", b"operator")],
)  # fmt: skip
@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
     ("10.0.0.1", False), ("203.0.113.9", False), ("::ffff:10.0.0.1", False), ("2001:db8::1", False),
     ("localhost", False), ("", False), (None, False)],
)  # fmt: skip
def test_everything_else_is_for_those_who_prove_it_on_the_servers_machine(
    path: str, proof: bytes, host: str | None, here: bool
) -> None:
    assert ask(path, host, (proof, b"")) == (200 if here else 403)
    others = {b"operator", b"app", b"superexec", b"node"} - {proof}
    assert ask(path, host, *[(other, b"") for other in others]) == (401 if here else 403)


def test_the_servers_machine_may_use_its_outward_address() -> None:
    assert ask(CONTROL, "192.0.2.1", (b"operator", b""), own="192.0.2.1") == 200
    assert ask(CONTROL, "192.0.2.2", (b"operator", b""), own="192.0.2.1") == 403


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        (b"content-length", b"0", 200),
        (b"content-length", str(MAX_REQUEST_BYTES).encode(), 200),
        (b"content-length", str(MAX_REQUEST_BYTES + 1).encode(), 413),
        (b"content-length", b"9" * 5000, 413),
        (b"content-length", b"-1", 411),
        (b"content-length", b"", 411),
        (b"transfer-encoding", b"chunked", 411),
        (b"accept", b"*/*", 200),  # without a body
    ],
)
def test_a_silos_request_is_no_longer_than_it_may_be_and_says_so(header: bytes, value: bytes, status: int) -> None:
    node = (b"node", b"")
    assert ask(PUSH, ELSEWHERE, (header, value), node) == status
    assert ask(PUSH, HERE, (header, value), node) == status, "it may come through a tunnel"
    assert ask(CONTROL, HERE, (header, value), (b"operator", b"")) == 200, "operators send whole projects"


def test_only_data_are_long() -> None:
    long = (b"content-length", str(MAX_SMALL_BYTES + 1).encode())
    assert ask(POLL, ELSEWHERE, (b"node", b""), long) == 413
    assert ask(ACQUIRE, HERE, (b"superexec", b""), long) == 413
    assert ask("/health", ELSEWHERE, (b"content-length", b"1")) == 413


@pytest.mark.parametrize("name", [b"authorization", b"content-length", b"flwr-public-key", b"flwr-task-token"])
def test_what_proves_something_comes_once(name: bytes) -> None:
    """Else one of the two might be looked at here, and the other by Flower."""
    assert ask(POLL, ELSEWHERE, (b"node", b""), (name, b"0"), (name, b"0")) == 400


def test_what_flower_sends_at_once_passes() -> None:
    """A part of an array; and the names, of 64 letters, of a model's 100 000 tensors and their data, as a tree."""
    assert FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE < MAX_REQUEST_BYTES / 2
    name = "0" * 64
    tensor = ObjectTree(object_id=name, children=[ObjectTree(object_id=name)])
    assert ObjectTree(object_id=name, children=[tensor] * 100_000).ByteSize() < MAX_REQUEST_BYTES


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    with serving(monkeypatch, GateConfig()) as found:
        yield found


def post(link: SuperLink, path: str, body: bytes, **headers: str) -> int:
    kind = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    url = f"http://127.0.0.1:{link.port}{path}"
    return httpx.post(url, content=body, headers={**kind, **sent}, timeout=20).status_code


def test_operators_have_the_secret(link: SuperLink) -> None:
    body = ListNodesRequest().SerializeToString()
    path = "/v1/control/list-nodes"
    assert post(link, path, body) == 401
    for wrong in ("Bearer", f"Bearer {'1' * 64}", SECRET, f"Basic {SECRET}", f"Bearer {SECRET[:-1]}"):
        assert post(link, path, body, authorization=wrong) == 401
    assert post(link, path, body, authorization=f"Bearer {SECRET}") == 200
    assert post(link, "/v1/control/start-run", b"") == 401
    assert httpx.get(f"http://127.0.0.1:{link.port}/docs").status_code == 401
    assert httpx.get(f"http://127.0.0.1:{link.port}/health").status_code == 200


def test_apps_have_a_token(link: SuperLink) -> None:
    body = GetNodesRequest().SerializeToString()
    for wrong in ("", "x", "0" * 256, link.token[:-1]):
        assert post(link, RUNTIME, body, flwr_task_token=wrong) == 401
    for _ in range(2):
        assert post(link, RUNTIME, body, flwr_task_token=link.token) == 200
    assert post(link, "/v1/runtime/start-automation", b"") == 401


def test_the_superexec_signs(link: SuperLink) -> None:
    body = AcquireTaskRequest(supported_task_types=["flwr-serverapp"]).SerializeToString(deterministic=True)

    def acquire(secret: bytes, nonce: str) -> int:
        at, digest = int(time.time()), hashlib.sha256(body).hexdigest()
        signature = compute_superexec_signature(
            auth_secret=derive_auth_secret(secret),
            method="/flwr.proto.Runtime/AcquireTask",
            timestamp=at,
            nonce=nonce,
            body_sha256=digest,
        )
        signed = {"ts": str(at), "nonce": nonce, "body_sha256": digest, "signature": signature}
        return post(link, ACQUIRE, body, **{f"flwr_superexec_{name}": value for name, value in signed.items()})

    assert acquire(SUPEREXEC, "a" * 32) == 200
    assert acquire(b"another", "b" * 32) == 401
    assert post(link, ACQUIRE, body) == 401


def test_a_node_that_was_revoked_is_a_stranger(link: SuperLink) -> None:
    berlin = link.silo()
    berlin.pull()
    link.state.delete_node(NOOP_FLWR_AID, berlin.number)
    with pytest.raises(httpx.HTTPStatusError) as caught:
        berlin.pull()
    assert caught.value.response.status_code == 401


def test_a_silo_learns_whether_the_server_takes_its_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before it was registered, afterwards, and when it was revoked; the server's log says who was refused."""
    key = make_node_key("rome", tmp_path / "keys")
    monkeypatch.setattr(network, "trusting", lambda authority: None)  # this SuperLink has no TLS
    monkeypatch.setattr(callers, "_STALE_S", 0.0)
    monkeypatch.setattr(callers, "_REREAD_S", 0.0)
    with serving(monkeypatch, GateConfig()) as link:
        way = Way("127.0.0.1", link.port)
        stranger = network.check_registered(way, tmp_path, key.private)
        assert not stranger.ok and key.fingerprint in stranger.detail and "not registered" in stranger.detail
        (line,) = [record.getMessage() for record in caplog.records if "no registered node" in record.getMessage()]
        assert "401 to 127.0.0.1" in line and f"key {key.fingerprint}" in line
        public = public_key_to_bytes(node_public_key("rome", key.public))
        node = link.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public, 0)
        assert network.check_registered(way, tmp_path, key.private).ok
        assert link.state.get_node_info(node_ids=[node])[0].status == NodeStatus.REGISTERED, "asking makes no node"
        link.state.delete_node(NOOP_FLWR_AID, node)
        assert not network.check_registered(way, tmp_path, key.private).ok
    with serving(monkeypatch, GateConfig(), gate=False) as link:
        unsure = network.check_registered(Way("127.0.0.1", link.port), tmp_path, key.private)
        assert unsure.ok and "does not say" in unsure.detail


@pytest.mark.parametrize("key", [b"%%%", b"", base64.b64encode(b"-----BEGIN\n" + b"A" * 500)])
def test_a_strangers_key_and_path_are_printed_as_text(key: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert ask("/v1/fleet/\x1b[31m\nok", ELSEWHERE, (b"flwr-public-key", key)) == 401
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.isprintable() and ELSEWHERE in line and "no registered node" in line
