"""The files of ``fedsync silo start`` and ``fedsync server start``: every mistake names place and remedy."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import LONGEST_STATE, SealConfig, SiloStartConfig

SILO = """\
name: berlin
server: fl.example.org:9092
authority: ca.crt
node_key: berlin.node
state: /srv/berlin
keys: keys
index: 1
device: cuda:1
declared_speed: 200.0
logs: {bytes: 20000}
seal: {masks: true, clear: ["*.bias"]}
data: [data]
"""
SERVER = """\
host: 0.0.0.0
port: 9092
certificates: certs
state: /srv/server
silos:
  berlin: berlin.node.pub
  paris: paris.node.pub
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ca.crt", "berlin.node", "berlin.node.pub", "paris.node.pub"):
        (tmp_path / name).touch()
    for name in ("keys", "certs", "data"):
        (tmp_path / name).mkdir()
    return tmp_path


def silo(folder: Path, text: str = SILO) -> SiloStartConfig:
    (folder / "silo.yaml").write_text(text)
    return SiloStartConfig.load(folder / "silo.yaml")


def server(folder: Path, text: str = SERVER) -> ServerStartConfig:
    (folder / "server.yaml").write_text(text)
    return ServerStartConfig.load(folder / "server.yaml")


def test_good_files_are_good_and_their_paths_stand_beside_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    here, there = silo(folder), server(folder)
    assert (here.authority, here.node_key, here.keys, here.state) == (
        str(folder / "ca.crt"), str(folder / "berlin.node"), str(folder / "keys"), "/srv/berlin",
    )  # fmt: skip
    assert (here.logs.bytes, here.logs.keep, here.resources, here.insecure) == (20_000, 5, True, False)
    assert here.seal == SealConfig(masks=True, clear=["*.bias"]) and here.data == [str(folder / "data")]
    assert here.code == "installed", "nobody else's code runs unless the owner says so"
    assert there.silos == {name: str(folder / f"{name}.node.pub") for name in ("berlin", "paris")}
    assert there.certificates == str(folder / "certs")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("0.0.0.0", "127.0.0.1:9092"), ("192.0.2.1", "192.0.2.1:9092"), ('"::"', "[::1]:9092"), ('"::1"', "[::1]:9092")],
)
def test_where_the_servers_own_machine_reaches_it(host: str, loopback: str, folder: Path) -> None:
    assert server(folder, SERVER.replace("0.0.0.0", host)).loopback == loopback


OF_NO_DATA = "data: [data]\nprivacy: {a: {epsilon: 1, delta: 1.0e-5}}"


@pytest.mark.parametrize(
    ("old", "new", "place", "problem", "remedy"),
    [
        ("name: berlin", "name: ber lin", "line 1, name", "'ber lin' is not allowed", "of the form"),
        ("example.org:9092", "example.org", "line 2, server", "'fl.example.org' is not allowed", ":[0-9]{1,5}"),
        ("server: fl", "server: https://fl", "line 2, server", "is not allowed", "of the form"),
        ("authority: ca.crt\n", "", "silo.yaml", "authority is missing", "Name ca.crt as authority"),
        ("node_key: berlin.node\n", "", "silo.yaml", "node_key is missing", "fedsync certs silo"),
        ("index: 1", "insecure: true", "silo.yaml", "insecure: true leaves out TLS", "Remove one of the two"),
        ("ca.crt", "nowhere.crt", "line 3, authority", "nowhere.crt does not exist", "fedsync certs init"),
        ("berlin.node", "paris.node", "line 4, node_key", "paris.node does not exist", "fedsync certs silo"),
        ("keys: keys", "keys: locked", "line 6, keys", "locked does not exist", "fedsync keys"),
        ("/srv/berlin", "/srv/" + "x" * LONGEST_STATE, "line 5, state", "65 bytes, at most 60", "a shorter path"),
        ("/srv/berlin", "/srv/" + "x" * 27 + "ß" * 15, "line 5, state", "62 bytes, at most 60", "a shorter path"),
        ("/srv/berlin", r'"a\0b"', "silo.yaml, state", "cannot be a path: embedded null byte", "Write a path"),
        ("index: 1", "index: -1", "line 7, index", "-1 is not allowed", "at least 0"),
        ("cuda:1", "CUDA 1", "line 8, device", "'CUDA 1' is not allowed", "of the form"),
        ("200.0", "0.0", "line 9, declared_speed", "0.0 is not allowed", "greater than 0"),
        ("bytes: 20000", "bytes: 1", "line 10, logs.bytes", "1 is not allowed", "at least 10000"),
        ("keys: keys\n", "", "silo.yaml", "seal is given, but no keys", "Name the folder of `fedsync keys` as keys"),
        ("masks: true", "masked: true", "line 11, seal.masked", "unknown key", "Did you mean 'masks'?"),
        ("data: [data]", "data: [dat]", "line 12, data.0", "dat is no folder", "Make it, or remove it here"),
        ("data: [data]", "data: {a: dat}", "line 12, data.a", "dat is no file or folder", "Make it, or remove it here"),
        ("data: [data]", "data: dat", "line 12, data", "'dat' is not allowed", "Write a list"),
        ("data: [data]", r'data: ["a\0b"]', "line 12, data.0", "'a\\x00b' cannot be a path", "Write a path"),
        ("data: [data]", OF_NO_DATA, "silo.yaml", "privacy names data 'a', which", "as in data: {a: PATH}"),
        ("data: [data]", "code: any", "line 12, code", "'any' is not allowed", "installed, reviewed, shipped"),
        ("state: /srv/berlin\n", "", "silo.yaml", "missing", "Add this key"),
        ("state:", "stat:", "line 5, stat", "unknown key", "Did you mean 'state'?"),
    ],
)
def test_a_silos_mistake_is_named(folder: Path, old: str, new: str, place: str, problem: str, remedy: str) -> None:
    assert old in SILO
    with pytest.raises(ConfigError) as caught:
        silo(folder, SILO.replace(old, new))
    _check(caught.value, place, problem, remedy)


