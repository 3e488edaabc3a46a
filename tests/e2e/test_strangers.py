"""A real server with TLS and node authentication: who has no right there gets nothing, and a silo that has works.

What a silo's task raises stays with the silo's owner: the server has not a byte of it, which is looked at in the end.
"""

import base64
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedsync import replay
from fedsync.common.errors import ConfigError
from fedsync.common.fork_server import fork, start_fork_server
from fedsync.common.locks import held
from fedsync.common.processes import INTERPRETER, end_processes
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.flower.launch import entry_point
from fedsync.flower.process_environment import QUIET, flower_environment
from fedsync.flower.registration import NODES_FILE, Registered, flwr_command
from fedsync.identity.certificates import Authority, ServerCertificate, make_server_certificate
from fedsync.identity.node_keys import make_node_key
from fedsync.ops.programs import CONNECTION
from fedsync.ops.runs import resume_run, stop_run, submit_run
from fedsync.ops.start import register_silos, revoke_silo
from fedsync.server.run_folder import RUN_LOCK, Phase, phase, read_error
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import LOG, STATE_FOLDER, Refusal
from tests.e2e.deployed import SMALL, children, fedsync, wait_for, write_files

pytestmark = pytest.mark.slow  # its tests follow one another in one federation


MARKER = "Patient-4711-positive"
TASK = """\
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedsync import SiloData, Task


class Leaks(Task):
    def model(self):
        return nn.Linear(2, 2)

    def data(self, slot):
        samples = TensorDataset(torch.ones(8, 2), torch.zeros(8, dtype=torch.long))
        return SiloData(samples, samples)

    def loss(self, model, batch):
        raise ValueError("cannot read " + Path(__file__).with_name("patients.csv").read_text())
"""


def holds_marker(file: Path) -> bool:
    content = file.read_bytes()
    words = [MARKER.encode(), MARKER.encode("utf-16-le"), MARKER.encode().hex().encode()]
    # As part of something longer it may begin at any of three places of a group.
    words += [base64.b64encode(b"?" * shift + MARKER.encode())[4:-4] for shift in range(3)]
    return any(word in content for word in words)


