"""Memory of a large model, by stage: at the server's aggregator and checkpoints, and at a silo.

Plain runs at both, and `bfv` at a silo; `encrypted_large.py` has the server under encryption. There is no transport:
updates are mapped files, as the server receives them. Each case is a process of its own. The figure of a stage is
the peak of resident memory (VmHWM, with mapped files) beyond that before the first stage, divided by the model's size.
At a silo two of these models are torch's model and gradient.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.common import print_table, write_json
from bench.cost import large_model
from fedsync.cipher.keys.authority import EmulatedKeys, emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.common.files import private_folder, write_pieces
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.orders import WorkOrder
from fedsync.model.chunked_arrays import ArrayKeeper, map_file, pieces, spans
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.transfer import Payload
from fedsync.server.checkpoints import Checkpoints, Origin
from fedsync.silo.protocol import EvaluateModel, Identity, Train, exchange
from fedsync.silo.session.session import SiloSession

ROUNDS = 3


class Stages:
    """Seconds and most memory of each stage."""

    def __init__(self, model_bytes: int) -> None:
        self._model_bytes = model_bytes
        self._idle = _status("VmRSS")
        self.found: dict[str, tuple[float, float]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Of several of one name, the worst counts."""
        Path("/proc/self/clear_refs").write_text("5")
        began_s = time.perf_counter()
        yield
        before = self.found.get(name, (0.0, 0.0))
        taken = (_status("VmHWM") - self._idle) / self._model_bytes
        self.found[name] = max(before[0], time.perf_counter() - began_s), max(before[1], taken)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def received(path: Path, values: int, seed: int) -> Vector:
    """Random values as they came, in a file that goes with the map."""
    generator = np.random.default_rng(seed)
    with path.open("wb") as file:
        for start, stop in spans(values, 4):
            file.write(generator.standard_normal(stop - start, np.float32).data)
    return map_file(path, np.float32, remove=True)


def server(folder: Path, values: int, silos: int) -> dict[str, tuple[float, float]]:
    """Rounds of BSP: updates arrive, are committed, and a checkpoint is written."""
    stages = Stages(4 * values)
    with stages.stage("first model"):
        keeper = ArrayKeeper(folder / "arrays")
        aggregator = PlainAggregator(received(folder / "first", values, 0), keeper=keeper)
        spec = json.dumps({"run": "bench", "cipher": {"kind": "plain"}})
        checkpoints = Checkpoints(folder, Origin("", spec, Layout(("x",), ((values,),))))
    for version in range(1, ROUNDS + 1):
        updates = {f"s{silo}": received(folder / f"s{silo}", values, silo) for silo in range(silos)}
        with stages.stage("arrivals"):
            while updates:
                name, update = updates.popitem()
                aggregator.put(name, f"{name}/{version}", update)
            del update
        with stages.stage("commit"):
            aggregator.commit(Commit(version, {f"s{silo}/{version}": 1 / silos for silo in range(silos)}))
        with stages.stage("checkpoint"):
            coordinator: Any = SimpleNamespace(version=version, state=dict)
            checkpoints.save(coordinator, aggregator.state(), 0.0, 0, ())
    checkpoints.close()
    return stages.found


def spec_of(values: int, *settings: str) -> RunSpec:
    task = f"task={{kind: custom, file: {large_model.__file__}, options: {{parameters: {values}}}}}"
    return RunSpec.of(StrategyConfig.load("fedavg", [task, *settings]), None, 2)


def order_of(silo: str, number: int) -> WorkOrder:
    return WorkOrder(f"{silo}/{number}", number - 1, number, 8, 1, 0.1, seed=number)


def silo(folder: Path, values: int) -> dict[str, tuple[float, float]]:
    """A task is loaded, and there are orders of one step, and evaluations."""
    from fedsync.silo.session.service import TrainerService

    opened(spec_of(1000), 0, "tiny", None, folder)  # all is imported
    stages = Stages(4 * values)
    with stages.stage("task"):
        trainer = TrainerService(Identity(spec_of(values).dump(), 0, "a"), folder)
    model = received(folder / "model", values, 0)
    for number in range(1, ROUNDS + 1):
        with stages.stage("order"):
            exchange(trainer.ask, Train(order_of("a", number)), model)
        with stages.stage("evaluation"):
            exchange(trainer.ask, EvaluateModel(number - 1), model)
    return stages.found


