"""Orders queued at silos, through the Flower driver: what becomes of them, and that silos are where they should be."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message

import fedsync
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Discard, Dispatch
from fedsync.core.events import WorkFailed
from fedsync.core.journal import JOURNAL, read_journal
from fedsync.flower.flower_strategy import FedSync
from fedsync.model.transfer import Payload
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import Completed, Identity, Train
from fedsync.silo.session.order_queue import OrderJob
from fedsync.silo.session.service import TrainerService
from tests.e2e.deployed import SMALL
from tests.flower.cut_off_runs import SILOS, Killed, killed_at, with_keys
from tests.flower.grid import Answer, DirectGrid, asked, honest, silos_in_this_process, trainers

ROUNDS = 6
QUICK = [SMALL, "local={steps: 2, batch_size: 8, learning_rate: 0.01}", f"stop.rounds={ROUNDS}", "balancer.kind=fixed"]
TIMING = Timeouts(poll_s=0.001, report_s=0.0, order_timeout_s=600, join_timeout_s=600)
"""Nothing waits for training: each order is queued before the one before it is done."""


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Silos train one after the other here: they share a process, and with it the seeds of PyTorch."""
    alone, carry_out = threading.Lock(), TrainerService._carry_out

    def one_by_one(service: TrainerService, *work: Any) -> Completed:
        with alone:
            return carry_out(service, *work)

    monkeypatch.setattr(TrainerService, "_carry_out", one_by_one)
    with silos_in_this_process():
        yield


@dataclass
class Run:
    """Rounds of FedAvg with an order queued at each silo, in a folder."""

    folder: Path
    monkeypatch: pytest.MonkeyPatch
    barrier: str
    section: str = "wire={}"
    keys: Path | None = None

    def start(self, answers: dict[int, Answer] | None = None, *, resume: bool = False) -> Path:
        """Run to the end; returns the folder of the run's files."""
        sets = [*QUICK, f"barrier={{kind: overlap, {self.barrier}}}", self.section]
        config, out = StrategyConfig.load("fedavg", sets), self.folder / "run"
        if not resume:
            self.keys = with_keys(config, self.folder, self.monkeypatch)
        strategy = FedSync(config, SILOS, out=out, timing=TIMING, keys=self.keys, resume=resume)
        strategy.start(DirectGrid(3, answers))
        return out


def accounted(out: Path) -> tuple[dict[str, list[str]], list[Commit]]:
    """What became of each order that was given, by its update's name: commits and discards that name it; the commits.

    Its journal replays.
    """
    fates: dict[str, list[str]] = {}
    commits: list[Commit] = []
    for entry in fedsync.replay(out / JOURNAL):
        for action in entry.actions:
            match action:
                case Dispatch(_, order):
                    fates[order.update_id] = []
                case Commit(_, weights):
                    commits.append(action)
                    for update_id in weights:
                        fates[update_id].append("committed")
                case Discard(update_id):
                    fates[update_id].append("discarded")
    return fates, commits


def ages(out: Path) -> list[set[int]]:
    """Of each commit, how many versions old its updates were."""
    bases = {
        action.order.update_id: action.order.base_version
        for entry in read_journal(out / JOURNAL)[1]
        for action in entry.actions
        if isinstance(action, Dispatch)
    }
    return [{commit.version - 1 - bases[update_id] for update_id in commit.weights} for commit in accounted(out)[1]]


def failures(out: Path) -> list[str]:
    found = [event for entry in read_journal(out / JOURNAL)[1] for event in entry.events]
    return [f"{event.update_id}: {event.reason}" for event in found if isinstance(event, WorkFailed)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("barrier", "section"),
    [
        ("inner: {kind: bsp}", "wire={}"),
        ("carry: 0.5, inner: {kind: bsp}", "wire={up: int8, down: bf16}"),
        ("inner: {kind: a-bsp}", "aggregation={kind: fednova}"),
        ("carry: 1, inner: {kind: bsp}", "cipher={kind: pad, bits: 16}"),
    ],
    ids=["plain", "few bits", "halted", "sealed"],
)
def test_every_order_is_committed_or_discarded_and_none_fails(
    barrier: str, section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Run(tmp_path, monkeypatch, barrier, section).start()
    fates, commits = accounted(out)
    assert failures(out) == [] and all(len(fate) == 1 for fate in fates.values()), fates
    updates = [commit for commit in commits if commit.weights][:ROUNDS]
    assert len(updates) == ROUNDS and all(len(commit.weights) == 3 for commit in updates)
    assert ages(out)[:ROUNDS] == [{0}] + [{1}] * (ROUNDS - 1)
    sealed = [service._session.replica for service in trainers.values() if service._session.sealed]
    for replica in sealed:
        np.testing.assert_array_equal(replica.model, sealed[0].model)


def test_of_two_orders_that_a_trainer_has_lost_the_one_from_the_newest_version_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was started again, and knows of neither: one fails, and the run goes on."""
    killed: list[Identity] = []
    queued, carry_out = threading.Event(), TrainerService._carry_out

    def not_done_before(service: TrainerService, job: OrderJob, received: Payload) -> Completed:
        if job.order.update_id == "b/3":
            assert queued.wait(60.0)
        return carry_out(service, job, received)

    monkeypatch.setattr(TrainerService, "_carry_out", not_done_before)

    def forgets(message: Message, context: Context) -> Message:
        request = asked(message)
        reply = honest(message, context)
        if isinstance(request, Train) and request.order.update_id == "b/4" and not killed:
            killed.extend(identity for identity in trainers if trainers[identity].name == "b")
            trainers[killed[0]] = TrainerService(killed[0])
            queued.set()
        return reply

    out = Run(tmp_path, monkeypatch, "inner: {kind: bsp}").start({2: forgets})
    fates, commits = accounted(out)
    assert killed and len(commits) == ROUNDS
    assert failures(out) == ["b/3: silo 'b' failed the check 'order': it is lost, and the model has moved on since"]
    assert all(len(fate) == 1 for fate in fates.values()), fates
    assert fates["b/3"] == ["discarded"] and fates["b/4"] == ["committed"]


@pytest.mark.slow
@pytest.mark.parametrize("section", ["wire={up: int8, down: bf16}", "cipher={kind: pad, bits: 16}"])
def test_a_server_that_died_gives_up_both_orders_of_each_silo_and_goes_on(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path, monkeypatch, "carry: 0.5, inner: {kind: bsp}", section)
    with pytest.raises(Killed):
        run.start({2: killed_at(3)})
    fates, commits = accounted(run.start(resume=True))
    assert len([commit for commit in commits if commit.weights]) >= ROUNDS
    assert all(len(fate) == 1 for fate in fates.values()), fates
    assert failures(tmp_path / "run") == []
    models = [service._session.replica.model for service in trainers.values() if service._session.sealed]
    assert all(np.array_equal(model, models[0]) for model in models)
