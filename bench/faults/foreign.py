"""Users' own training code under kill -9 of its trainer, in the middle of its loop: does each order count once?

    python bench/faults/foreign.py [--kills 10] [--seed 1] [--out bench/results/foreign.json]

Two silos, each with a resident trainer in a process of its own, receive orders round by round, and the model moves by
the mean of their updates. Two kinds of code: a `SiloApp` with ``work.state`` and a private part of the model, and a
Flower ClientApp with ``context.state``. Both draw random numbers from torch, NumPy and Python.

Some orders are cut short: the trainer is killed after a random number of steps. The state on disk must then be that of
the order before. The order is repeated, which starts another trainer. Each finished order is requested once more, and
must give the same bytes.

The reference is a run without kills: at the end, the model and each silo's state must be the same to the last bit.
Ends with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.common import print_table, write_json
from fedsync.common.errors import RunError
from fedsync.common.rng import Stream, derive_seed
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.flower.process_environment import flower_in_this_process
from fedsync.model.layout import Vector
from fedsync.silo.protocol import ANSWER, AskModel, Collect, Identity, InProgress, Reply, Train, exchange
from fedsync.silo.session.current_order import LastOrder
from fedsync.silo.session.trainer_client import TrainerClient, stop_trainers
from fedsync.silo.session.trainer_folder import tenant

STEPS, BATCH, STEP_S = 24, 8, 0.02
SILOS = 2

OWN = """
import random, time
import numpy as np, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.body(x)))))


def data(index):
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(index))
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


def step(model, optimizer, x, y, pause_s):
    x = x + 0.01 * (random.random() + np.random.rand())
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(pause_s)
    return loss.item()
"""

SILO_APP = """
from fedsync.client import SiloApp
from own import *

app = SiloApp()


@app.setup()
def setup(silo):
    return silo.use(Net, data(silo.index), private=["head."])


@app.train()
def fit(work, model, train):
    work.state["orders"] = [*work.state.get("orders", []), work.round]
    optimizer = torch.optim.Adam(model.parameters(), lr=work.learning_rate)
    for x, y in work.loader(train):
        work.state["steps"] = work.state.get("steps", 0) + 1
        work.log(loss=step(model, optimizer, x, y, work.config["step-s"]))
"""

CLIENT_APP = """
from flwr.app import ArrayRecord, MetricRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from fedsync.client import steps
from own import *

app = ClientApp()


