"""Which processes a silo and a server are, by version of Flower."""

import stat
from pathlib import Path

import pytest

from fedsync.config.gate import GateConfig
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.core.errors import ConfigError
from fedsync.flower.client_app import identify
from fedsync.flower.internals import versions
from fedsync.ops import start
from fedsync.ops.programs import node_config, server_programs, silo_programs, way
from fedsync.ops.supervisor import Program
from fedsync.trainer.key_lookup import KEYS
from fedsync.trainer.owner_policy import owner_environment

SILO = SiloStartConfig(
    name="berlin", server="fl.example.org:9092", authority="/c/ca.crt", node_key="/k/berlin.node", state="/s",
    keys="/k", index=3, device="cuda:1", processes=2, declared_speed=200.0, resources=False, code="shipped",
)  # fmt: skip
PLAIN = SiloStartConfig(name="berlin", server="localhost:1", insecure=True, state="/s", code="shipped")


@pytest.fixture(params=["fast", "stock"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "stock":
        monkeypatch.setattr(versions, "TESTED", frozenset())
    assert way() == request.param
    return str(request.param)


def test_what_the_owner_decided_arrives_at_the_silos_trainer() -> None:
    from flwr.common.config import parse_config_args

    told = identify("{}", parse_config_args([node_config(SILO)]), {})
    assert (told.index, told.name, told.device, told.processes, told.declared_speed, told.resources) == (
        3, "berlin", "cuda:1", 2, 200.0, False,
    )  # fmt: skip
    silent = identify("{}", parse_config_args([node_config(PLAIN)]), {})
    assert (silent.index, silent.device, silent.processes, silent.declared_speed, silent.resources) == (
        0, None, None, None, True,
    )  # fmt: skip


def plan(config: SiloStartConfig, folder: Path) -> Program:
    """The process of a silo with this folder."""
    (program,) = silo_programs(config.model_copy(update={"state": str(folder)}))
    return program


def test_a_silo_proves_who_it_is(mode: str, tmp_path: Path) -> None:
    node = plan(SILO, tmp_path)
    command = " ".join(node.command)
    assert "--root-certificates /c/ca.crt --auth-supernode-private-key /k/berlin.node" in command
    assert "--insecure" not in command and node.rejoins and node.role == "supernode"
    assert ("--poll" in command) is (mode == "fast")
    here = SILO.model_copy(update={"state": str(tmp_path)})
    assert node.environment == owner_environment(here), "the keys go to the process that starts the trainer"
    assert node.environment[KEYS] == "/k"


def test_a_trial_without_tls_says_so(mode: str, tmp_path: Path) -> None:
    node = plan(PLAIN, tmp_path)
    assert "--insecure" in node.command and not node.rejoins
    assert node.environment[KEYS] == "", "keys in the environment are not taken for the silo's"


def test_code_from_the_server_runs_where_the_owner_says_so_and_never_beside_the_nodes_key(
    mode: str, tmp_path: Path
) -> None:
    closed = SILO.model_copy(update={"code": "installed"})
    if mode == "stock":
        with pytest.raises(ConfigError, match=r"runs whatever client a run brings along.*code: shipped"):
            plan(closed, tmp_path)
    else:
        assert "--answer" in plan(closed, tmp_path).command
    assert "--answer" not in plan(SILO, tmp_path).command and way("shipped") == "stock"


@pytest.mark.parametrize(("connections", "warned"), [(1000, True), (1200, False)])
def test_a_gate_without_room_for_all_silos_is_named(
    connections: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    silos = {f"silo-{index}": "key" for index in range(300)}  # of which each may have four
    gate = GateConfig(connections=connections)
    start._have_files(ServerStartConfig(certificates="/c", state="/s", silos=silos, gate=gate))
    said = "300 silos may hold 1200 connections, and the gate has 1000: set gate.connections to 1200 or more"
    assert (said in caplog.text) is warned


def test_a_server_keeps_its_runs_apart_from_the_superlink(mode: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    config = ServerStartConfig(certificates="/c", state=str(tmp_path))
    link, execute = server_programs(config)
    command = " ".join(link.command)
    assert f"--isolation process --database {tmp_path}/superlink.db" in command
    assert "--enable-supernode-auth" in command and "--ssl-keyfile /c/server.key" in command
    assert ("--gate" in link.command) is ("--hide-tokens" in execute.command) is (mode == "fast")
    if mode == "fast":
        assert GateConfig.model_validate_json(link.command[list(link.command).index("--gate") + 1]) == config.gate
    assert not any((tmp_path / "operator.secret").read_text() in " ".join(each.command) for each in (link, execute))
    secret = tmp_path / "superexec.secret"
    for program in (link, execute):
        assert f"--superexec-auth-secret-file {secret}" in " ".join(program.command)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and len(secret.read_bytes()) == 32
    assert "--root-certificates /c/ca.crt" in " ".join(execute.command) and "127.0.0.1:9092" in execute.command
    before = secret.read_bytes()
    server_programs(config)
    assert secret.read_bytes() == before, "runs that wait for a restarted server know the old one"
    assert "--database" not in server_programs(config, lasting=False)[0].command
