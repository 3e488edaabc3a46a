"""What makes a server a relay: one program more, and a run of its own."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import ConfigError, RunError
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.server_start import ServerStartConfig, UpstreamConfig
from fedsync.extras.relays import relay_start as relay
from fedsync.extras.relays.relay_start import RELAY_RUN, begin_relaying, uplink_programs
from fedsync.ops.runs import RUN_FILE, RUNS
from fedsync.silo.agent.joins import OWN_NODE


@pytest.fixture
def config(tmp_path: Path) -> ServerStartConfig:
    above = UpstreamConfig(name="north", server="fl.example.org:9092", authority="/ca.crt", node_key="/north.node")
    (tmp_path / "state").mkdir(mode=0o700)
    return ServerStartConfig(state=str(tmp_path / "state"), certificates="/c", keys="/server.json", upstream=above)


def above(config: ServerStartConfig) -> UpstreamConfig:
    assert config.upstream is not None
    return config.upstream


def test_a_relay_has_a_node_at_the_server_above_it(config: ServerStartConfig) -> None:
    agent, uplink, room = uplink_programs(above(config), Path(config.state))
    assert uplink.rejoins and "fl.example.org:9092" in uplink.command and "/north.node" in uplink.command
    assert f'relay="{config.state}/relay.sock"' in " ".join(uplink.command)
    # The relay is a silo of that server, whose owner is asked, too; what runs bring along is confined.
    node = json.loads(agent.environment[OWN_NODE])
    assert (node["hub-hosts"], node["hub-authority"]) == ("fl.example.org", "/ca.crt")
    assert json.loads(room.environment[ALLOWED]) == {"hub_hosts": ["fl.example.org"]} and "--room" in room.command


def test_its_run_is_submitted_once(config: ServerStartConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time the server does not take it."""
    submitted: list[dict[str, Any]] = []

    def hand_over(config: ServerStartConfig, folder: Path, settings: dict[str, Any]) -> None:
        submitted.append(settings)
        if len(submitted) == 1:
            raise RunError("not yet")
        (folder / RUN_FILE).write_text("{}")

    class Connection:
        def close(self) -> None: ...

    monkeypatch.setattr(relay, "hand_over", hand_over)
    monkeypatch.setattr("socket.create_connection", lambda *_, **__: Connection())
    monkeypatch.setattr(relay, "_PAUSES", type("Pauses", (), {"pause_s": staticmethod(lambda tries: 0.0)}))
    stop = threading.Event()
    for _ in range(2):
        begin_relaying(config, stop)
    folder = Path(config.state).resolve() / RUNS / RELAY_RUN
    told = {"relay": f"{config.state}/relay.sock", "control": str(folder), "keys": "/server.json"}
    assert submitted == [told, told]
    begin_relaying(config.model_copy(update={"upstream": None}), stop)
    assert len(submitted) == 2


def test_a_restarted_relay_has_the_keys_of_its_present_file(config: ServerStartConfig) -> None:
    """Keys that the operator names after the first start; all else that the record has stays."""
    folder = Path(config.state).resolve() / RUNS / RELAY_RUN
    folder.mkdir(parents=True)
    settings = {"relay": f"{config.state}/relay.sock", "control": str(folder), "keys": "", "resume": "yes"}
    record = {"number": "12345", "state": config.state, "settings": settings}
    (folder / RUN_FILE).write_text(json.dumps(record))
    begin_relaying(config, threading.Event())
    assert json.loads((folder / RUN_FILE).read_text()) == {**record, "settings": {**settings, "keys": "/server.json"}}


def test_a_relay_without_isolation_says_who_asks_it(config: ServerStartConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsync.ops.programs.can_confine", lambda: False)
    with pytest.raises(ConfigError, match=r"server.yaml, upstream: this system cannot isolate .*Landlock"):
        uplink_programs(above(config), Path(config.state))