@dataclass(frozen=True)
class Federation:
    folder: Path
    port: int
    process: subprocess.Popen[bytes]
    supernodes: Path

    @property
    def authority(self) -> Path:
        return self.folder / "certs" / "ca.crt"

    @property
    def key(self) -> Path:
        return self.folder / "nodes" / "berlin.node"

    @property
    def log(self) -> str:
        return (self.folder / "server" / "logs" / "superlink.log").read_text(encoding="utf-8")

    def nodes(self) -> dict[str, str]:
        """Registered nodes by name, and their status, as the operator sees them."""
        state = self.folder / "server"
        listed = subprocess.run(
            [flwr_command(), "supernode", "list", CONNECTION, "--format", "json"],
            env=dict(flower_environment(state)), capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        status = {node["node-id"]: node["status"] for node in json.loads(listed.stdout)["nodes"]}
        known = json.loads((state / NODES_FILE).read_text())
        assert status.keys() == {node["node"] for node in known}, "nobody registered himself"
        return {node["name"]: status[node["node"]] for node in known}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("fl")
    (folder / "data").mkdir()
    (folder / "data" / "task.py").write_text(TASK)
    (folder / "data" / "patients.csv").write_text(MARKER)
    write_files(folder, ["berlin"], own=lambda _: "data: [data], code_files: [data/task.py],")
    port = ServerStartConfig.load(folder / "server.yaml").port
    make_node_key("rome", folder / "rome")
    process = fedsync("server", "start", "--server", "server.yaml", cwd=folder)
    # SuperNodes of strangers, of which each would take seconds to import Flower.
    environment = {**os.environ, **QUIET}
    forks = start_fork_server(folder / "n", [entry_point("supernode").module], environment, folder / "forks.log")
    try:
        wait_for(lambda: b"registered" in (folder / "server.out").read_bytes(), "the server did not come up")
        yield Federation(folder, port, process, folder / "n")
    finally:
        end_processes([forks], grace_s=0.0)
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
    assert code == 0
    assert not psutil.wait_procs(family, timeout=10)[1], "the server leaves no process"
    files = [file for place in ("server", "out", "leaks") for file in (folder / place).rglob("*") if file.is_file()]
    assert {"superlink.db", "superlink.log"} <= {file.name for file in files}
    assert [str(file) for file in (*files, folder / "server.out") if holds_marker(file)] == []


def supernode(federation: Federation, port: int, *options: str | Path) -> tuple[int, str]:
    """Exit code and output of a SuperNode, which ends where it is refused."""
    command = [*INTERPRETER, "fedsync.flower.launch", "supernode", "--superlink", f"localhost:{port}"]
    command += ["--isolation", "process", "--max-retries", "1"]
    environment = {**os.environ, **QUIET, "FLWR_HOME": str(federation.folder / "home")}
    with (federation.folder / "supernode.log").open("w+b") as log:
        process = fork(federation.supernodes, [*command, *map(str, options)], environment, log.fileno())
        assert process is not None
        wait_for(lambda: process.poll() is not None, "the SuperNode did not end")
        log.seek(0)
        return process.wait(), log.read().decode()


@pytest.mark.parametrize("stranger", ["no key", "wrong key", "no TLS"])
def test_a_stranger_is_refused_and_the_silos_stay_as_they_were(stranger: str, federation: Federation) -> None:
    before = len(federation.log)
    trust = ["--root-certificates", federation.authority]
    key = ["--auth-supernode-private-key", federation.folder / "rome" / "rome.node"]
    options = {"no key": trust, "wrong key": [*trust, *key], "no TLS": ["--insecure"]}[stranger]
    code, output = supernode(federation, federation.port, *options)
    assert code != 0 and "SuperNode ID" not in output, output
    if stranger != "no TLS":  # which ends before there is a request
        path = {"no key": "register-node", "wrong key": "activate-node"}[stranger]
        assert f'"POST /v1/fleet/{path} HTTP/1.1" 412' in federation.log[before:]
    assert federation.nodes() == {"berlin": "registered"}


def test_a_server_with_an_expired_certificate_hears_nothing_from_a_silo(federation: Federation, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    old = datetime.now(UTC) - timedelta(days=10)
    files = make_server_certificate(Authority.at(federation.folder / "certs"), ["localhost"], tmp_path, 5, old)
    heard: list[str] = []
    with _listening(files, heard) as port:
        options = ["--root-certificates", federation.authority, "--auth-supernode-private-key", federation.key]
        code, output = supernode(federation, port, *options)
    assert code == 1 and "certificate has expired" in output
    assert heard == []


def test_without_tls_the_server_says_nothing(federation: Federation) -> None:
    with socket.create_connection(("127.0.0.1", federation.port), timeout=30) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in plain.recv(4096)


def test_the_registered_silo_works_for_a_run_that_is_stopped_and_whose_server_is_killed(federation: Federation) -> None:
    process = fedsync("silo", "start", "--silo", "berlin.yaml", cwd=federation.folder)
    try:
        wait_for(lambda: federation.nodes() == {"berlin": "online"}, "the silo did not join")
        health = json.loads((federation.folder / "berlin" / "health.json").read_text())
        assert (health["silo"], health["state"], health["restarts"]) == ("berlin", "running", 0)
        _run_that_is_stopped_and_whose_server_is_killed(federation)
        logs = federation.folder / "berlin" / "logs"
        joins = (logs / "supernode.log").read_text().count("Receiving: query message")
        assert joins == 2, "one for each time that the run began; a server that was killed finds its silos again"
        _task_that_raises_what_it_read(federation)
        assert "the run is over" in (logs / "agent.log").read_text()
        assert not (federation.folder / "berlin" / "apps").exists(), "what a run brings along comes into its room only"
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        end_processes([process])
    assert len(family) >= 2 and not psutil.wait_procs(family, timeout=10)[1]
    assert federation.nodes() == {"berlin": "offline"}, "it said good-bye"


def _run_that_is_stopped_and_whose_server_is_killed(federation: Federation, rounds: int = 60) -> None:
    quick = [SMALL, "local.steps=5", "min_silos=1", f"stop.rounds={rounds}"]
    config = ServerStartConfig.load(federation.folder / "server.yaml")
    out = submit_run(config, StrategyConfig.load("fedavg", quick), federation.folder / "out")
    stop_run(out)
    assert phase(out) is Phase.OVER and not held(out / RUN_LOCK), "stopped before Flower has begun it"
    resume_run(config, out)
    journal = out / "journal.jsonl"

    def commits() -> int:
        return journal.read_text().count('"type":"Commit"') if journal.exists() else 0

    wait_for(lambda: commits() >= 2, "the run did not begin")
    stop_run(out)
    assert phase(out) is Phase.OVER and not held(out / RUN_LOCK), "stopped at work"
    before = commits()
    resume_run(config, out)
    wait_for(lambda: commits() > before, "the run did not go on")
    (server,) = children("flwr-serverapp")
    server.kill()
    wait_for(lambda: phase(out) is Phase.OVER, "the run did not come to its end")
    assert (out / "done").exists()
    actions = [action for entry in replay(journal) for action in entry.actions]
    assert [action.version for action in actions if isinstance(action, Commit)] == list(range(1, rounds + 1))
    assert (federation.folder / "server.out").read_bytes().count(b"resumed at version") == 1, "by the keeper"


def _task_that_raises_what_it_read(federation: Federation) -> None:
    folder = federation.folder
    quick = [f"task={{kind: custom, file: {folder / 'data' / 'task.py'}}}", "local.steps=1", "min_silos=1"]
    config = ServerStartConfig.load(folder / "server.yaml")
    out = submit_run(config, StrategyConfig.load("fedavg", quick), folder / "leaks")
    wait_for(lambda: phase(out) is Phase.OVER, "the run did not fail")
    assert "berlin answers CODE" in (out / "journal.jsonl").read_text() and "CODE" in str(read_error(out))
    note = last_refusals(folder / "berlin" / STATE_FOLDER)[-1]
    assert note.code is Refusal.CODE and MARKER in note.reason
    assert any(map(holds_marker, (folder / "berlin" / STATE_FOLDER).glob(f"*/{LOG}"))), "with its stack"


def test_the_server_says_of_whom_and_what_it_takes_care(federation: Federation) -> None:
    """After the test with a run, and before those that change who is registered."""

    def health() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((federation.folder / "server" / "health.json").read_text())
        return found

    wait_for(lambda: health()["keeper"]["runs"] == {}, "all are over")
    assert datetime.fromisoformat(health()["keeper"]["looked"]) <= datetime.now(UTC)
    assert health()["silos"] == {"berlin": "registered"}


def test_a_silo_whose_key_was_revoked_is_a_stranger(federation: Federation) -> None:
    """After the tests that need berlin."""
    file, without = (federation.folder / name for name in ("server.yaml", "without.yaml"))
    config = ServerStartConfig.load(file)
    with pytest.raises(ConfigError, match="Remove it from the file"):
        revoke_silo(config, "berlin")
    without.write_text(re.sub(r"\{berlin: .*?\}", "{}", file.read_text()))
    config = ServerStartConfig.load(without)
    with pytest.raises(ConfigError, match=r"under 'berlim'\. Check the name; registered were: berlin$"):
        revoke_silo(config, "berlim")
    for _ in range(2):  # a repeated command changes nothing
        revoke_silo(config, "berlin")
    trust = ["--root-certificates", federation.authority, "--auth-supernode-private-key", federation.key]
    code, output = supernode(federation, federation.port, *trust)
    assert code == 1 and "could not establish a connection to the SuperLink" in output
    again = register_silos(ServerStartConfig.load(file)).problems["berlin"]
    assert "was revoked before" in str(again) and federation.nodes() == {"berlin": "unregistered"}


def test_a_key_that_was_replaced_is_a_stranger_s(federation: Federation) -> None:
    """After the tests that count the nodes."""
    keys = [make_node_key("paris", federation.folder / folder) for folder in ("old", "fresh")]
    found = []
    for key in keys:
        file = federation.folder / f"{key.private.parent.name}.yaml"
        text = (federation.folder / "server.yaml").read_text()
        file.write_text(re.sub(r"\{berlin: .*?\}", f"{{paris: {key.public}}}", text))
        found.append(register_silos(ServerStartConfig.load(file)))
    assert found == [Registered(), Registered(retired={"paris": 1})]
    trust = ["--root-certificates", federation.authority, "--auth-supernode-private-key", keys[0].private]
    code, output = supernode(federation, federation.port, *trust)
    assert code == 1 and "could not establish a connection to the SuperLink" in output
    assert federation.nodes()["paris"] == "registered", "the fresh one"


@contextmanager
def _listening(files: ServerCertificate, heard: list[str]) -> Iterator[int]:
    """A server with these certificates that notes the requests that it gets; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(self.path)
            self.send_error(500)

        def log_message(self, *arguments: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *arguments: None  # type: ignore[method-assign]  # handshakes that end early
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
