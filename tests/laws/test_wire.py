"""Fewer bits on the wire change no decision and no bit on which silos agree, under every shipped way to synchronise.

Silos draw their updates and send them as real ones do. One strategy more goes back to a savepoint.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.config.cluster import SiloConfig
from fedsync.config.locate import shipped_folder
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch, Rollback
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder, WorkReport
from fedsync.model.layout import Vector
from fedsync.model.plain_replica import RECEIVED, PlainReplica
from fedsync.model.transfer import Payload, Replica
from fedsync.observe.replay import replay
from fedsync.silo.protocol import Completed, EvaluateModel
from tests.simulation.fake import Result, machines, simulate

SIZE = 600
BACK = "fsp that goes back"
"""Tries an interval, half of it, and goes back to the model of the better one."""
CHANGES = {BACK: ["barrier.interval={kind: linear, interval_s: 2.0}", "barrier.passes=1000.0", "stop={seconds: 30.0}"]}
NAMES = [path.stem for path in sorted(shipped_folder().glob("*.yaml")) if not path.stem.endswith(("-he", "-gpu"))]
WIRES = {
    "bf16": "{up: bf16, down: bf16}",
    "fp16": "{up: fp16, down: fp16}",
    "int8": "{up: int8, down: int8}",
    "top-k": "{up: int8, top_k: 0.1, down: bf16}",
}
LOSS = {"bf16": 0.01, "fp16": 0.001, "int8": 0.05}
"""Most that a format loses of all that was added up, as a share of it."""


@dataclass
class Silo:
    """Draws its updates; what a model version is, all silos have to find alike."""

    machine: SiloConfig
    replica: Replica
    versions: dict[int, bytes]
    received: list[int] = field(default_factory=list)

    @property
    def facts(self) -> SiloFacts:
        return SiloFacts(1000, None, self.machine.speed)

    def model(self, received: Payload, version: int) -> Vector:
        self.received.append(received.nbytes)
        model = self.replica.receive(received, version)
        assert self.versions.setdefault(version, model.tobytes()) == model.tobytes(), f"another version {version}"
        return model

    def train(self, order: WorkOrder, received: Payload) -> Completed:
        self.model(received, order.base_version)
        update = np.random.default_rng(order.seed).standard_normal(SIZE).astype(np.float32)
        samples = order.max_steps * order.batch_size
        report = WorkReport(order.base_version, order.max_steps, samples, 1.0, 1 / (1 + order.base_version))
        payload = self.replica.send(update, order, report)
        self.replica.owe(self.replica.owed)
        return Completed(self.replica.disclosed(report), payload)

    def evaluate(self, received: Payload, asked: EvaluateModel) -> Evaluation:
        self.model(received, asked.version)
        return Evaluation(1.0, 1.0, 2)


@dataclass
class Outcome:
    result: Result
    silos: dict[str, Any]

    @property
    def actions(self) -> list[Any]:
        return [action for entry in self.result.entries for action in entry.actions]


def through(config: StrategyConfig, kind: type[Silo], out: Path) -> Outcome:
    """A run of three such silos, of which one is lost on the way of an order and comes back."""
    fault = {"faults": [{"at_s": 2.1, "down_s": 0.7}]}
    found = machines({"speed": 256.0}, {"speed": 128.0, "overhead_s": 0.25, **fault}, {"speed": 64.0})
    weighting = config.aggregation.weigher(config.solver).weighting
    versions: dict[int, bytes] = {}
    silos = {
        each.name: kind(each, PlainReplica(SIZE, config.wire.formats, weighting, 1000), versions) for each in found
    }
    return Outcome(simulate(out, found, config, workers={**silos}, size=SIZE), silos)


def run(name: str, wire: str, out: Path, *more: str) -> Outcome:
    strategy = "fsp" if name == BACK else name
    changes = [
        "local.steps=4",
        "stop={seconds: 8.0}",
        "local.proximal=0",
        *CHANGES.get(name, []),
        f"wire={wire}",
        *more,
    ]
    return through(StrategyConfig.load(strategy, changes), Silo, out)


def decided(outcome: Outcome) -> Iterator[JournalEntry]:
    """What the coordinator did, and when."""
    for entry in outcome.result.entries:
        yield JournalEntry(entry.at_s, (), entry.actions, entry.reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, BACK])
def test_no_decision_changes_and_all_silos_have_one_model(name: str, tmp_path: Path) -> None:
    plain = run(name, "{}", tmp_path / "plain")
    assert any(isinstance(action, Dispatch) for action in plain.actions)
    assert any(isinstance(action, Rollback) for action in plain.actions) == (name == BACK)
    expected = plain.result.model
    assert expected is not None
    for kind, wire in WIRES.items():
        other = run(name, wire, tmp_path / kind)
        assert [*decided(other)] == [*decided(plain)]
        model = other.result.model
        assert model is not None
        last = max(other.silos["a"].versions)
        assert other.silos["a"].versions[last] == model.tobytes(), "what silos evaluate last is what the server keeps"
        if kind in LOSS:
            assert np.linalg.norm(model - expected) <= LOSS[kind] * np.linalg.norm(expected)
        assert len(replay(tmp_path / kind / "journal.jsonl")) == len(other.result.entries)


def test_bytes_are_those_that_travel(tmp_path: Path) -> None:
    """600 values: 2400 bytes, or as int8 608. Down 16 more; who was away for a version gets two."""
    outcome = run("bsp", WIRES["int8"], tmp_path, "stop={rounds: 4}")
    assert outcome.silos["a"].received == [2416, 624, 624, 624, 624]
    book, done = outcome.result.ledger, outcome.result.events(UpdateArrived)
    assert {event.meta.nbytes for event in done} == {608}
    assert book.bytes_up == 608 * len(done)
    sent = [event.report.metrics[RECEIVED] for event in done]
    assert sorted({*sent}) == [624, 1232, 2416]
    lost = sum(isinstance(action, Dispatch) for action in outcome.actions) - len(done)
    assert book.bytes_down == sum(sent) + 2400 * (lost + 3), (
        "of whom no report says it, the whole: the lost, and the end"
    )


def test_fewer_bytes_take_less_time(tmp_path: Path) -> None:
    """0.01 Mbit/s is 1250 bytes/s: 2400 down and up take 3.84 s, 624 down and 608 up 0.9856 s."""
    slow = machines({"speed": 256.0, "bandwidth_mbps": 0.01})
    for wire, down, up in ((WIRES["int8"], 624, 608), ("{}", 2400, 2400)):
        config = StrategyConfig.load("bsp", ["local.steps=4", "stop={rounds: 3}", f"wire={wire}"])
        silo = Silo(slow[0], PlainReplica(SIZE, config.wire.formats), {})
        result = simulate(tmp_path / str(up), slow, config, workers={"a": silo}, size=SIZE)
        assert result.round_seconds()[1] == pytest.approx(4 * 32 / 256 + (down + up) / 1250)
