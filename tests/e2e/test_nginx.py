"""The shipped ``deploy/nginx.conf`` before a real server: silos work through its one port, strangers get nothing."""

import http.client
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsync.common.processes import free_ports
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.identity.node_keys import make_node_key
from tests.e2e.deployed import SMALL, fedsync, wait_for

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")

CONF = Path(__file__).parents[2] / "deploy" / "nginx.conf"


@dataclass(frozen=True)
class Fronted:
    folder: Path
    port: int

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> int:
        """Status of the answer to a stranger, who has ca.crt and nothing else."""
        context = ssl.create_default_context(cafile=str(self.folder / "certs" / "ca.crt"))
        line = http.client.HTTPSConnection("localhost", self.port, timeout=30, context=context)
        try:
            line.request(method, path, body, headers)
            return line.getresponse().status
        finally:
            line.close()


@pytest.fixture(scope="module")
def fronted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronted]:
    folder = tmp_path_factory.mktemp("n")
    make_server_certificate(make_authority(folder / "certs"), ["localhost"], folder / "certs")
    make_node_key("berlin", folder / "keys")
    front, port = free_ports(2)
    (folder / "server.yaml").write_text(
        f"{{host: 127.0.0.1, port: {port}, certificates: certs, state: server, "
        f"silos: {{berlin: keys/berlin.node.pub}}, hub: {{proxy: 'localhost:{front}'}}}}"
    )
    (folder / "silo.yaml").write_text(
        f"{{name: berlin, server: 'localhost:{front}', authority: certs/ca.crt, node_key: keys/berlin.node, state: b}}"
    )
    text = CONF.read_text(encoding="utf-8").replace("/srv/fedsync", str(folder))
    text = text.replace("/var/log/nginx", str(folder)).replace("listen 9092", f"listen 127.0.0.1:{front}")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    own = "".join(f"{kind}_temp_path {folder}/{kind};\n" for kind in kinds)
    text = text.replace("9093", str(port)).replace("http {", f"http {{\n{own}")
    (folder / "nginx.conf").write_text(f"daemon off;\nuser root;\npid {folder}/nginx.pid;\n{text}")
    server = fedsync("server", "start", "--server", "server.yaml", cwd=folder)
    nginx = subprocess.Popen(["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        wait_for(lambda: b"registered" in (folder / "server.out").read_bytes(), "the server did not come up")
        yield Fronted(folder, front)
    finally:
        for process in (nginx, server):
            process.send_signal(signal.SIGTERM)
        for process in (nginx, server):
            process.wait(timeout=60)


@pytest.mark.slow
def test_strangers_get_no_further_than_nginx(fronted: Fronted) -> None:
    assert fronted.ask("POST", "/v1/control/list-nodes") == 404, "operators work on the server's machine"
    assert fronted.ask("POST", "/v1/runtime/pull-task-input") == 404, "apps are on the server's machine"
    assert fronted.ask("POST", "/") == fronted.ask("GET", "/v1/fedsync/0123456789abcdef/other") == 404
    assert fronted.ask("GET", "/v1/fedsync/..%2f..%2fserver/orders") in (400, 404)
    assert fronted.ask("GET", "/v1/fedsync/0123456789abcdef/orders") == 502, "there is no such run"
    assert fronted.ask("POST", "/v1/fleet/pull-messages", **{"content-length": str(2**30)}) == 413
    kind = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    assert fronted.ask("POST", "/v1/fleet/pull-messages", **kind) == 401, "the SuperLink asks for a node's proof"


@pytest.mark.slow
def test_a_silo_works_through_the_one_port(fronted: Fronted) -> None:
    silo = fedsync("silo", "start", "--silo", "silo.yaml", cwd=fronted.folder)
    try:
        told = ["--server", "server.yaml", "--set", SMALL, "--set", "min_silos=1", "--set", "stop.rounds=3"]
        assert fedsync("server", "run", "bsp", *told, "--out", "out", cwd=fronted.folder).wait(timeout=60) == 0
        run = fronted.folder / "out"
        wait_for(lambda: (run / "hub" / "sessions.json").exists(), "the hub did not come up")
        name = json.loads((run / "hub" / "sessions.json").read_text())["run"]
        assert fronted.ask("GET", f"/v1/fedsync/{name}/orders?after=0") == 401, "a stranger is none of its silos"
        wait_for(lambda: (run / "done").exists() or (run / "error.json").exists(), "the run did not end")
        assert (run / "done").exists(), (run / "error.json").read_text()
        assert json.loads((run / "summary.json").read_text())["rounds"] == 3
    finally:
        silo.send_signal(signal.SIGTERM)
        silo.wait(timeout=60)
