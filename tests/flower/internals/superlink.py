"""A SuperLink's real application behind the gate, in this process, with two silos that it knows and a run."""

import contextlib
import os
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from flwr.app import ConfigRecord, RecordDict
from flwr.app.message import Message, make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest, PushMessagesResponse
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink import main
from flwr.superlink.routers.fleet import node_auth
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsync.config.gate import GateConfig
from fedsync.core.transfer import Payload
from fedsync.flower.internals.access_middleware import add_gate
from fedsync.flower.internals.replies import Quota, Replies
from fedsync.flower.internals.serving import LimitedServer

SECRET = "0" * 64
SUPEREXEC = b"superexec"
FILES = 1024


def noise(size: int) -> Payload:
    """So many bytes, the same for the same size."""
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


@dataclass
class SuperLink:
    """A SuperLink that serves without TLS on loopback."""

    server: LimitedServer
    state: Any
    run: int
    token: str
    port: int = 0
    _nodes: dict[str, "Silo"] = field(default_factory=dict)

    @property
    def lines(self) -> int:
        return len(self.server.lines)

    def silo(self, name: str = "berlin") -> "Silo":
        return self._nodes[name]

    def join(self, name: str) -> "Silo":
        """Register a node; it is there for an hour."""
        private, public = generate_key_pairs()
        key = public_key_to_bytes(public)
        number = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)
        assert self.state.activate_node(number, 3600)
        signed = NodeAuthHttpInterceptor(private, public)
        client = FleetHttpClient.from_server_address(
            f"127.0.0.1:{self.port}",
            True,
            None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperNode"), signed],
        )
        self._nodes[name] = Silo(self, number, client, signed)
        return self._nodes[name]

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection of somebody who says nothing."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=5, source_address=(source, 0))

    def order(self, silo: "Silo") -> str:
        """Ask something of a silo, as the run's app does; returns the message's name."""
        message = self.message(SUPERLINK_NODE_ID, silo.number, "")
        session = self.state.start_session(self.run)
        assert self.state.store_message_and_object_tree(message, get_object_tree(message), session)[0]
        return message.metadata.message_id

    def message(self, source: int, target: int, answers: str, size: int = 8, ttl: float = 600.0) -> Message:
        metadata = Metadata(
            run_id=self.run,
            message_id="",
            src_node_id=source,
            dst_node_id=target,
            reply_to_message_id=answers,
            group_id="",
            message_type="train",
            created_at=round(time.time(), 1),
            ttl=ttl,
        )
        message = make_message(metadata=metadata, content=RecordDict({"c": ConfigRecord({"x": os.urandom(size)})}))
        message.metadata.__dict__["_message_id"] = message.object_id
        return message


@dataclass
class Silo:
    """A silo that may lie."""

    link: SuperLink
    number: int
    client: FleetHttpClient
    signed: NodeAuthHttpInterceptor

    @property
    def node(self) -> Node:
        return Node(node_id=self.number)

    @property
    def headers(self) -> dict[str, str]:
        """Its proof, as its SuperNode sends it now."""
        request = httpx.Request("POST", "http://x")
        before = set(request.headers)
        seen: list[httpx.Request] = []

        def note(context: Any) -> Any:
            seen.append(context.request)
            return httpx.Response(200)

        self.signed.intercept(type("Context", (), {"request": request})(), note)  # type: ignore[arg-type]
        return {name: value for name, value in seen[0].headers.items() if name not in before}

    def pull(self) -> list[Any]:
        return list(self.client.PullMessages(PullMessagesRequest(node=self.node)).messages_list)

    def answer(self, to: str, size: int = 8) -> Message:
        return self.link.message(self.number, SUPERLINK_NODE_ID, to, size, ttl=300.0)

    def announce(self, message: Message, tree: ObjectTree | None = None) -> PushMessagesResponse:
        request = PushMessagesRequest(
            node=self.node,
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[tree or get_object_tree(message)],
            clientapp_runtime_list=[0.1],
        )
        return self.client.PushMessages(request)

    def push(self, message: Message) -> int:
        """Send a message and its parts; returns how many of them were stored."""
        told, parts = self.announce(message), get_all_nested_objects(message)
        return sum(self.part(told.session_id, name, parts[name].deflate()) for name in told.objects_to_push)

    def part(self, session: str, name: str, content: bytes) -> bool:
        request = PushObjectRequest(
            node=self.node, run_id=self.link.run, session_id=session, object_id=name, object_content=content
        )
        return bool(self.client.PushObject(request).stored)


