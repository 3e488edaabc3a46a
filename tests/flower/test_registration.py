"""How keys get to a SuperLink by Flower's command line, and what is put down of them.

A fake stands in the place of ``flwr``; tests/e2e/test_strangers.py asks a real one.
"""

import base64
import json
import stat
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedsync.common.errors import ConfigError, RunError
from fedsync.common.locks import taken
from fedsync.common.processes import INTERPRETER
from fedsync.flower import registration
from fedsync.flower.registration import NODES_FILE, Registered
from fedsync.identity.node_keys import make_node_key
from fedsync.ops import runs

Keys = Callable[..., Path]

FAKE = '''
import json, os, signal, sys
from pathlib import Path
from rich.console import Console

HERE = Path(__file__).parent
TOLD = ("FLWR_HOME", "NO_PROXY", "FLWR_TELEMETRY_ENABLED", "PYTHONSAFEPATH")

def fail(text):
    """As with ``--format json``: an error is told in the output alone."""
    print(json.dumps({"success": False, "error-message": text}, indent=2))
    sys.exit(0)

def app(arguments, prog_name):
    """What Flower's does with nodes: a key stays for ever, and names are not looked at."""
    with (HERE / "calls").open("a") as calls:
        told = {name: os.environ.get(name) for name in TOLD}
        calls.write(json.dumps({"arguments": arguments, "pid": os.getpid(), **told}) + "\\n")
    for word in (HERE / "does").read_text().split():
        match word:
            case "answers-not":
                fail("Connection to the SuperLink is unavailable.")
            case "raises":
                raise ValueError("no such connection")
            case "dies":
                if (HERE / "calls").read_text().count("\\n") > 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                signal.pause()
            case "is-loud":
                os.write(1, b"past Python's streams ")
                os.system("echo from a child")
    nodes = json.loads((HERE / "link").read_text())
    if arguments[1] == "register":
        key, name = Path(arguments[2]).read_text(), arguments[arguments.index("--name") + 1]
        if any(node["key"] == key for node in nodes):
            fail("Public key already in use.")
        number = 2**63 + len(nodes)
        nodes.append({"key": key, "name": name, "number": number, "here": True})
        print(f"SuperNode {number} registered successfully.")
    else:
        number = int(arguments[2])
        (node,) = (node for node in nodes if node["number"] == number)
        if not node["here"]:
            fail("Node ID not found for account.")
        node["here"] = False
    (HERE / "link").write_text(json.dumps(nodes))
    Console().print_json(data={"success": True, "node-id": number})
    sys.exit(0)
'''


class FakeFlower:
    """Flower's command line, and a SuperLink that it speaks to.

    Args:
        folder: of what it has, which comes before Flower's own in the search path.
        home: Flower's, in which nodes are noted.
    """

    def __init__(self, folder: Path, home: Path) -> None:
        self._folder, self.home = folder, home
        package = folder / "flwr-0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: flwr\nVersion: 0\n")
        (package / "entry_points.txt").write_text("[console_scripts]\nflwr = fake_flwr:app\n")
        (folder / "fake_flwr.py").write_text(FAKE)
        (folder / "link").write_text("[]")
        self.does()
        home.mkdir(mode=0o700)

    def does(self, *words: str) -> None:
        """What it does from now on, beside what it is there for."""
        (self._folder / "does").write_text(" ".join(words))

    @property
    def calls(self) -> list[dict[str, Any]]:
        noted = self._folder / "calls"
        return [json.loads(line) for line in noted.read_text().splitlines()] if noted.exists() else []

    @property
    def nodes(self) -> list[tuple[str, bool]]:
        """Names under which the SuperLink has keys, and whether it lets them in."""
        return [(node["name"], node["here"]) for node in json.loads((self._folder / "link").read_text())]

    def register(self, keys: Mapping[str, Path]) -> Registered:
        return registration.register_each(keys, self.home, "here")

    def revoke(self, name: str) -> None:
        registration.revoke_keys(name, self.home, "here")


@pytest.fixture
def flower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlower:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return FakeFlower(tmp_path / "packages", tmp_path / "home")


@pytest.fixture
def key(tmp_path: Path) -> Keys:
    """Makes a silo's key; another one in each folder."""
    return lambda name, folder="keys": make_node_key(name, tmp_path / folder).public


