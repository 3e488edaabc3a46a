"""Kills of a silo's trainers in the middle of private orders: does the privacy ledger contain all that left?

    python bench/faults/ledger_kills.py               200 kills, ten minutes
    python bench/faults/ledger_kills.py --kills 5

Three processes, one a run, train private orders against one state folder, and are killed with kill -9 at random
instants. An order has left if its process reported an answer, or saved it as its last order. After each kill and
restart, the ledger must hold every order that left, with all its steps. An order is entered when it begins, so an order
that is killed and repeated is entered twice. It must not be entered more often than it was begun.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import patch

import numpy as np

from bench.common import print_table
from fedsync.config.run_spec import RunSpec
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.silo.owner.owner_policy import owner_environment
from fedsync.silo.protocol import ANSWER, Identity, Train, read_reply, write_request
from fedsync.silo.session.current_order import LastOrder
from fedsync.silo.session.service import TrainerService
from fedsync.train.dp_sgd.private_trainer import PrivateTrainer

PROCESSES = 3
ROWS, BATCH, STEPS, VALUES = 64, 4, 2, 6
LONGEST_S = 0.6
"""Kills come at a uniform time after a process is ready, up to this [s]; an order takes a tenth."""

_READY_S = 120.0
_FORK = multiprocessing.get_context("fork")
_LOADED = PrivateTrainer, TrainerService
"""Modules that take long to import, and are therefore loaded before the forks."""


@dataclass
class Found:
    """Result: counts over all kills, and what broke the promise."""

    seed: int
    kills: int = 0
    left: int = 0
    entered: int = 0
    twice: int = 0
    missing: list[str] = field(default_factory=list)
    too_often: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.missing and not self.too_often


def prepare(folder: Path) -> SiloStartConfig:
    """Write a silo's table and its silo.yaml with a large budget; return the file's content."""
    rng = random.Random(1)
    lines = [f"{rng.gauss(50, 9):.2f},{rng.gauss(0, 1):.3f},{row % 2}" for row in range(ROWS)]
    (folder / "patients.csv").write_text("\n".join(["age,dose,ill", *lines]) + "\n")
    (folder / "silo.yaml").write_text(
        "name: silo-a\nserver: localhost:1\ninsecure: true\nstate: state\ndata: {patients: patients.csv}\n"
        "limits: {samples: 1}\nprivacy: {epsilon: 100, delta: 0.00001, least_noise: 1.0}\n"
    )
    return SiloStartConfig.load(folder / "silo.yaml")


def spec(number: int) -> RunSpec:
    """Specification of the run of one process."""
    given = RunSpec.of(StrategyConfig.load("fedavg", [f"local={{steps: {STEPS}, batch_size: {BATCH}}}"]), None, 1)
    scales = {"age": [50.0, 9.0], "dose": [0.0, 1.0]}
    task = {"kind": "csv", "file": "data:patients", "target": "ill", "standardise": scales}
    dp = {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 20.0}
    local = {**given.model_dump()["local"], "threads": 1}
    changes = {"task": task, "run": f"run-{number}", "privacy": dp, "silos": 1, "local": local}
    return RunSpec.model_validate({**given.model_dump(), **changes})


def order_of(number: int) -> WorkOrder:
    return WorkOrder(f"silo-a/{number}", 0, number, BATCH, STEPS, 0.1, seed=number, evaluate=False)


def train(folder: Path, number: int, server: Connection) -> None:
    """Train the orders whose numbers ``server`` sends, and answer each with its id once its reply is there."""
    home = folder / "state" / "trainers" / f"run-{number}"
    home.mkdir(parents=True, exist_ok=True)
    identity = Identity(spec(number).dump(), 0, "silo-a")
    identity.save(home)
    with patch.dict(os.environ, owner_environment(SiloStartConfig.load(folder / "silo.yaml"))):
        service = TrainerService(identity, home)
        server.send("ready")
        while True:
            order = order_of(server.recv())
            text, _ = service.ask(write_request(Train(order)), np.zeros(VALUES, np.float32).view(np.uint8))
            answered = isinstance(read_reply(text, "silo-a"), WorkReport)
            server.send(order.update_id if answered else f"refused: {text}")


class Trainer:
    """Process of one run, as its server sees it; ``next`` is the order that has no answer yet."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number, self.next = folder, number, 1
        self.begun: Counter[str] = Counter()
        self.left: set[str] = set()
        self._start()

    def _start(self) -> None:
        # A fork of this process, which has loaded torch and has no threads: a new interpreter takes seconds.
        self._asked = self._ready = False
        self._line, its = _FORK.Pipe()
        self._process = _FORK.Process(target=train, args=(self.folder, self.number, its), daemon=True)
        self._process.start()
        its.close()

    def await_ready(self) -> None:
        if self._ready:
            return
        if not self._line.poll(_READY_S) or self._line.recv() != "ready":
            raise RuntimeError(f"the trainer of run {self.number} did not begin")
        self._ready = True

    def work(self, until_s: float) -> None:
        """Have it train until a time of `time.monotonic`."""
        while (left_s := until_s - time.monotonic()) > 0:
            if not self._asked:
                self.begun[order_of(self.next).update_id] += 1
                self._line.send(self.next)
                self._asked = True
            if self._line.poll(left_s):
                self._take(self._line.recv())

    def _take(self, told: str) -> None:
        if told != order_of(self.next).update_id:
            raise RuntimeError(f"run {self.number}: {told}")
        self.left.add(told)
        self.next, self._asked = self.next + 1, False

    def kill(self) -> None:
        """Kill it, take what it had answered, and start it again; an order without an answer is repeated."""
        self.end()
        try:
            while self._line.poll():
                self._take(self._line.recv())
        except (EOFError, ConnectionResetError):
            pass
        self._line.close()
        self._start()

    def end(self) -> None:
        self._process.kill()  # kill -9
        self._process.join()


