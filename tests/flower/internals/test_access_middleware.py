"""Who may reach what of a SuperLink."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.proto.message_pb2 import ObjectTree

from fedsync.flower.internals.access_middleware import (
    MAX_REQUEST_BYTES,
    AccessMiddleware,
    App,
    Receive,
    Scope,
    Send,
    allowed,
)

FLEET, CONTROL, RUNTIME = "/v1/fleet/activate-node", "/v1/control/register-node", "/v1/runtime/acquire-task"


@pytest.mark.parametrize("path", [FLEET, "/health"])
@pytest.mark.parametrize("host", ["127.0.0.1", "203.0.113.9", None])
def test_silos_reach_the_fleets_interface_from_anywhere(path: str, host: str | None) -> None:
    assert allowed(path, host)


@pytest.mark.parametrize("path", [CONTROL, RUNTIME, "/docs", "/v1/fleet", "/v1/fleetx/", "/"])
@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True),
     ("10.0.0.1", False), ("203.0.113.9", False), ("::ffff:10.0.0.1", False), ("2001:db8::1", False),
     ("localhost", False), ("", False), (None, False)],
)  # fmt: skip
def test_everything_else_is_for_the_servers_machine(path: str, host: str | None, expected: bool) -> None:
    assert allowed(path, host) is expected


def test_the_servers_machine_may_use_its_outward_address() -> None:
    assert allowed(CONTROL, "192.0.2.1", "192.0.2.1")
    assert not allowed(CONTROL, "192.0.2.2", "192.0.2.1")
    assert not allowed(CONTROL, None, None)


def ask(path: str, host: str, *headers: tuple[bytes, bytes]) -> list[MutableMapping[str, Any]]:
    """What a client gets that asks an application behind the gate, which answers 200."""
    sent: list[MutableMapping[str, Any]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nobody reads what a stranger sends")

    behind: App = AccessMiddleware(app)
    scope = {"type": "http", "path": path, "client": (host, 5), "headers": list(headers)}
    asyncio.run(behind(scope, receive, send))
    return sent


def test_a_stranger_gets_403_and_nothing_behind_the_gate_hears_of_it() -> None:
    assert [message.get("status") for message in ask(CONTROL, "203.0.113.9")] == [403, None]
    assert [message.get("status") for message in ask(CONTROL, "127.0.0.1")] == [200]
    assert [message.get("status") for message in ask(FLEET, "203.0.113.9")] == [200]


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
    assert ask(FLEET, "203.0.113.9", (header, value))[0]["status"] == status
    assert ask(FLEET, "127.0.0.1", (header, value))[0]["status"] == status, "it may come through a tunnel"
    assert ask(CONTROL, "127.0.0.1", (header, value))[0]["status"] == 200, "operators send whole projects"


def test_what_flower_sends_at_once_passes() -> None:
    """A part of an array; and the names, of 64 letters, of a model's 100 000 tensors and their data, as a tree."""
    assert FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE < MAX_REQUEST_BYTES / 2
    name = "0" * 64
    tensor = ObjectTree(object_id=name, children=[ObjectTree(object_id=name)])
    assert ObjectTree(object_id=name, children=[tensor] * 100_000).ByteSize() < MAX_REQUEST_BYTES