@app.train()
def train(msg, context):
    config, state = msg.content["config"], context.state
    model = Net()
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    if "head" in state:
        model.head.load_state_dict(state["head"].to_torch_state_dict())
    counts = dict(state["counts"]) if "counts" in state else {"orders": [], "steps": 0}
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning-rate"])
    train, losses = data(context.node_config["partition-id"]), []
    for x, y in steps(msg, DataLoader(train, batch_size=config["batch-size"], shuffle=True)):
        losses.append(step(model, optimizer, x, y, config["step-s"]))
    counts = {"orders": [*counts["orders"], config["server-round"]], "steps": counts["steps"] + len(losses)}
    state["counts"], state["head"] = MetricRecord(counts), ArrayRecord(model.head.state_dict())
    metrics = {"train_loss": sum(losses) / len(losses), "num-examples": len(train)}
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=msg)
"""

KINDS = {
    "SiloApp": (SILO_APP, "{kind: silo-app, file: FOLDER/code.py}"),
    "ClientApp": (CLIENT_APP, "{kind: clientapp, app: 'FOLDER/code.py:app', model: 'FOLDER/code.py:Net'}"),
}


@dataclass
class Silo:
    """A silo's trainer process, as the server's side sees it."""

    identity: Identity
    root: Path

    def __post_init__(self) -> None:
        self.client = TrainerClient(self.identity)
        self.folder: Path = self.client._folder

    def ask(self, request: Any, payload: Any = None) -> tuple[Reply, Any]:
        return exchange(self.client.ask, request, payload)

    def done(self, order: WorkOrder, base: Vector) -> tuple[WorkReport, Vector]:
        """An order, to its end."""
        reply, update = self.ask(Train(order), base.view(np.uint8))
        if not isinstance(reply, WorkReport):
            raise RunError(f"{order.update_id} is answered by {reply}")
        return reply, np.array(update.view(np.float32))

    def killed_in(self, order: WorkOrder, base: Vector, after: int) -> int:
        """Begin an order and kill the trainer once its loop has done so many steps; returns how many it had."""
        reply, _ = self.ask(Train(order, 0.0), base.view(np.uint8))
        while isinstance(reply, InProgress) and reply.steps < after:
            reply, _ = self.ask(Collect(order.update_id, STEP_S / 4))
        pid = tenant(self.folder)
        if not isinstance(reply, InProgress) or pid is None:
            raise RunError(f"{order.update_id} was not caught in its loop: {reply}")
        process = psutil.Process(pid)
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.wait(10)
        return reply.steps

    def kept(self) -> LastOrder | None:
        """What is on disk."""
        return LastOrder.load(self.folder / ANSWER)


@dataclass
class Outcome:
    """What a run came to.

    Args:
        model: the last.
        kept: what each silo keeps: its place in the data, its state, its private arrays.
        kills: silo, round and steps that the loop had done.
        wrong: what was not as it must be.
    """

    model: Vector
    kept: list[tuple[int, int, str, bytes]] = field(default_factory=list)
    kills: list[tuple[int, int, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run(kind: str, rounds: int, deaths: dict[int, tuple[int, int]], folder: Path) -> Outcome:
    """A run.

    Args:
        kind: of code.
        rounds: orders for each silo.
        deaths: by round, the silo whose trainer is killed, and after how many steps.
        folder: for code and trainers.
    """
    with _silos(kind, folder) as silos:
        _, first = silos[0].ask(AskModel())
        outcome = Outcome(np.array(first.view(np.float32)))
        for round_ in range(1, rounds + 1):
            base, updates = outcome.model, []
            for index, silo in enumerate(silos):
                seed = derive_seed(7, Stream.ORDER, str(index), round_)
                order = WorkOrder(f"{index}-{round_}", round_ - 1, round_, BATCH, STEPS, 0.01, seed, evaluate=False)
                if deaths.get(round_, (None,))[0] == index:
                    outcome.kills.append((index, round_, silo.killed_in(order, base, deaths[round_][1])))
                    _check(outcome, _round_of(silo) == round_ - 1, f"{order.update_id}: half an order on disk")
                report, update = silo.done(order, base)
                _, again = silo.done(order, base)
                _check(
                    outcome, (report.steps, report.samples) == (STEPS, STEPS * BATCH), f"{order.update_id}: {report}"
                )
                _check(outcome, (again == update).all(), f"{order.update_id}: asked again it has another update")
                updates.append(update)
            outcome.model = base + np.mean(updates, axis=0, dtype=np.float32)
        for silo in silos:
            last = silo.kept()
            assert last is not None
            cursor = last.cursor
            outcome.kept.append((cursor.epoch, cursor.position, cursor.state, cursor.private))
    return outcome


def _round_of(silo: Silo) -> int:
    last = silo.kept()
    return 0 if last is None else last.order.round


def _check(outcome: Outcome, well: bool, what: str) -> None:
    if not well:
        outcome.wrong.append(what)


@contextlib.contextmanager
def _silos(kind: str, folder: Path) -> Iterator[list[Silo]]:
    """Trainers of this kind of code, which end with the block."""
    code, task = KINDS[kind]
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    (folder / "code.py").write_text(code, encoding="utf-8")
    settings = [f"task={task.replace('FOLDER', str(folder))}", f"train_config={{step-s: {STEP_S}}}", "local.threads=1"]
    spec = RunSpec.of(StrategyConfig.load("fedavg", settings), None, SILOS)
    with flower_in_this_process(folder):
        try:
            yield [Silo(Identity(spec.dump(), index, f"silo-{index}"), folder) for index in range(SILOS)]
        finally:
            stop_trainers(folder / "state")


def counted(kind: str, kept: tuple[int, int, str, bytes]) -> tuple[list[int], int]:
    """Orders and steps that a silo's code has counted."""
    counts = json.loads(kept[2]) if kind == "SiloApp" else json.loads(kept[3].split(b"\n")[0])["counts"]["metrics"]
    return counts["orders"], counts["steps"]


def compare(kind: str, kills: int, seed: int) -> dict[str, Any]:
    """A run with kills beside one without: what they came to."""
    rng = np.random.default_rng(seed)
    # Not in the first round, before which nothing is kept that could be lost.
    rounds = kills + 1
    deaths = {2 + number: (int(rng.integers(SILOS)), int(rng.integers(1, STEPS - 4))) for number in range(kills)}
    outcomes = []
    for planned in ({}, deaths):
        # A short name, for trainers listen below it.
        with tempfile.TemporaryDirectory(prefix="foreign-") as folder:
            outcomes.append(run(kind, rounds, planned, Path(folder)))
    usual, found = outcomes
    once = all(counted(kind, kept) == (list(range(1, rounds + 1)), rounds * STEPS) for kept in found.kept)
    return {
        "kind": kind,
        "orders": rounds * SILOS,
        "kills": len(found.kills),
        "killed": [{"silo": silo, "round": at, "steps done": steps} for silo, at, steps in found.kills],
        "each order once": once,
        "state the same": found.kept == usual.kept,
        "model the same": found.model.tobytes() == usual.model.tobytes(),
        "wrong": usual.wrong + found.wrong,
        "well": once and found.kept == usual.kept and found.model.tobytes() == usual.model.tobytes()
        and not usual.wrong + found.wrong and len(found.kills) == kills,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("bench/results/foreign.json"))
    options = parser.parse_args()
    results = [compare(kind, options.kills, options.seed) for kind in KINDS]
    rows = [
        (
            each["kind"], each["orders"], each["kills"],
            " ".join(str(one["steps done"]) for one in each["killed"]),
            *("yes" if each[key] else "NO" for key in ("each order once", "state the same", "model the same")),
            len(each["wrong"]),
        )
        for each in results
    ]  # fmt: skip
    columns = (
        "code",
        "orders",
        "kills",
        f"steps of {STEPS} done",
        "each order once",
        "state the same",
        "model the same",
    )
    print_table("kill -9 of a trainer in the middle of a loop", (*columns, "otherwise wrong"), rows)
    for each in results:
        for what in each["wrong"]:
            print(f"{each['kind']}: {what}")
    write_json(options.out, results)
    if not all(each["well"] for each in results):
        sys.exit(1)


if __name__ == "__main__":
    main()