def refused(call: Any, *arguments: Any) -> int:
    """Status of the answer to a request that is refused."""
    with pytest.raises(httpx.HTTPStatusError) as caught:
        call(*arguments)
    return caught.value.response.status_code


@cache
def fresh_database() -> bytes:
    """Of a SuperLink that never served: Flower makes it by all changes that its tables ever saw, in half a second."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        file = Path(folder) / "link.db"
        patch.setenv("FLWR_DATABASE", str(file))
        main.create_app()
        with contextlib.closing(sqlite3.connect(file)) as database:
            return database.serialize()


@contextmanager
def serving(
    monkeypatch: pytest.MonkeyPatch,
    limits: GateConfig,
    database: Path | None = None,
    *,
    gate: bool = True,
    parcels: Path = Path("/nowhere"),
) -> Iterator[SuperLink]:
    """A SuperLink; without a ``database`` its state is in memory, without ``gate`` it is Flower's own.

    ``parcels`` is the gate's folder of them.
    """
    if database is not None and not database.exists():
        database.write_bytes(fresh_database())
    monkeypatch.setenv("FLWR_DATABASE", ":flwr-in-memory:" if database is None else str(database))
    with pytest.MonkeyPatch.context() as patch:
        # Each SuperLink would look whether all changes of its tables were made, and whether its routes differ in their
        # names: what was made above has been looked at.
        patch.setattr(sql_mixin, "run_migrations", lambda engine: None)
        for state in (SqlLinkState, SqlObjectStore):
            patch.setattr(state, "get_metadata", lambda self: None)
        patch.setattr(main, "validate_unique_route_operation_ids", lambda app: None)
        app = main.create_app()
    app.state.enable_supernode_auth = True
    app.state.superexec_auth_secret = SUPEREXEC
    monkeypatch.setattr(node_auth, "verify_signature", node_auth.verify_signature)  # put back what the gate changes
    if gate:
        add_gate(app, limits, SECRET, parcels)
        replies = Replies(fleet_handlers, Quota(limits))
        monkeypatch.setattr(fleet_handlers, "push_messages", replies.push_messages)
        monkeypatch.setattr(fleet_handlers, "push_object", replies.push_object)
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=3
    )
    server = LimitedServer(config, limits, FILES)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.listeners:
            assert thread.is_alive()
            time.sleep(0.01)
        state = app.state.linkstate_factory.state()
        link = SuperLink(server, state, *begun(state), port=server.listeners[0].getsockname()[1])
        for name in ("berlin", "paris"):
            link.join(name)
        yield link
    finally:
        server.should_exit = True
        thread.join(timeout=20)
    assert not thread.is_alive()


def begun(state: Any) -> tuple[int, str]:
    """A run at work; its number, and the token of its app."""
    federation = state.federation_manager.get_federations(NOOP_FLWR_AID)[0]
    run = state.create_run("f/a", "1", None, {}, federation.id, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
    (task,) = state.get_tasks(run_ids=[run])
    token = state.claim_task(task.task_id)
    assert state.activate_task(task.task_id)
    return run, token


class Cutting:
    """Forwards one connection after the other; the first ends after so many bytes, either way.

    Counts what came from either side.
    """

    def __init__(self, port: int, after: int) -> None:
        self._port, self._after = port, after
        self.carried = 0
        self.lines = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            inside, _ = self._listener.accept()
            outside = socket.create_connection(("127.0.0.1", self._port))
            self.lines += 1
            most = self._after if self.lines == 1 else sys.maxsize
            for one, other in ((inside, outside), (outside, inside)):
                threading.Thread(target=self._pump, args=(one, other, most), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, most: int) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while sent < most and (data := one.recv(65536)):
                sent += len(data)
                self.carried += len(data)
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
                each.close()  # or who sends waits for a reader
