"""Which processes a silo and a server are, and what each of them is told."""

import json
import stat
import sys
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.server_start import HubConfig, ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.ops import programs
from fedsync.ops.programs import node_config, node_settings, server_programs, silo_programs
from fedsync.ops.supervisor import Program
from fedsync.server.run_folder import HUB, HubPlace
from fedsync.silo.agent.answers import identify
from fedsync.silo.agent.joins import INBOX, OWN_NODE
from fedsync.silo.owner.key_lookup import KEYS
from fedsync.silo.owner.owner_policy import owner_environment

SILO = SiloStartConfig(
    name="berlin", server="fl.example.org:9092", authority="/c/ca.crt", node_key="/k/berlin.node", state="/s",
    keys="/k", index=3, device="cuda:1", declared_speed=200.0, resources=False, code="shipped",
)  # fmt: skip
PLAIN = SiloStartConfig(name="berlin", server="localhost:1", insecure=True, state="/s", code="shipped")


def test_what_the_owner_decided_arrives_at_the_silos_trainer() -> None:
    from flwr.common.config import parse_config_args

    node = parse_config_args([node_config(SILO)])
    assert node == node_settings(SILO), "by the SuperNode, and by the agent"
    told = identify("{}", node)
    assert (told.index, told.name, told.device, told.declared_speed, told.resources) == (
        3, "berlin", "cuda:1", 200.0, False,
    )  # fmt: skip
    silent = identify("{}", parse_config_args([node_config(PLAIN)]))
    assert (silent.index, silent.device, silent.declared_speed, silent.resources) == (
        0, None, None, True,
    )  # fmt: skip


def plan(config: SiloStartConfig, folder: Path, **other: object) -> dict[str, Program]:
    folder.chmod(0o700)
    return {each.role: each for each in silo_programs(config.model_copy(update={"state": str(folder), **other}))}


@pytest.mark.parametrize("code", ["installed", "shipped"])
def test_a_silo_proves_who_it_is_unless_it_is_on_trial_without_tls(code: str, tmp_path: Path) -> None:
    node = plan(SILO, tmp_path, code=code)["supernode"]
    command = " ".join(node.command)
    assert "--root-certificates /c/ca.crt --auth-supernode-private-key /k/berlin.node" in command
    assert "--insecure" not in command and node.rejoins
    trial = plan(PLAIN, tmp_path, code=code)
    assert "--insecure" in trial["supernode"].command and not trial["supernode"].rejoins
    assert trial["agent"].environment[KEYS] == "", "keys in the environment are not taken for the silo's"


@pytest.mark.parametrize("code", ["installed", "shipped"])
def test_the_agent_has_the_owners_word_and_stays(code: str, tmp_path: Path) -> None:
    agent = plan(SILO, tmp_path, code=code)["agent"]
    assert agent.command[-2:] == [f"{tmp_path}/state/agent", "--stay"]
    assert not agent.rejoins, "its sessions are no node of Flower's"
    here = SILO.model_copy(update={"state": str(tmp_path), "code": code})
    assert agent.environment.items() >= owner_environment(here).items(), "it starts the trainer"
    assert agent.environment[KEYS] == "/k"
    assert json.loads(agent.environment[OWN_NODE]) == node_settings(SILO), "what a join says of the node counts nothing"
    owner = json.loads(agent.environment[ALLOWED])
    assert (owner["hub_hosts"], owner["authority"]) == (["fl.example.org"], "/c/ca.crt")
    named = plan(SILO, tmp_path, code=code, hub_hosts=["hub.example.org"])["agent"]
    assert json.loads(named.environment[ALLOWED])["hub_hosts"] == ["hub.example.org"]


def test_a_run_brings_its_client_into_a_room_without_keys(tmp_path: Path) -> None:
    """What confines it there is in `tests.attacks`; here, that it is started so, and told nothing."""
    silo = plan(SILO, tmp_path, code="installed")
    assert list(silo) == ["agent", "supernode", "room"]
    node, room = " ".join(silo["supernode"].command), " ".join(silo["room"].command)
    assert "--isolation process --host 127.0.0.1" in node, "the SuperNode itself starts no client"
    port = silo["supernode"].command[list(silo["supernode"].command).index("--port") + 1]
    inbox = f"{tmp_path}/state/agent/inbox"
    assert f" superexec --room {tmp_path}/room {inbox} " in room and f"127.0.0.1:{port}" in room
    secret = tmp_path / "state" / "agent" / "superexec.secret"
    assert all(f"--superexec-auth-secret-file {secret}" in each for each in (node, room))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and len(secret.read_bytes()) == 32
    hosts = json.dumps({"hub_hosts": ["fl.example.org"]})
    assert silo["room"].environment == {INBOX: inbox, ALLOWED: hosts}
    assert not {KEYS, ALLOWED, OWN_NODE} & silo["supernode"].environment.keys()
    for each in (silo["room"], silo["supernode"]):
        told = each.environment.values()
        assert not any(word in text for word in ("/k", "berlin.node") for text in told), each.role
    assert "/k" not in room


