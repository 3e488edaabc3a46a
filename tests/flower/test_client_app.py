"""What a silo's owner decides goes before what the run wants: the device, and what is told of the machine."""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict

from fedsync.common.fence import ALLOWED
from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch
from fedsync.core.errors import ConfigError
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import read_journal
from fedsync.core.orders import Window, WorkOrder, WorkReport
from fedsync.core.transfer import Payload
from fedsync.flower import client_app, messages, payloads
from fedsync.flower.client_app import EmulatedLine, emulated_line, identify
from fedsync.flower.parcels import Parcel, Ticket, Uploaded
from fedsync.flower.strategy import FedSync
from fedsync.flower.timeouts import Timeouts
from fedsync.train.loop import Trainer
from fedsync.trainer.client import trainer_folder
from fedsync.trainer.place import place_of
from fedsync.trainer.protocol import (
    RESOURCES,
    STATE,
    AskModel,
    Identity,
    InProgress,
    Refusal,
    Refused,
    Train,
    exchange,
    write_reply,
)
from fedsync.trainer.service import TrainerService
from fedsync.trainer.session import SiloSession
from tests.e2e.deployed import SMALL
from tests.flower.grid import DirectGrid, said, silos_in_this_process

ORDER = WorkOrder("a/1", 0, 1, 8, 2, 0.1, seed=1)
FAST = [SMALL, "local.threads=1", "local.steps=1", "local.batch_size=8", "stop.rounds=2"]


@pytest.fixture(autouse=True)
def _in_this_process() -> Iterator[None]:
    with silos_in_this_process():
        yield


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


def test_a_node_that_says_nothing_goes_with_the_run() -> None:
    assert identify("{}", {"partition-id": 3}, {}) == Identity("{}", 3, "silo-3", None, None, None, True)


def test_a_node_decides() -> None:
    node = {
        "partition-id": 1,
        "silo-name": "clinic-a",
        "declared-speed": 20,
        "device": "cuda:1",
        "processes": 2,
        "resources": False,
    }

    assert identify("{}", node, {}) == Identity("{}", 1, "clinic-a", 20.0, "cuda:1", 2, False)


@pytest.mark.parametrize(
    ("node", "environment", "tells"),
    [
        ("on", "on", True),
        ("On", "", True),
        (True, "1", True),
        ("off", "on", False),
        ("on", "OFF", False),
        (False, "off", False),
        ("no", "yes", False),
    ],
)
def test_telling_takes_the_consent_of_both(node: bool | str, environment: str, tells: bool) -> None:
    assert identify("{}", {"resources": node}, {RESOURCES: environment}).resources is tells


@pytest.mark.parametrize(
    ("node", "environment", "place"),
    [({"resources": "of"}, {}, "node configuration, resources"), ({}, {RESOURCES: "nope"}, RESOURCES)],
)
def test_a_word_that_means_nothing_is_not_taken_for_consent(
    node: dict[str, Any], environment: dict[str, str], place: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        identify("{}", node, environment)

    assert caught.value.place == place


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


def test_a_silo_s_own_number_of_processes_goes_before_the_run_s() -> None:
    run = RunSpec.parse(spec("local.processes=4"))

    processes = [place_of(run, Identity(run.dump(), 0, "a", processes=owner))[2].processes for owner in (None, 1, 2)]

    assert processes == [4, 1, 2]


def test_silos_in_virtual_time_share_one_process() -> None:
    run = RunSpec.parse(spec("local.processes=2", emulate=[SiloConfig(name="m", speed=1e6)]))

    session = SiloSession(Identity(run.dump(), 0, "m"), run)

    assert type(session._trainer) is Trainer


def test_a_batch_cap_is_looked_for_on_a_gpu_unless_the_machine_is_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "find_batch_cap_on_gpu", lambda trainer: 48)
    machine = SiloConfig(name="m", speed=1e6, memory_samples=9)

    assert TrainerService(Identity(spec(), 0, "a")).facts.memory_samples == 48
    assert TrainerService(Identity(spec(emulate=[machine, machine]), 0, "a")).facts.memory_samples == 9


