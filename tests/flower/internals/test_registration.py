"""How keys get to a SuperLink, where there is one; tests/e2e/test_strangers.py asks a real one."""

import base64
import tomllib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto.control_pb2 import ListNodesRequest, ListNodesResponse, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo

from fedsync.common.processes import free_ports
from fedsync.core.errors import ConfigError, RunError
from fedsync.flower.internals import registration
from fedsync.flower.internals.operator import make_secret
from fedsync.flower.internals.registration import Registered
from fedsync.identity.certificates import make_authority
from fedsync.identity.node_keys import make_node_key
from fedsync.ops import runs


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in the place of Flower's command line; it notes its arguments and then does as it is told."""

    def put(then: str) -> Path:
        script, noted = tmp_path / "flwr", tmp_path / "noted"
        script.write_text(f'#!/bin/sh\necho "$FLWR_HOME" "$@" >> {noted}\n{then}\n')
        script.chmod(0o755)
        for module in (registration, runs):
            monkeypatch.setattr(module, "flwr_command", lambda: str(script))
        monkeypatch.setattr(registration.versions, "supported", lambda: False)
        return noted

    return put


@pytest.mark.parametrize(
    ("authority", "trust"), [(None, {"insecure": True}), (Path("/c/ca.crt"), {"root-certificates": "/c/ca.crt"})]
)
def test_flowers_command_line_is_told_the_way(authority: Path | None, trust: dict[str, object], tmp_path: Path) -> None:
    registration.write_connection(tmp_path, "here", "127.0.0.1:5", authority)
    told = tomllib.loads((tmp_path / "config.toml").read_text())
    assert told == {"superlink": {"default": "here", "here": {"address": "127.0.0.1:5", **trust}}}


class SuperLink:
    """What Flower's does with nodes: a key stays for ever, and names are not looked at."""

    def __init__(self) -> None:
        self.nodes: list[NodeInfo] = []
        self.looks = 0

    def ListNodes(self, request: ListNodesRequest) -> ListNodesResponse:
        self.looks += 1
        return ListNodesResponse(nodes_info=self.nodes)

    def RegisterNode(self, request: RegisterNodeRequest) -> None:
        assert all(node.public_key != request.public_key for node in self.nodes), "already in use"
        node = NodeInfo(node_id=len(self.nodes) + 1, name=request.name, public_key=request.public_key)
        node.status = "registered"
        self.nodes.append(node)

    def UnregisterNode(self, request: UnregisterNodeRequest) -> None:
        (node,) = (node for node in self.nodes if node.node_id == request.node_id)
        assert node.status != "unregistered"
        node.status = "unregistered"

    @property
    def seen(self) -> list[tuple[str, str]]:
        return [(node.name, node.status) for node in self.nodes]


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    found = SuperLink()
    monkeypatch.setattr(registration, "_operator", lambda home, address, authority: nullcontext(found))
    return found


def register(keys: Mapping[str, Path]) -> Registered:
    return registration.register_each(keys, Path("home"), "here", "unused", Path("ca.crt"))


def test_a_key_is_registered_once(superlink: SuperLink, tmp_path: Path) -> None:
    keys = {name: make_node_key(name, tmp_path).public for name in ("berlin", "paris")}
    assert register(keys) == register(keys) == Registered()
    assert superlink.seen == [("berlin", "registered"), ("paris", "registered")]
    superlink.nodes[0].status = "online"
    assert register(keys) == Registered()


def test_all_that_a_superlink_has_is_asked_for_once(superlink: SuperLink, tmp_path: Path) -> None:
    keys = {name: make_node_key(name, tmp_path).public for name in ("berlin", "paris", "rome")}
    assert register(keys) == Registered()
    assert superlink.looks == 1, "with each key, the work for a thousand would be that for a million"
    assert {name for name, _ in superlink.seen} == keys.keys()


def test_a_silo_s_other_key_takes_the_place_of_the_one_before(superlink: SuperLink, tmp_path: Path) -> None:
    old, other, fresh = (make_node_key(name, tmp_path / folder).public for name, folder in
                         (("berlin", "old"), ("paris", "old"), ("berlin", "fresh")))  # fmt: skip
    register({"berlin": old, "paris": other})
    superlink.nodes[0].status = "online"
    assert register({"berlin": fresh, "paris": other}) == Registered(retired={"berlin": 1})
    assert superlink.seen == [("berlin", "unregistered"), ("paris", "registered"), ("berlin", "registered")]
    back = register({"berlin": old}).problems["berlin"]
    assert isinstance(back, ConfigError) and "was revoked before" in str(back) and "remove berlin.node" in back.remedy
    assert superlink.seen[-1] == ("berlin", "registered"), "the valid key stays where the other will not do"


def test_a_key_under_another_name_is_no_registration(superlink: SuperLink, tmp_path: Path) -> None:
    key = make_node_key("berlin", tmp_path).public
    problem = register({"berlin": key, "munich": key}).problems["munich"]
    assert isinstance(problem, ConfigError) and "is registered under the name 'berlin'" in problem.problem
    assert superlink.seen == [("berlin", "registered")]


