"""A real SuperLink over TLS with few files: strangers, a silo that lies, and another user of the machine."""

import os
import resource
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedsync.common.processes import end_processes, free_ports
from fedsync.config.server_start import ServerStartConfig
from fedsync.core.errors import RunError
from fedsync.flower.environment import flower_environment
from fedsync.flower.internals.access_middleware import MAX_REQUEST_BYTES
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.identity.node_keys import make_node_key
from fedsync.ops.programs import CONNECTION, server_programs
from fedsync.ops.runs import connect, submit, write_bundle
from fedsync.ops.start import register_silos

FILES, STRANGERS = 256, 300
WITHIN_S = 10.0


@dataclass
class Server:
    """A SuperLink that may have `FILES` files, and its silos berlin and paris."""

    folder: Path
    config: ServerStartConfig
    process: subprocess.Popen[bytes]
    held: list[socket.socket] = field(default_factory=list)

    @property
    def mib(self) -> float:
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    @property
    def database_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self.folder / "server").glob("superlink.db*"))

    def tls(self) -> ssl.SSLSocket:
        """A connection of a stranger, who knows the authority's certificate."""
        context = ssl.create_default_context(cafile=str(self.folder / "certs" / "ca.crt"))
        raw = socket.create_connection(("127.0.0.1", self.config.port), timeout=5)
        return context.wrap_socket(raw, server_hostname="localhost")

    def silo(self, name: str) -> tuple[Node, FleetHttpClient]:
        """A silo that has its key."""
        key = load_ssh_private_key((self.folder / name / f"{name}.node").read_bytes(), None)
        public = key.public_key()
        client = FleetHttpClient.from_server_address(
            f"localhost:{self.config.port}",
            False,
            (self.folder / "certs" / "ca.crt").read_bytes(),
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                NodeAuthHttpInterceptor(key, public),  # type: ignore[arg-type]
            ],
        )
        request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=60)  # type: ignore[arg-type]
        return Node(node_id=client.ActivateNode(request).node_id), client

    def served_s(self, node: Node, client: FleetHttpClient) -> float:
        """Seconds until a silo that tries again, as its SuperNode does, gets an answer."""
        begin = time.monotonic()
        while True:
            try:
                client.PullMessages(PullMessagesRequest(node=node))
                return time.monotonic() - begin
            except httpx.TransportError:
                assert time.monotonic() - begin < 4 * WITHIN_S
                time.sleep(0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("gate")
    make_server_certificate(make_authority(folder / "certs"), ["localhost"], folder / "certs")
    for name in ("berlin", "paris"):
        make_node_key(name, folder / name)
    (port,) = free_ports(1)
    (folder / "server").mkdir(mode=0o700)
    (folder / "server.yaml").write_text(
        f"{{host: 127.0.0.1, port: {port}, certificates: certs, state: server, "
        "silos: {berlin: berlin/berlin.node.pub, paris: paris/paris.node.pub}}\n"
    )
    config = ServerStartConfig.load(folder / "server.yaml")
    program = server_programs(config)[0]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            program.command,
            env=flower_environment(folder / "server"),
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
    found = Server(folder, config, process)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert time.monotonic() < end and process.poll() is None, (folder / "log").read_text()
                time.sleep(0.1)
        connect(config)
        register_silos(config).check()
        yield found
    finally:
        for line in found.held:
            line.close()
        end_processes([process])


def test_strangers_and_a_silo_that_lies_get_nothing(server: Server) -> None:
    berlin, paris = server.silo("berlin"), server.silo("paris")
    server.served_s(*berlin)
    _unfinished_requests_hold_no_memory(server)
    _idle_strangers_keep_nobody_out(server, *berlin)
    _a_silo_does_not_speak_for_the_server(server, paris, berlin)


def _unfinished_requests_hold_no_memory(server: Server) -> None:
    before = server.mib

    def send() -> None:
        line = server.tls()
        server.held.append(line)
        head = f"POST /v1/fleet/push-object HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_REQUEST_BYTES}\r\n\r\n"
        try:
            line.sendall(head.encode())
            line.sendall(bytes(MAX_REQUEST_BYTES - 1))
        except OSError:
            return  # cut off

    strangers = [threading.Thread(target=send, daemon=True) for _ in range(20)]
    for stranger in strangers:
        stranger.start()
    for stranger in strangers:
        stranger.join(timeout=20)
    assert server.mib - before < 60, "320 MiB were sent"


def _idle_strangers_keep_nobody_out(server: Server, node: Node, client: FleetHttpClient) -> None:
    for _ in range(STRANGERS):
        server.held.append(server.tls())
    for _ in range(STRANGERS):
        server.held.append(socket.create_connection(("127.0.0.1", server.config.port), timeout=5))
    assert server.served_s(node, client) < WITHIN_S
    assert psutil.Process(server.process.pid).num_fds() < FILES


def _a_silo_does_not_speak_for_the_server(
    server: Server, liar: tuple[Node, FleetHttpClient], other: tuple[Node, FleetHttpClient]
) -> None:
    app = write_bundle(server.folder / "app", {"strategy": "x"})
    run = int(submit(app, CONNECTION, flower_environment(server.folder / "server")))
    before = server.database_bytes
    for source in (SUPERLINK_NODE_ID, liar[0].node_id, other[0].node_id):
        metadata = Metadata(
            run_id=run, message_id="", src_node_id=source, dst_node_id=other[0].node_id, reply_to_message_id="",
            group_id="", message_type="train", created_at=time.time(), ttl=60.0,
        )  # fmt: skip
        message = make_message(metadata=metadata, content=RecordDict({"c": ConfigRecord({"x": os.urandom(8)})}))
        message.metadata.__dict__["_message_id"] = message.object_id
        request = PushMessagesRequest(
            node=liar[0],
            messages_list=[message_to_proto(remove_content_from_message(message))],
            message_object_trees=[get_object_tree(message)],
            clientapp_runtime_list=[0.1],
        )
        with pytest.raises(httpx.HTTPStatusError, match="403 Forbidden"):
            liar[1].PushMessages(request)
    assert not other[1].PullMessages(PullMessagesRequest(node=other[0])).messages_list
    assert server.database_bytes - before < 2**18
    assert "its source is another node" in (server.folder / "log").read_text()


def test_another_user_of_the_machine_starts_no_run(server: Server) -> None:
    """Who knows all that is public: the address, and the authority's certificate."""
    home = server.folder / "another"
    home.mkdir()
    (home / "config.toml").write_bytes((server.folder / "server" / "config.toml").read_bytes())
    app = write_bundle(server.folder / "his", {"strategy": "x"})
    with pytest.raises(RunError, match="flwr run failed"):
        submit(app, CONNECTION, flower_environment(home))
    assert "[/v1/control/start-run] refused: show the secret" in (server.folder / "log").read_text()
    for secret in ("operator.secret", "superexec.secret", "credentials.yaml"):
        assert (server.folder / "server" / secret).stat().st_mode & 0o077 == 0