def sealed_silo(folder: Path, values: int) -> dict[str, tuple[float, float]]:
    """The same under encryption; the other silo and the server are in another process."""
    keys, spec = emulated_keys(("a", "b"), folder / "keys", seed=1), spec_of(values, "cipher={kind: bfv}")
    opened(spec_of(1000, "cipher={kind: bfv}"), 0, "b", keys, folder)  # all is imported
    stages, came, left = Stages(4 * values), folder / "came", folder / "left"
    spawn = multiprocessing.get_context("spawn")
    # A trainer has a thread for all this, whose memory the system's library keeps apart.
    with (
        ProcessPoolExecutor(1, spawn, begin_others, (folder, values, keys)) as others,
        ThreadPoolExecutor(1) as trainer,
    ):
        with stages.stage("task"):
            session = trainer.submit(opened, spec, 0, "a", keys, folder).result()
        with stages.stage("greeting"):
            greeting = trainer.submit(session.replica.greeting).result()
        others.submit(greet, greeting).result()
        for number in range(1, ROUNDS + 1):
            others.submit(send, came).result()
            with stages.stage("order"):
                done = trainer.submit(session.train, order_of("a", number), map_file(came, remove=True)).result()
            write_pieces(left, pieces(done.update))
            others.submit(commit, number, left).result()
            others.submit(send, came).result()
            with stages.stage("evaluation"):
                trainer.submit(session.evaluate, map_file(came, remove=True), EvaluateModel(number)).result()
    return stages.found


def opened(spec: RunSpec, index: int, name: str, keys: EmulatedKeys | None, folder: Path) -> SiloSession:
    private_folder(folder / name)
    return SiloSession(
        Identity(spec.dump(), index, name), spec, lambda silo: open_ring(keys.silos[silo]), folder=folder / name
    )


others: dict[str, Any] = {}


def begin_others(folder: Path, values: int, keys: EmulatedKeys) -> None:
    """In their process: the server, and a silo that does what the measured one does."""
    spec = spec_of(values, "cipher={kind: bfv}")
    session = opened(spec, 1, "b", keys, folder)
    plan = spec.encryption_plan(session.layout)
    assert plan is not None
    server = EncryptedAggregator(plan, keys.server, folder=folder / "sums")
    server.greet("b", -1, session.replica.greeting())
    others.update(server=server, silo=session)


def greet(greeting: Payload) -> None:
    others["server"].greet("a", -1, greeting)


def send(file: Path) -> None:
    write_pieces(file, pieces(others["server"].outgoing("a")))


def commit(number: int, file: Path) -> None:
    server, silo = others["server"], others["silo"]
    updates = {"a": map_file(file, remove=True), "b": silo.train(order_of("b", number), server.outgoing("b")).update}
    for name, update in updates.items():
        server.begin(f"{name}/{number}")
        server.put(name, f"{name}/{number}", update)
        server.holds(name, number - 1)
    server.commit(Commit(number, {f"{name}/{number}": 1 / 2 for name in updates}))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--silos", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory.json"))
    parser.add_argument("--case", choices=("server", "silo", "sealed"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        with tempfile.TemporaryDirectory(prefix="memory-") as name:
            folder, values = Path(name), options.parameters
            folder.chmod(0o700)
            made = {"silo": silo, "sealed": sealed_silo, "server": partial(server, silos=options.silos[0])}
            write_json(options.out, made[options.case](folder, values))
        return
    cases = {f"server, {silos} silos": ["server", "--silos", str(silos)] for silos in options.silos}
    cases |= {"silo": ["silo"], "silo, bfv": ["sealed"]}
    measured: dict[str, dict[str, tuple[float, float]]] = {}
    for name, case in cases.items():
        given = ["--parameters", str(options.parameters), "--out", str(options.out), "--case", *case]
        subprocess.run([sys.executable, "-m", "bench.cost.memory", *given], check=True)
        measured[name] = json.loads(options.out.read_text(encoding="utf-8"))
    rows = [
        [name, stage, f"{seconds:.2f}", f"{taken:.2f}"]
        for name, stages in measured.items()
        for stage, (seconds, taken) in stages.items()
    ]
    title = f"{options.parameters / 1e6:g} M parameters; memory beyond an idle process, as multiples of the model"
    print_table(title, ("", "stage", "seconds", "x the model"), rows)
    write_json(options.out, {"parameters": options.parameters, **measured})


if __name__ == "__main__":
    main()
