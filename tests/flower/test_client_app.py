"""What a silo's owner decides goes before what the run wants: the device, and what is told of the machine."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.cluster import SiloConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.flower import client_app, payloads
from fedsync.flower import flower_messages as messages
from fedsync.model.transfer import Payload
from fedsync.silo.agent import answers
from fedsync.silo.agent.answers import emulated_line, identify
from fedsync.silo.agent.joins import INBOX, JOINED, JoinedRun, dropped, trusted
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import STATE, AskModel, Identity, InProgress, Refusal, Refused, Train, exchange, write_reply
from fedsync.silo.session.service import TrainerService
from fedsync.silo.session.trainer_client import app_folder, asked_for
from fedsync.train.loop import Trainer
from fedsync.transport.join import Join, new_secret
from tests.e2e.deployed import SMALL
from tests.flower.grid import posing, said

pytestmark = pytest.mark.usefixtures("silos_here")

ORDER = WorkOrder("a/1", 0, 1, 8, 2, 0.1, seed=1)
FAST = [SMALL, "local.threads=1", "local.steps=1", "local.batch_size=8", "stop.rounds=2"]


def spec(*overrides: str, emulate: list[SiloConfig] | None = None) -> str:
    config = StrategyConfig.load("fedavg", [*FAST, *overrides])
    return RunSpec(seed=7, silos=2, task=config.task, local=config.local, emulate=emulate or []).dump()


def windows(service: TrainerService) -> set[tuple[bool, bool]]:
    """Whether the windows of a report tell of processor and memory."""
    order = WorkOrder("a/1", 0, 1, 8, 2, 0.1, seed=1, evaluate=False)
    _, model = exchange(service.ask, AskModel())
    report, _ = exchange(service.ask, Train(order), model)
    assert isinstance(report, WorkReport) and report.windows
    return {(window.cpu is not None, window.memory is not None) for window in report.windows}


# What the node's configuration says.


def test_a_node_decides_or_goes_with_the_run() -> None:
    with pytest.raises(ConfigError, match="node configuration, partition-id: 'three' is no number"):
        identify("{}", {"partition-id": "three"})
    assert identify("{}", {"partition-id": 3}) == Identity("{}", 3, "silo-3", None, None, True)
    node = {"partition-id": 1, "silo-name": "clinic-a", "declared-speed": 20, "device": "cuda:1", "resources": False}
    assert identify("{}", node) == Identity("{}", 1, "clinic-a", 20.0, "cuda:1", False)


@pytest.mark.parametrize(
    ("node", "tells"), [("on", True), ("On", True), (True, True), ("OFF", False), (False, False), ("no", False)]
)
def test_a_node_says_whether_its_resources_are_told(node: bool | str, tells: bool) -> None:
    assert identify("{}", {"resources": node}).resources is tells


def test_a_word_that_means_nothing_is_not_taken_for_consent() -> None:
    with pytest.raises(ConfigError) as caught:
        identify("{}", {"resources": "of"})

    assert caught.value.place == "node configuration, resources"


# What comes of it.


@pytest.mark.parametrize(
    ("run", "owner", "told"),
    [("true", True, True), ("true", False, False), ("false", True, False), ("false", False, False)],
)
def test_the_stricter_of_run_and_owner_wins(run: str, owner: bool, told: bool) -> None:
    service = TrainerService(Identity(spec(f"local.resources={run}"), 0, "a", resources=owner))

    assert windows(service) == {(told, told)}


def test_a_silo_s_own_device_goes_before_the_run_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    service = TrainerService(Identity(spec("local.device=cuda"), 0, "a", device="cpu"))

    assert service.facts.device == "cpu"
    with pytest.raises(ConfigError, match=r"local\.device: 'cuda' is not there"):
        TrainerService(Identity(spec("local.device=cuda"), 1, "b"))
    with pytest.raises(ConfigError, match=r"node configuration, device: 'cuda:1' is not there"):
        TrainerService(Identity(spec(), 1, "b", device="cuda:1"))


def test_a_batch_cap_is_looked_for_on_a_gpu_unless_the_machine_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "find_batch_cap_on_gpu", lambda trainer: 48)
    machine = SiloConfig(name="m", speed=1e6, memory_samples=9)

    assert TrainerService(Identity(spec(), 0, "a")).facts.memory_samples == 48
    assert TrainerService(Identity(spec(emulate=[machine, machine]), 0, "a")).facts.memory_samples == 9


def test_training_code_of_ones_own_hears_what_is_not_for_fedsync() -> None:
    """All that this app's own configuration has is for FedSync; a resumed run stays the same run."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    own = project["tool"]["flwr"]["app"]["config"]
    told = identify("{}", {"partition-id": 1, "site": "north"}, {**own, "resume": True, "epochs": 3})
    assert (told.node_config, told.run_config) == ('{"site": "north"}', '{"epochs": 3}')