@pytest.mark.parametrize(
    ("old", "new", "place", "problem", "remedy"),
    [
        ("port: 9092", "port: 70000", "line 2, port", "70000 is not allowed", "at most 65535"),
        ("certificates: certs\n", "", "server.yaml", "certificates is missing", "Name the folder of"),
        ("port: 9092", "insecure: true", "server.yaml", "leaves out TLS", "Remove it"),
        ("certificates: certs", "certificates: c", "line 3, certificates", "does not exist", "fedsync certs init"),
        ("paris.node.pub", "rome.pub", "line 7, silos.paris", "rome.pub does not exist", "fedsync certs silo paris"),
        ("port: 9092", "keys: server.json", "line 2, keys", "does not exist", "fedsync keys issue"),
    ],
)
def test_a_servers_mistake_is_named(folder: Path, old: str, new: str, place: str, problem: str, remedy: str) -> None:
    assert old in SERVER
    with pytest.raises(ConfigError) as caught:
        server(folder, SERVER.replace(old, new))
    _check(caught.value, place, problem, remedy)


def _check(error: ConfigError, place: str, problem: str, remedy: str) -> None:
    assert re.search(re.escape(place), error.place), error.place
    assert problem in error.problem, error.problem
    assert remedy in error.remedy, error.remedy


# Relays.

RELAYED = """\
certificates: certs
state: server
silos: {paris: paris.node.pub}
relays:
  north: {key: berlin.node.pub, silos: [a, b]}
"""
RELAY = """\
certificates: certs
state: north
silos: {paris: paris.node.pub}
upstream: {name: north, server: "fl.example.org:9092", authority: ca.crt, node_key: berlin.node}
"""


def test_a_server_knows_relays_by_name_with_their_keys_and_regions(folder: Path) -> None:
    found = server(folder, RELAYED)
    assert found.regions == {"north": ["a", "b"]}
    assert found.node_keys == {"paris": str(folder / "paris.node.pub"), "north": str(folder / "berlin.node.pub")}
    assert server(folder, SERVER).regions == {}


def test_a_relay_is_a_server_with_another_above_it(folder: Path) -> None:
    above = server(folder, RELAY).upstream
    assert above is not None
    assert (above.name, above.authority, above.node_key) == (
        "north", str(folder / "ca.crt"), str(folder / "berlin.node"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("hub", "told"),
    [
        ("hub: {port: 65530, runs: 7}", "ports from 65530 to 65536, above 65535 .*Choose another port, or fewer runs"),
        ("hub: {port: 9090, runs: 3}", "ports from 9090 to 9092, .*with port 9092 of the server"),
        ("hub: {port: 65530, runs: 6}", ""),
        ("hub: {port: 9090, runs: 3, proxy: 'fl.example.org:443'}", ""),
    ],
)
def test_every_simultaneous_run_has_a_port(hub: str, told: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=told) if told else nullcontext():
        server(folder, SERVER + hub)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RELAYED.replace("berlin.node.pub", "none.pub"), "none.pub does not exist"),
        (RELAYED.replace("north:", "paris:"), "paris: a relay needs a name that no silo has"),
        (RELAY.replace("ca.crt", "none.crt"), "none.crt does not exist"),
        (RELAY.replace("berlin.node", "none.node"), "none.node does not exist"),
        (RELAY.replace("certificates: certs", "insecure: true").replace("silos", "# silos"), "it needs certificates"),
        (RELAYED + RELAY.splitlines()[-1], "has no relays of its own"),
        (RELAYED.replace("certificates: certs", "insecure: true").replace("silos: {p", "# {p"), "leaves out TLS"),
    ],
)
def test_a_file_of_a_relay_or_with_one_that_cannot_be(text: str, told: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        server(folder, text)
