"""Memory that a large model takes in the clear, by stage: at the server's aggregator and checkpoints, and at a silo.

No transport: updates come as maps of files, as the server's gate takes them. Each case is a process of its own. The
figure of a stage is the most that was resident (VmHWM, pages of mapped files too) beyond what was before the first
stage, over the model. At the silo the gradient, which is torch's, is one of them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.common import print_table, write_json
from bench.cost import large_model
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit
from fedsync.core.array_keeper import ArrayKeeper
from fedsync.core.layout import Layout, Vector
from fedsync.core.orders import WorkOrder
from fedsync.core.spans import map_file, spans
from fedsync.flower.checkpoints import Checkpoints, Origin
from fedsync.policies.aggregate.aggregator import PlainAggregator
from fedsync.trainer.protocol import EvaluateModel, Identity, Train, exchange

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


def silo(folder: Path, values: int) -> dict[str, tuple[float, float]]:
    """Orders of one step, and an evaluation, once the task is loaded."""
    from fedsync.trainer.service import TrainerService

    task = f"task={{kind: custom, file: {large_model.__file__}, options: {{parameters: {values}}}}}"
    spec = RunSpec.of(StrategyConfig.load("fedavg", [task]), None, 2)
    trainer = TrainerService(Identity(spec.dump(), 0, "a"), folder)
    model = received(folder / "model", values, 0)
    stages = Stages(4 * values)
    for number in range(1, ROUNDS + 1):
        with stages.stage("order"):
            exchange(trainer.ask, Train(WorkOrder(f"a/{number}", number, 0, 8, 1, 0.1, seed=number)), model)
        with stages.stage("evaluation"):
            exchange(trainer.ask, EvaluateModel(number), model)
    return stages.found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--silos", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--out", type=Path, default=Path("bench/results/memory.json"))
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        with tempfile.TemporaryDirectory(prefix="memory-") as name:
            folder, values = Path(name), options.parameters
            write_json(options.out, server(folder, values, options.case) if options.case else silo(folder, values))
        return
    cases = {**{f"server, {silos} silos": silos for silos in options.silos}, "silo": 0}
    measured: dict[str, dict[str, tuple[float, float]]] = {}
    for name, case in cases.items():
        given = ["--parameters", str(options.parameters), "--case", str(case), "--out", str(options.out)]
        subprocess.run([sys.executable, __file__, *given], check=True)
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