def test_silos_of_all_kinds_share_a_run(tmp_path: Path) -> None:
    """One says nothing, one has chosen its device, one does not tell; the server learns just that."""
    strategy = FedSync(
        StrategyConfig.load("lb-bsp", [*FAST, "task.partition.kind=iid"]),
        ClusterConfig.model_validate({"silos": [{"name": name, "speed": 1e6} for name in "abc"]}),
        out=tmp_path,
        timing=Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60),
    )
    grid = DirectGrid(3)
    for node, more in ((2, {"device": "cpu"}), (3, {"resources": "off"})):
        grid._contexts[node].node_config.update(more)

    strategy.start(grid)

    entries = list(read_journal(tmp_path / "journal.jsonl")[1])
    arrived = [event for entry in entries for event in entry.events if isinstance(event, UpdateArrived)]
    told: dict[str, list[Window]] = {name: [] for name in "abc"}
    for event in arrived:
        told[event.meta.silo] += event.report.windows
    assert all(len(windows) >= 2 for windows in told.values())
    for window in (*told["a"], *told["b"]):
        assert window.cpu is not None and 0 <= window.cpu <= 1
        assert window.memory is not None and 0 < window.memory <= 1
    assert {(window.cpu, window.memory) for window in told["c"]} == {(None, None)}
    orders = [action.silo for entry in entries for action in entry.actions if isinstance(action, Dispatch)]
    assert sorted(orders) == ["a", "a", "b", "b", "c", "c"], "it takes part like the others"


def test_training_code_of_ones_own_hears_what_is_not_for_fedsync() -> None:
    """All that this app's own configuration has is for FedSync; a resumed run stays the same run."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    own = project["tool"]["flwr"]["app"]["config"]
    told = identify("{}", {"partition-id": 1, "site": "north"}, {}, {**own, "resume": True, "epochs": 3})
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
    monkeypatch.setattr(client_app, "time", SimpleNamespace(sleep=waited.append, monotonic=lambda: 10.5))
    line.carried(np.zeros(2_000_000, np.uint8), begin_s=10.0)
    assert waited == [pytest.approx(max(0.0, seconds - 0.5))], "half a second is over"
    line.carried(None, begin_s=10.5)
    assert waited[1] == pytest.approx(0.0 if allowed else machine.get("latency_s", 0.0))


def test_a_silo_that_emulates_no_machine_has_no_line() -> None:
    assert emulated_line(Identity(spec(), 1, "a"), {}) == EmulatedLine(0.0, 0.0)


# Large payloads beside messages.


class AtTheGate:
    """What is left at a server's gate."""

    def __init__(self, model: Payload) -> None:
        self.model = model
        self.folders: list[Path] = []
        self.full = False
        self.left: Payload | None = None

    def fetch(self, parcel: Parcel, folder: Path) -> Payload:
        self.folders.append(folder)
        return self.model

    def upload(self, ticket: Ticket, payload: Payload) -> Uploaded | None:
        self.left = None if self.full else payload
        return None if self.full else Uploaded("0" * 32, payload.nbytes)


@pytest.mark.parametrize("way", ["gate", "full gate", "none"])
def test_a_model_is_fetched_and_an_update_left_where_the_node_can(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, update = np.ones(payloads.SMALL_BYTES + 4, np.uint8), np.zeros(payloads.SMALL_BYTES + 8, np.uint8)
    gate = AtTheGate(model)
    heard: list[Payload | None] = []

    def ask(text: str, payload: Payload | None = None) -> tuple[str, Payload | None]:
        heard.append(payload)
        return write_reply(InProgress(0, 0)), update

    gate.full = way == "full gate"
    monkeypatch.setenv(STATE, str(tmp_path))
    tmp_path.chmod(0o700)
    monkeypatch.setattr(client_app, "connect", lambda identity: ask)
    monkeypatch.setattr(client_app, "parcels", None if way == "none" else gate)
    parcel = Parcel("0" * 16, "1" * 64, model.size)
    message = messages.request(1, "{}", Train(ORDER), parcel, 60.0, Ticket("0" * 16, "2" * 32))
    message.metadata.__dict__["_message_id"] = "x"
    reply = client_app.app(message, Context(1, 1, {}, RecordDict(), {}))
    assert messages.fetches(reply) == (way != "none")
    if way == "none":
        refused = said(reply)[0]
        assert isinstance(refused, Refused) and refused.code is Refusal.PROTOCOL and not heard
        return
    assert heard[0] is model
    assert gate.folders == [trainer_folder(identify("{}", {}, {}))], "the trainer's own"
    if way == "gate":
        assert messages.read_uploaded(reply, "a") == Uploaded("0" * 32, update.size) and gate.left is update
        assert said(reply)[1] is None
    else:
        assert messages.read_uploaded(reply, "a") is None and said(reply)[1] is not None