def test_code_from_the_server_meets_data_if_the_owner_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "room" in plan(SILO, tmp_path, code="installed")
    shipped = plan(SILO, tmp_path)
    assert list(shipped) == ["agent", "supernode"] and "--isolation" not in shipped["supernode"].command
    monkeypatch.setattr(programs, "can_confine", lambda: False)
    with pytest.raises(ConfigError, match=r"cannot isolate the client code.*from keys and data.*code: shipped"):
        plan(SILO, tmp_path, code="installed")
    assert "room" not in plan(SILO, tmp_path)


def test_keys_among_programs_are_refused(tmp_path: Path) -> None:
    """What is in the room may read where Python is."""
    with pytest.raises(ConfigError, match="is in a folder of programs"):
        plan(SILO, tmp_path, code="installed", keys=f"{sys.prefix}/keys")


@pytest.fixture
def server(certificates: Path, tmp_path: Path) -> ServerStartConfig:
    tmp_path.chmod(0o700)
    return ServerStartConfig(certificates=str(certificates), state=str(tmp_path))


def test_a_server_keeps_its_runs_apart_from_the_superlink(server: ServerStartConfig, tmp_path: Path) -> None:
    link, execute = server_programs(server)
    assert (link.role, execute.role) == ("superlink", "superexec")
    command = " ".join(link.command)
    assert f"--isolation process --database {tmp_path}/superlink.db" in command
    assert "--enable-supernode-auth" in command and f"--ssl-keyfile {server.certificates}/server.key" in command
    secret = tmp_path / "superexec.secret"
    for program in (link, execute):
        assert f"--superexec-auth-secret-file {secret}" in " ".join(program.command)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600 and len(secret.read_bytes()) == 32
    assert f"--root-certificates {server.certificates}/ca.crt" in " ".join(execute.command)
    assert "127.0.0.1:9092" in execute.command
    before = secret.read_bytes()
    server_programs(server)
    assert secret.read_bytes() == before, "runs that wait for a restarted server know the old one"
    assert "--database" not in server_programs(server, lasting=False)[0].command


def test_runs_are_told_where_their_hubs_are(server: ServerStartConfig, tmp_path: Path) -> None:
    """By ServerApps' environment, which the SuperExec hands down; silos come to a name that the certificate covers."""
    link, execute = server_programs(server)
    assert HUB not in link.environment
    place = HubPlace.load(Path(execute.environment[HUB]))
    assert (place.host, place.ports, place.name) == ("0.0.0.0", tuple(range(9093, 9109)), "fl.example.org")
    files = (place.certificate, place.key, place.authority)
    assert files == tuple(f"{server.certificates}/{name}" for name in ("server.pem", "server.key", "ca.crt"))
    assert place.struck == f"{tmp_path}/struck.json", "a silo that is revoked is turned away by runs that go on"
    named = server.model_copy(update={"hub": HubConfig(port=20000, runs=2, name="hub.example.org")})
    place = HubPlace.load(Path(server_programs(named)[1].environment[HUB]))
    assert (place.ports, place.name) == ((20000, 20001), "hub.example.org")


def test_silos_elsewhere_are_not_sent_to_their_own_machine(tmp_path: Path) -> None:
    """A certificate lists names before addresses, and this machine's own name is always among them."""
    tmp_path.chmod(0o700)
    certs = tmp_path / "certs"
    certs.mkdir(mode=0o700)
    make_server_certificate(make_authority(certs), ["10.0.0.5"], certs)
    server = ServerStartConfig(certificates=str(certs), state=str(tmp_path))
    assert HubPlace.load(Path(server_programs(server)[1].environment[HUB])).name == "10.0.0.5"