def saved(folder: Path, number: int) -> set[str]:
    """Orders with an answer on disk, which a server may still collect."""
    last = LastOrder.load(folder / "state" / "trainers" / f"run-{number}" / ANSWER)
    return set() if last is None else {last.order.update_id}


def look(folder: Path, trainers: Sequence[Trainer], found: Found) -> None:
    """Compare the ledger with what left, and write into ``found`` what it lacks."""
    entered: Counter[tuple[str, str]] = Counter()
    file = folder / "state" / "privacy" / "data.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    for line in map(json.loads, lines):
        entered[line["run"].split()[0], line["of"]] += line["times"] if line["kind"] == "spent" else -line["times"]
    found.entered, found.left = entered.total() // STEPS, sum(len(each.left) for each in trainers)
    found.twice = sum(times // STEPS - 1 for times in entered.values())
    for trainer in trainers:
        run = f"run-{trainer.number}"
        gone = trainer.left | saved(folder, trainer.number)
        found.missing += [f"{run} {name}" for name in sorted(gone) if entered[run, name] < STEPS]
        for name, times in trainer.begun.items():
            if entered[run, name] > STEPS * times:
                found.too_often.append(f"{run} {name}: {entered[run, name] // STEPS} entries, begun {times} times")


def campaign(folder: Path, kills: int, seed: int, limit_s: float = float("inf")) -> Found:
    """Kill processes ``kills`` times, or until ``limit_s`` is over, and return what the ledger lacked."""
    rng, found, end_s = random.Random(seed), Found(seed), time.monotonic() + limit_s
    prepare(folder)
    trainers = [Trainer(folder, number) for number in range(PROCESSES)]
    try:
        while found.kills < kills and time.monotonic() < end_s and found.holds:
            for trainer in trainers:
                trainer.await_ready()
            for trainer in rng.sample(trainers, PROCESSES):
                if found.kills < kills:
                    trainer.work(time.monotonic() + rng.uniform(0, LONGEST_S))
                    trainer.kill()
                    found.kills += 1
                    look(folder, trainers, found)
        for trainer in trainers:  # the last repetitions
            trainer.await_ready()
            end_s = time.monotonic() + _READY_S
            trainer.work(time.monotonic() + LONGEST_S)
            while not trainer.left and time.monotonic() < end_s:  # a busy machine takes longer for an order
                trainer.work(time.monotonic() + LONGEST_S)
        look(folder, trainers, found)
    finally:
        for trainer in trainers:
            trainer.end()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=None, help="of the instants; left out, a new one")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which no further kill begins")
    parser.add_argument("--out", type=Path, default=None, help="file for the result, as JSON")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        found = campaign(Path(name), given.kills, seed, given.limit)
    figures = {"kills": found.kills, "answers that left": found.left, "entries": found.entered}
    figures |= {"entered again": found.twice, "missing": len(found.missing), "too often": len(found.too_often)}
    print_table("kills of trainers with a privacy ledger", ["figure", "number"], [[*each] for each in figures.items()])
    for problem in (*found.missing, *found.too_often):
        print(problem)
    if given.out is not None:
        given.out.write_text(json.dumps(asdict(found), indent=2) + "\n")
    return 0 if found.holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