@pytest.mark.parametrize(
    ("authority", "trust"),
    [(None, {"insecure": True}), (Path('/c "x"\\😀/ca.crt'), {"root-certificates": '/c "x"\\😀/ca.crt'})],
)
def test_flowers_command_line_is_told_the_way(authority: Path | None, trust: dict[str, object], tmp_path: Path) -> None:
    registration.write_connection(tmp_path, "here", "127.0.0.1:5", authority)
    told = tomllib.loads((tmp_path / "config.toml").read_text())
    assert told == {"superlink": {"default": "here", "here": {"address": "127.0.0.1:5", **trust}}}


def test_a_key_is_registered_once(flower: FakeFlower, key: Keys) -> None:
    keys = {name: key(name) for name in ("berlin", "paris")}
    assert flower.register(keys) == flower.register(keys) == Registered()
    assert flower.nodes == [("berlin", True), ("paris", True)]
    asked = [["supernode", "register", str(path), "here", "--name", name] for name, path in keys.items()]
    assert [call["arguments"] for call in flower.calls] == [[*each, "--format", "json"] for each in asked]
    assert len({call["pid"] for call in flower.calls}) == 1, "the imports of a process take a second or two"


def test_registrations_are_not_changed_while_another_process_changes_them(
    flower: FakeFlower, key: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both would write the whole record: a key that one revokes would be valid in the other's."""
    monkeypatch.setattr(registration, "_LOCK_S", 0.0)
    berlin, paris = key("berlin"), key("paris")
    flower.register({"berlin": berlin})
    with taken(flower.home / f"{NODES_FILE}.lock"):
        with pytest.raises(RunError, match="another process changes the registrations"):
            flower.register({"paris": paris})
        with pytest.raises(RunError, match="another process changes the registrations"):
            flower.revoke("berlin")
    assert flower.nodes == [("berlin", True)]
    assert flower.register({"paris": paris}) == Registered()


def test_flower_s_command_goes_through_no_proxy_and_calls_nobody_else(
    flower: FakeFlower, key: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    flower.register({"berlin": key("berlin")})
    (call,) = flower.calls
    assert "127.0.0.1" in call["NO_PROXY"].split(",")
    assert (call["FLWR_HOME"], call["FLWR_TELEMETRY_ENABLED"], call["PYTHONSAFEPATH"]) == (str(flower.home), "0", "1")


def test_what_was_registered_is_put_down_for_the_server_alone(flower: FakeFlower, key: Keys) -> None:
    flower.register({"berlin": key("berlin")})
    flower.revoke("berlin")
    flower.register({"berlin": key("berlin", "fresh")})
    noted = json.loads((flower.home / NODES_FILE).read_text())
    assert [(each["name"], each["node"], each["revoked"]) for each in noted] == [
        ("berlin", str(2**63), True), ("berlin", str(2**63 + 1), False),
    ]  # fmt: skip
    assert len({each["key"] for each in noted}) == 2 and all(len(each["key"]) == 64 for each in noted)
    assert stat.S_IMODE((flower.home / NODES_FILE).stat().st_mode) == 0o600


def test_a_silo_s_other_key_takes_the_place_of_the_one_before(flower: FakeFlower, key: Keys) -> None:
    old, other, fresh = key("berlin", "old"), key("paris"), key("berlin", "fresh")
    flower.register({"berlin": old, "paris": other})
    assert flower.register({"berlin": fresh, "paris": other}) == Registered(retired={"berlin": 1})
    assert flower.nodes == [("berlin", False), ("paris", True), ("berlin", True)]
    assert [call["arguments"][1] for call in flower.calls][-2:] == ["register", "unregister"], "it is never without"
    back = flower.register({"berlin": old}).problems["berlin"]
    assert isinstance(back, ConfigError) and "was revoked before" in str(back) and "remove berlin.node" in back.remedy
    assert flower.nodes[-1] == ("berlin", True), "the valid key stays where the other will not do"


def test_the_key_before_stays_where_the_other_cannot_be_registered(flower: FakeFlower, key: Keys) -> None:
    flower.register({"berlin": key("berlin", "old")})
    flower.does("raises")
    assert flower.register({"berlin": key("berlin", "fresh")}).problems.keys() == {"berlin"}
    assert flower.nodes == [("berlin", True)]
    flower.does()
    assert flower.register({"berlin": key("berlin", "fresh")}) == Registered(retired={"berlin": 1})


@pytest.mark.parametrize("together", [False, True])
def test_a_key_under_another_name_is_no_registration(together: bool, flower: FakeFlower, key: Keys) -> None:
    one = key("berlin")
    if not together:
        flower.register({"berlin": one})
    problem = flower.register({"berlin": one, "munich": one}).problems["munich"]
    assert isinstance(problem, ConfigError) and "is registered under the name 'berlin'" in problem.problem
    assert flower.nodes == [("berlin", True)]
    assert flower.register({"berlin": one}) == Registered(), "which costs the silo nothing whose key it is"


def test_a_key_that_was_revoked_stays_out(flower: FakeFlower, key: Keys) -> None:
    keys = {name: key(name) for name in ("berlin", "paris")}
    flower.register(keys)
    for name in ("berlin", "berlin", "rome"):
        flower.revoke(name)
    assert flower.nodes == [("berlin", False), ("paris", True)]
    found = flower.register(keys)
    assert found.problems.keys() == {"berlin"} and "was revoked before" in str(found.problems["berlin"])
    assert "fedsync silo rotate" in str(found.problems["berlin"])
    assert flower.register({"berlin": key("berlin", "fresh")}) == Registered()
    assert flower.nodes == [("berlin", False), ("paris", True), ("berlin", True)]


def test_of_a_key_that_the_superlink_knew_before_nobody_can_say_whose_it_is(flower: FakeFlower, key: Keys) -> None:
    """As where the list of nodes was lost, and the SuperLink's database was not."""
    keys = {"berlin": key("berlin")}
    flower.register(keys)
    (flower.home / NODES_FILE).unlink()
    assert flower.register({**keys, "paris": key("paris")}) == Registered(unsure=["berlin"])
    assert flower.register(keys) == Registered(), "once is enough"
    assert len(flower.calls) == 3
    with pytest.raises(RunError, match="did not unregister 1 keys of 'berlin'"):
        flower.revoke("berlin")
    assert flower.nodes[0] == ("berlin", True)


def other_key(kind: str) -> bytes:
    match kind:
        case "rsa":
            public = rsa.generate_private_key(65537, 1024).public_key()
            return public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        case "dsa":
            parts = (b"ssh-dss", b"\1", b"\1", b"\1", b"\1")
            return b"ssh-dss " + base64.b64encode(b"".join(len(part).to_bytes(4, "big") + part for part in parts))
    return b"ssh-rsa nonsense"


@pytest.mark.parametrize("kind", ["rsa", "dsa", "nonsense", "missing"])
def test_a_bad_key_keeps_no_other_silo_out(kind: str, flower: FakeFlower, key: Keys, tmp_path: Path) -> None:
    bad = tmp_path / "berlin.node.pub"
    if kind != "missing":
        bad.write_bytes(other_key(kind))
    found = flower.register({"berlin": bad, "paris": key("paris")})
    problem = found.problems.pop("berlin")
    assert isinstance(problem, ConfigError) and str(bad) in problem.problem
    assert "fedsync certs silo berlin" in problem.remedy
    assert found == Registered() and flower.nodes == [("paris", True)]


def test_problems_are_raised_together() -> None:
    one, two = ConfigError("silos, a", "bad", "mend"), RunError("refused")
    Registered().check()
    with pytest.raises(ConfigError, match="bad"):
        Registered({"a": one}).check()
    with pytest.raises(RunError, match=r"silos, a: bad. mend\nrefused"):
        Registered({"a": one, "b": two}).check()


# A command line that does not do what it should.


@pytest.mark.parametrize(
    ("does", "said"), [("answers-not", "the SuperLink is unavailable"), ("raises", "ValueError: no such connection")]
)
def test_without_a_superlink_the_silo_is_named_alone(does: str, said: str, flower: FakeFlower, key: Keys) -> None:
    keys = {"berlin": key("berlin")}
    flower.does(does)
    with pytest.raises(RunError, match=f"the key of 'berlin' could not be registered: .*{said}"):
        registration.register_each(keys, flower.home, "here").check()
    flower.does()
    assert flower.register(keys) == Registered() and flower.nodes == [("berlin", True)]
    flower.does(does)
    with pytest.raises(RunError, match="did not unregister 1 keys of 'berlin'; if it runs"):
        flower.revoke("berlin")
    flower.does()
    noted = (flower.home / NODES_FILE).read_bytes()
    flower.revoke("berlin")
    (flower.home / NODES_FILE).write_bytes(noted)
    flower.revoke("berlin")  # again, after a kill before the note
    assert flower.nodes == [("berlin", False)]


def test_colours_that_the_environment_asks_for_hide_no_answer(
    flower: FakeFlower, key: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    assert flower.register({"berlin": key("berlin")}) == Registered()
    flower.revoke("berlin")
    assert flower.nodes == [("berlin", False)]


def test_what_was_registered_before_the_command_died_is_put_down(flower: FakeFlower, key: Keys) -> None:
    keys = {name: key(name) for name in ("berlin", "paris", "rome")}
    flower.does("dies")
    assert flower.register(keys).problems.keys() == {"paris", "rome"}
    flower.does()
    assert flower.register(keys) == Registered()
    assert flower.nodes == [("berlin", True), ("paris", True), ("rome", True)]


def test_a_command_that_hangs_is_ended(flower: FakeFlower, key: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    flower.does("hangs")
    monkeypatch.setattr(registration, "_TIMEOUT_S", -9.0)  # and ten seconds for the key
    (problem,) = flower.register({"berlin": key("berlin")}).problems.values()
    assert "did not end in time" in str(problem)


def test_each_call_has_its_own_output_wherever_it_is_written(flower: FakeFlower, key: Keys) -> None:
    flower.does("is-loud")
    calls = [["supernode", "register", str(key(name)), "here", "--name", name] for name in ("berlin", "paris")]
    command = [*INTERPRETER, "fedsync.flower.flwr_calls"]
    done = subprocess.run(command, input=json.dumps([*calls, calls[0]]), capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [code for code, _ in found] == [0, 0, 0]
    assert all(text.startswith("past Python's streams from a child\n") for _, text in found)
    assert [str(2**63) in text for _, text in found] == [True, False, False]
    assert json.loads(found[2][1].partition("child\n")[2])["error-message"] == "Public key already in use."


# The same command line, where it submits runs.


@pytest.fixture
def flwr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Puts a script in the place of Flower's command; it notes its arguments and then does as it is told."""

    def put(then: str) -> Path:
        script, noted = tmp_path / "flwr", tmp_path / "noted"
        script.write_text(f'#!/bin/sh\necho "$FLWR_HOME" "$@" >> {noted}\n{then}\n')
        script.chmod(0o755)
        monkeypatch.setattr(runs, "flwr_command", lambda: str(script))
        return noted

    return put


@pytest.mark.parametrize("use", ["submit", "withdraw"])
def test_a_flwr_that_hangs_or_is_not_there_is_a_run_s_error(
    use: str, flwr: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"submit": runs.submit, "withdraw": runs.withdraw}[use]
    flwr("exec sleep 60")
    monkeypatch.setattr(runs, "_FLWR_S", 0.05)
    with pytest.raises(RunError, match=r"flwr (run|stop) did not end within 0.05 s"):
        call(tmp_path, "here", {})  # type: ignore[operator]  # of either kind: a path will do for a number
    monkeypatch.setattr(runs, "flwr_command", lambda: str(tmp_path / "nothing"))
    with pytest.raises(RunError, match="could not be started"):
        call(tmp_path, "here", {})  # type: ignore[operator]  # as above


def test_a_run_is_an_app_with_its_settings(flwr: Callable[[str], Path], tmp_path: Path) -> None:
    folder = runs.write_bundle(tmp_path / "r" / "app", {"strategy": 'a "quoted" \\ 😀', "target-accuracy": 0.5})
    app = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert app["config"] == {"strategy": 'a "quoted" \\ 😀', "target-accuracy": 0.5}
    noted = flwr("echo Successfully started run 1234567890")
    assert runs.submit(folder, "here", {"FLWR_HOME": "/h"}) == "1234567890"
    assert noted.read_text() == f"/h run {folder} here\n"
    flwr("echo the SuperLink is away; exit 3")
    with pytest.raises(RunError, match=r"did not accept the run: the SuperLink is away. `fedsync doctor"):
        runs.submit(folder, "here", {})


@pytest.mark.parametrize("text", ["", "7", '[{"name": 5}]', '{"berlin": 1}', "[\n{"])
def test_a_damaged_record_of_the_keys_is_named_with_the_way_on(tmp_path: Path, text: str) -> None:
    (tmp_path / NODES_FILE).write_text(text)
    with pytest.raises(ConfigError, match=rf"{NODES_FILE}: cannot be read: .*Restore it from a backup"):
        registration.known_nodes(tmp_path)
