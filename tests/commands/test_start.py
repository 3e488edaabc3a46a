"""``fedsync silo``, ``server`` and ``doctor`` as far as they get without processes; tests/e2e has the rest."""

import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.processes import free_ports
from fedsync.flower.registration import Registered
from fedsync.ops import start
from tests.commands.call import call


@pytest.mark.parametrize(
    "command",
    [
        "silo start --silo", "silo export --out out --silo", "server start --server", "server register --server",
        "server revoke berlin --server", "server run fedavg --server", "doctor --silo", "doctor --server",
    ],
)  # fmt: skip
def test_a_file_that_is_not_there_is_the_users_mistake(command: str) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        call(*command.split(), "nowhere.yaml")


@pytest.fixture
def server(tmp_path: Path) -> Path:
    (tmp_path / "server.yaml").write_text("{insecure: true, state: s}")
    return tmp_path / "server.yaml"


@pytest.mark.parametrize("arguments", [[], ["fedavg", "--resume", "out"], ["--resume", "out", "--set", "seed=1"]])
def test_a_run_is_begun_or_resumed(arguments: list[str], server: Path) -> None:
    with pytest.raises(ConfigError, match="not clear what to run"):
        call("server", "run", "--server", server, *arguments)


@pytest.mark.slow
def test_a_server_that_does_not_run_takes_nothing(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "server.yaml").write_text(f"{{insecure: true, host: 127.0.0.1, port: {port}, state: s}}")
    with pytest.raises(RunError, match=r"did not accept the run: .*`fedsync doctor --server server.yaml`"):
        call("server", "run", "fedavg", "--server", tmp_path / "server.yaml")


def test_without_tls_there_are_no_keys_to_register(server: Path) -> None:
    with pytest.raises(ConfigError, match="not authenticated"):
        call("server", "register", "--server", server)


def test_doctor_ends_with_1_where_something_fails_and_names_the_remedy(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "silo.yaml"
    file.write_text(f"{{name: a, server: '127.0.0.1:{port}', insecure: true, state: /nowhere, device: cpu}}")
    result = CliRunner().invoke(app, ["doctor", "--silo", str(file)])
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert line.startswith(f"FAIL  server         127.0.0.1:{port}: Connection refused. Check the address")
    assert "FAIL" not in call("doctor")


@pytest.mark.parametrize("command", ["stop", "run --server server.yaml --resume"])
def test_a_run_of_another_user_is_neither_stopped_nor_resumed(
    server: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Root could, and the server's user could then neither read why the run ended nor resume it."""
    monkeypatch.chdir(server.parent)
    (server.parent / "run.json").write_text('{"number": "1", "state": "s", "settings": {}}')
    me = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: me + 1)
    with pytest.raises(ConfigError, match=rf"the run belongs to user {me}\. Run the command as that user"):
        call("server", *command.split(), server.parent)
    assert sorted(path.name for path in server.parent.iterdir()) == ["run.json", "server.yaml"]


def test_a_server_whose_port_is_taken_says_so_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsync.ops.start._LEFT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / "server.yaml").write_text(f"{{insecure: true, state: s, host: 127.0.0.1, port: {port}}}")
        with pytest.raises(ConfigError, match=rf"listen on 127\.0\.0\.1:{port}: Address already in use.*ss -ltnp"):
            call("server", "start", "--server", tmp_path / "server.yaml")
    assert not (tmp_path / "s" / "health.json").exists()


@pytest.mark.parametrize(("host", "told"), [("'::'", "::1"), ("127.0.0.2", "127.0.0.2")])
def test_a_server_reaches_itself_under_its_own_certificate_or_does_not_start(
    tmp_path: Path, host: str, told: str
) -> None:
    """Its ServerApps could not reach it, so no run would ever begin."""
    call("certs", "init", tmp_path / "certs", "--host", "fl.example.org")
    (tmp_path / "server.yaml").write_text(f"{{certificates: certs, state: s, host: {host}}}")
    with pytest.raises(
        ConfigError, match=rf"server\.pem: does not cover {told}, .* --renew`, and --host {told} besides"
    ):
        call("server", "start", "--server", tmp_path / "server.yaml")


def test_register_says_who_is_registered_and_fails_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("berlin", "paris"):
        (tmp_path / f"{name}.node.pub").touch()
    (tmp_path / "certs").mkdir()
    file = tmp_path / "server.yaml"
    silos = "{berlin: berlin.node.pub, paris: paris.node.pub}"
    file.write_text(f"{{certificates: certs, state: state, silos: {silos}}}\n")
    problem = ConfigError("silos, berlin", "its key was revoked before", "Make another")
    monkeypatch.setattr(start, "register_silos", lambda config: Registered({"berlin": problem}))
    done = CliRunner().invoke(app, ["server", "register", "--server", str(file)])
    assert done.exception is problem and "registered: paris\n" in done.stdout
    monkeypatch.setattr(start, "register_silos", lambda config: Registered())
    assert call("server", "register", "--server", file) == "registered: berlin, paris\n"