# The line of a machine that a silo emulates.


@pytest.mark.parametrize(
    ("machine", "allowed", "seconds"),
    [
        ({}, "", 0.0),
        ({"latency_s": 0.25}, "", 0.25),
        ({"bandwidth_mbps": 8.0}, "", 2.0),  # by hand: 2 MB at 1 MB/s
        ({"bandwidth_mbps": 8.0, "latency_s": 0.25}, "", 2.25),
        ({"bandwidth_mbps": 8.0, "latency_s": 0.25}, "{}", 0.0),  # a silo with an owner
    ],
)
def test_a_message_comes_as_late_as_on_the_line_that_is_emulated(
    machine: dict[str, float], allowed: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = [SiloConfig(name="other", speed=1.0, latency_s=9.0), SiloConfig(name="a", speed=1.0, **machine)]  # type: ignore[arg-type]
    identity = Identity(spec(emulate=machines), 1, "a")
    line = emulated_line(identity, {ALLOWED: allowed})
    waited: list[float] = []
    monkeypatch.setattr(answers, "time", SimpleNamespace(sleep=waited.append, monotonic=lambda: 10.5))
    line.carried(np.zeros(2_000_000, np.uint8), begin_s=10.0)
    assert waited == [pytest.approx(max(0.0, seconds - 0.5))], "half a second is over"
    line.carried(None, begin_s=10.5)
    assert waited[1] == pytest.approx(0.0 if allowed else machine.get("latency_s", 0.0))


# Joins, and the app that a run brought along.

HOSTS = "fed.example.org"


def joined(address: str = f"https://{HOSTS}:9000/v1/fedsync") -> str:
    return Join((address,), new_secret(), "PEM" if address.startswith("https") else "", "run", "a").dump()


def handed(text: str, **node: str) -> Message:
    """What the app answers to a join."""
    message = messages.join(1, text, 60.0)
    message.metadata.__dict__["_message_id"] = "x"
    return client_app.app(message, Context(7, 8, {"partition-id": 0, **node}, RecordDict(), {"epochs": 3}))


@pytest.fixture
def inbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a ClientApp in its room leaves joins for the agent."""
    monkeypatch.setenv(STATE, str(tmp_path / "state"))
    monkeypatch.setenv(INBOX, str(tmp_path / "inbox"))
    for folder in ("state", "inbox"):
        (tmp_path / folder).mkdir(mode=0o700)
    return tmp_path / "inbox"


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Flower app that the run brought along, unpacked."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    folder = tmp_path / "apps" / "mine"
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_a_join_is_handed_over_with_what_a_silo_needs_for_its_run(inbox: Path, app: Path) -> None:
    text = joined()
    reply = handed(text, **{"hub-hosts": HOSTS, "site": "north"})
    assert messages.read_answer(reply, "a", 0) == (JOINED, None) and not messages.is_relay(reply)
    (found,) = dropped(inbox).values()
    node = {"partition-id": 0, "hub-hosts": HOSTS, "site": "north"}
    assert found == JoinedRun(text, node, {"epochs": 3}, "7 8", str(app))


def test_where_there_is_no_room_the_agent_is_started(inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[Path, JoinedRun]] = []
    monkeypatch.delenv(INBOX)
    monkeypatch.setattr(client_app, "hand_over", lambda state, joined: heard.append((state, joined)))
    assert messages.read_answer(handed(joined(), **{"hub-hosts": HOSTS}), "a", 0) == (JOINED, None)
    ((state, found),) = heard
    assert state == inbox.with_name("state") and found.ids == "7 8"


@pytest.mark.parametrize(
    ("host", "owner", "node", "may"),
    [
        (HOSTS, None, {"hub-hosts": f"other.example.org,{HOSTS}"}, True),
        (HOSTS, None, {}, False),
        (HOSTS, {"hub_hosts": [HOSTS]}, {}, True),
        (HOSTS, {"hub_hosts": ["other.example.org"]}, {"hub-hosts": HOSTS}, False),
        (f"{HOSTS}.example.net", {"hub_hosts": [HOSTS]}, {}, False),
        ("127.0.0.1", None, {}, True),
        ("127.0.0.1", {"hub_hosts": [HOSTS]}, {}, False),
        ("10.0.0.5", None, {"hub-hosts": HOSTS}, False),
    ],
)
@pytest.mark.parametrize("room", [True, False])
def test_a_silo_goes_to_its_owner_s_hosts_alone(
    host: str, owner: dict[str, Any] | None, node: dict[str, str], *, may: bool, room: bool, inbox: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A server that lies is not to have it call on machines inside its house."""
    handed_over: list[JoinedRun] = []
    monkeypatch.setattr(client_app, "hand_over", lambda state, joined: handed_over.append(joined))
    if not room:
        monkeypatch.delenv(INBOX)
    if owner is not None:
        monkeypatch.setenv(ALLOWED, json.dumps(owner))
    reply = handed(joined(f"https://{host}:9000/v1/fedsync"), **node)
    found = [*handed_over, *dropped(inbox).values()]
    if may:
        assert messages.read_answer(reply, "a", 0)[0] == JOINED and len(found) == 1
        return
    refused, payload = said(reply)
    assert isinstance(refused, Refused) and refused.code is Refusal.CONFIG and payload is None
    assert bool(refused.text) == (owner is None)
    assert host in last_refusals(inbox.with_name("state"))[-1].reason, "the owner sees which"
    assert len(found) == room, "from its room, too: the agent puts it down"
    for each in found:
        with pytest.raises(ConfigError, match=host):
            trusted(Join.parse(each.join), each.node)


def test_where_the_server_has_no_hub_a_question_is_answered_with_the_run_s_own_app(
    app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, update = np.ones(payloads.SMALL_BYTES + 4, np.uint8), np.zeros(payloads.SMALL_BYTES + 8, np.uint8)
    heard: list[tuple[Payload | None, str, str]] = []

    def ask(text: str, payload: Payload | None = None) -> tuple[str, Payload | None]:
        heard.append((payload, app_folder.get(), asked_for.get()))
        return write_reply(InProgress(0, 0)), update

    monkeypatch.setenv(STATE, str(tmp_path / "state"))
    monkeypatch.setattr(answers, "connect", lambda identity: ask)
    message = posing(Train(ORDER), model)
    message.metadata.__dict__["_message_id"] = "x"
    reply = client_app.app(message, Context(7, 8, {}, RecordDict(), {}))
    ((payload, folder, ids),) = heard
    assert payload is not None and np.array_equal(payload, model) and (folder, ids) == (str(app), "7 8")
    found, answer = said(reply)
    assert found == InProgress(0, 0) and answer is not None and np.array_equal(answer, update)
    assert not messages.is_relay(reply)
