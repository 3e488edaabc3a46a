"""``fedsync silo``, ``server`` and ``doctor`` as far as they get without processes; tests/e2e has the rest."""

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.processes import free_ports
from tests.commands.call import call


@pytest.mark.parametrize(
    "arguments",
    [
        ["silo", "start", "--silo", "nowhere.yaml"],
        ["silo", "export", "--out", "out", "--silo", "nowhere.yaml"],
        ["server", "start", "--server", "nowhere.yaml"],
        ["server", "register", "--server", "nowhere.yaml"],
        ["server", "revoke", "berlin", "--server", "nowhere.yaml"],
        ["server", "run", "fedavg", "--server", "nowhere.yaml"],
        ["doctor", "--silo", "nowhere.yaml"],
        ["doctor", "--server", "nowhere.yaml"],
    ],
)
def test_a_file_that_is_not_there_is_the_users_mistake(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read"):
        call(*arguments)


def test_a_run_is_not_put_where_another_is(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("{insecure: true, state: s}")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="has the files of a run"):
        call("server", "run", "fedavg", "--server", tmp_path / "server.yaml", "--out", tmp_path / "out")


@pytest.mark.parametrize("arguments", [[], ["fedavg", "--resume", "out"], ["--resume", "out", "--set", "seed=1"]])
def test_a_run_is_begun_or_resumed(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("{insecure: true, state: s}")
    with pytest.raises(ConfigError, match="not clear what to run"):
        call("server", "run", "--server", tmp_path / "server.yaml", *arguments)


@pytest.mark.slow
def test_a_server_that_does_not_run_takes_nothing(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    (tmp_path / "server.yaml").write_text(f"{{insecure: true, host: 127.0.0.1, port: {port}, state: s}}")
    with pytest.raises(RunError, match=r"did not accept the run: .*`fedsync doctor --server server.yaml`"):
        call("server", "run", "fedavg", "--server", tmp_path / "server.yaml")


def test_without_tls_there_are_no_keys_to_register(tmp_path: Path) -> None:
    (tmp_path / "server.yaml").write_text("{insecure: true, state: s}")
    with pytest.raises(ConfigError, match="not authenticated"):
        call("server", "register", "--server", tmp_path / "server.yaml")


def test_doctor_ends_with_1_where_something_fails_and_names_the_remedy(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    file = tmp_path / "silo.yaml"
    file.write_text(f"{{name: a, server: '127.0.0.1:{port}', insecure: true, state: /nowhere, device: cpu}}")
    result = CliRunner().invoke(app, ["doctor", "--silo", str(file)])
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert line.startswith(f"FAIL  server         127.0.0.1:{port}: Connection refused. Check the address")
    assert "FAIL" not in call("doctor")


def test_a_server_whose_port_is_taken_says_so_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsync.ops.start._LEFT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / "server.yaml").write_text(f"{{insecure: true, state: s, host: 127.0.0.1, port: {port}}}")
        with pytest.raises(ConfigError, match=rf"listen on 127\.0\.0\.1:{port}: Address already in use.*ss -ltnp"):
            call("server", "start", "--server", tmp_path / "server.yaml")
    assert not (tmp_path / "s" / "health.json").exists()