def other_key(kind: str) -> bytes:
    match kind:
        case "rsa":
            public = rsa.generate_private_key(65537, 1024).public_key()
            return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        case "ed25519":
            return (
                ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            )
        case "dsa":
            parts = (b"ssh-dss", b"\1", b"\1", b"\1", b"\1")
            return b"ssh-dss " + base64.b64encode(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
    return b"ssh-rsa nonsense"


@pytest.mark.parametrize("kind", ["rsa", "ed25519", "dsa", "nonsense", "missing"])
def test_a_bad_key_keeps_no_other_silo_out(kind: str, superlink: SuperLink, tmp_path: Path) -> None:
    good, bad = make_node_key("paris", tmp_path).public, tmp_path / "berlin.node.pub"
    if kind != "missing":
        bad.write_bytes(other_key(kind))
    found = register({"berlin": bad, "paris": good})
    problem = found.problems.pop("berlin")
    assert isinstance(problem, ConfigError) and str(bad) in problem.problem
    assert "fedsync certs silo berlin" in problem.remedy
    assert found == Registered() and superlink.seen == [("paris", "registered")]


def test_problems_are_raised_together() -> None:
    one, two = ConfigError("silos, a", "bad", "mend"), RunError("refused")
    Registered().check()
    with pytest.raises(ConfigError, match="bad"):
        Registered({"a": one}).check()
    with pytest.raises(RunError, match=r"silos, a: bad. mend\nrefused"):
        Registered({"a": one, "b": two}).check()


def test_no_server_is_an_error_that_names_the_silo(tmp_path: Path) -> None:
    authority = make_authority(tmp_path / "c").certificate
    key = make_node_key("berlin", tmp_path / "k").public
    tmp_path.chmod(0o700)
    make_secret(tmp_path)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(RunError, match=rf"the key of 'berlin' could not be registered: .*{address} does not answer"):
        registration.register_keys({"berlin": key}, tmp_path, "here", address, authority)
    with pytest.raises(RunError, match="does not answer"):
        registration.revoke_keys("berlin", tmp_path, address, authority)


def test_an_untested_flwr_is_asked_by_its_command(flwr: Callable[[str], Path], tmp_path: Path) -> None:
    noted = flwr("exit 0")
    keys = {name: make_node_key(name, tmp_path).public for name in ("berlin", "paris")}
    registration.register_keys(keys, tmp_path, "here", "unused", tmp_path / "ca.crt")
    assert noted.read_text().splitlines() == [
        f"{tmp_path} supernode register {tmp_path}/berlin.node.pub here --name berlin",
        f"{tmp_path} supernode register {tmp_path}/paris.node.pub here --name paris",
    ]
    with pytest.raises(ConfigError, match="flwr supernode unregister"):
        registration.revoke_keys("berlin", tmp_path, "unused", tmp_path / "ca.crt")


def test_an_untested_flwr_cannot_say_how_it_knows_a_key(flwr: Callable[[str], Path], tmp_path: Path) -> None:
    key = {"berlin": make_node_key("berlin", tmp_path).public}
    flwr("echo Error: Public key already in use. >&2; exit 1")
    assert register(key) == Registered(unsure=["berlin"])
    flwr("echo no such connection; exit 1")
    with pytest.raises(RunError, match="'berlin' could not be registered: no such connection"):
        register(key).check()
    flwr("kill -9 $$")
    assert isinstance(register(key).problems["berlin"], RunError)


@pytest.mark.parametrize("use", ["submit", "withdraw"])
def test_a_flwr_that_hangs_or_is_not_there_is_a_run_s_error(
    use: str, flwr: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"submit": runs.submit, "withdraw": runs.withdraw}[use]
    flwr("exec sleep 60")
    monkeypatch.setattr(runs, "_FLWR_S", 0.05)
    with pytest.raises(RunError, match=r"flwr (run|stop) did not come back in 0.05 s"):
        call(tmp_path, "here", {})  # type: ignore[operator]  # of either kind: a path will do for a number
    monkeypatch.setattr(runs, "flwr_command", lambda: str(tmp_path / "nothing"))
    with pytest.raises(RunError, match="could not be started"):
        call(tmp_path, "here", {})  # type: ignore[operator]  # as above


def test_a_run_is_an_app_with_its_settings(flwr: Callable[[str], Path], tmp_path: Path) -> None:
    folder = runs.write_bundle(tmp_path / "r" / "app", {"strategy": 'a "quoted" \\ path', "target-accuracy": 0.5})
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"] == {"strategy": 'a "quoted" \\ path', "target-accuracy": 0.5}
    noted = flwr("echo Successfully started run 1234567890")
    assert runs.submit(folder, "here", {"FLWR_HOME": "/h"}) == "1234567890"
    assert noted.read_text() == f"/h run {folder} here\n"
    flwr("echo the SuperLink is away; exit 3")
    with pytest.raises(RunError, match="code 3:\nthe SuperLink is away"):
        runs.submit(folder, "here", {})
