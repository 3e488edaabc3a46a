"""Trainers that are killed on real processes: what their silos keep is what it would be had nobody died."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import pytest
import torch

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Discard, Dispatch
from fedsync.core.events import UpdateArrived, WorkFailed
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.observe.ledger import Ledger
from fedsync.observe.run_builder import RunBuilder, measuring
from fedsync.ops.local import run_local
from fedsync.silo.protocol import ANSWER, Completed, Identity
from fedsync.silo.session.current_order import LastOrder
from fedsync.silo.session.session import SiloSession
from tests.e2e.deployed import TRAINER, children

CONFIG = StrategyConfig.load(
    "fedavg",
    [
        "task={kind: mlp, data: {kind: digits28}, hidden: [200]}",
        "local={steps: 4, batch_size: 16, threads: 1}",
        "model={private: ['*.bias']}",
        "wire={up: int8, down: bf16}",
        "stop.rounds=6",
    ],
)
SILOS = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 1e5}, {"name": "b", "speed": 100}]})
KILLED_IN = (2, 4)
"""Rounds."""

E = TypeVar("E")


@dataclass
class Killer:
    """Kills both trainers while a waits for its next order, and b is in one.

    Args:
        out: the run's folder.
        kills: rounds in which it did.
        done: orders that trainers had finished when they died, whether or not the server heard of them.
    """

    out: Path
    kills: list[int] = field(default_factory=list)
    done: set[str] = field(default_factory=set)

    def follow(self, ledger: Ledger) -> None:
        arrived = [event.meta.update_id for event in events(self.out, UpdateArrived)]
        number = len(ledger.rounds) + 1
        if number in KILLED_IN and number not in self.kills and arrived[-1:] == [f"a/{number}"]:
            self.kills.append(number)
            trainers = children(TRAINER)
            folders = [Path(each.cmdline()[-1]) for each in trainers]
            for each in trainers:
                each.kill()
            psutil.wait_procs(trainers)
            kept = [LastOrder.load(folder / ANSWER) for folder in folders]
            self.done |= {last.order.update_id for last in kept if last is not None}


def events(out: Path, kind: type[E]) -> list[E]:
    return [event for entry in read_journal(out / JOURNAL)[1] for event in entry.events if isinstance(event, kind)]


def never_killed(out: Path, done: set[str]) -> tuple[Layout, Vector]:
    """The model after the same orders, carried out by silos that live from beginning to end.

    All that a silo says of an order is compared with what the journal has of it.
    """
    spec = RunBuilder(measuring(CONFIG), SILOS, out, "local").spec()
    silos = {
        each.name: SiloSession(Identity(spec.dump(), index, each.name, resources=False), spec)
        for index, each in enumerate(SILOS.silos)
    }
    aggregator = PlainAggregator(silos["a"].initial_model(), wire=CONFIG.wire.formats)
    happened = done | {event.meta.update_id for event in events(out, UpdateArrived)}
    answers: dict[str, Completed] = {}
    for entry in read_journal(out / JOURNAL)[1]:
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                answer = answers[event.meta.update_id]
                assert (event.report.loss, event.report.evaluation) == (answer.report.loss, answer.report.evaluation)
                aggregator.put(event.meta.silo, event.meta.update_id, answer.update)
        for action in entry.actions:
            match action:
                case Commit():
                    aggregator.commit(action)
                case Discard(update_id):
                    aggregator.discard(update_id)
                case Dispatch(name, order) if order.update_id in happened:
                    answers[order.update_id] = silos[name].train(order, aggregator.outgoing(name))
    return silos["a"].layout, aggregator.model


@pytest.mark.full
def test_what_is_owed_and_what_is_private_survive_kill_9(tmp_path: Path) -> None:
    """An order that its trainer died in has failed; but for that nobody can tell that anybody died."""
    killer = Killer(tmp_path)
    summary = run_local(CONFIG, SILOS, tmp_path, listeners=[killer])
    assert summary["rounds"] == 6 and tuple(killer.kills) == KILLED_IN
    assert [event.update_id for event in events(tmp_path, WorkFailed)] == [f"b/{number}" for number in KILLED_IN]
    layout, model = never_killed(tmp_path, killer.done)
    real = torch.load(tmp_path / "model.pt", weights_only=True)
    for name, values in layout.split(model).items():
        np.testing.assert_array_equal(real[name], values)
