"""Balancers on GPUs: batch sizes and iteration time over rounds, as in LB-BSP's figures 8 and 9, in virtual time.

    python bench/papers/balancers.py [--jitter 0.03] [--quick] [--out FILE.json]

An order is one local step, so a round is an iteration of the paper. Two scenarios:

- ``drop`` (figure 8): the four GPUs of ``silos/gpus.yaml``, 32 samples each in the mean, 10 Gbit/s and a model of
  95 MB (Inception-V3). From round 150 on the M60 has a quarter of the bandwidth.
- ``oscillation`` (figure 9): four slow, two middling and two fast GPUs, 380 samples each, a model of 1.9 MB
  (ResNet-32). One of the slow ones, the testee, has 480 and 160 Mbit/s in turn, 100 rounds each.

The curves follow the paper's figures and are not measured. ``best`` is the shortest round that any batch sizes could
give, from the true curves without jitter. A balancer has *arrived* in the first round from which on its batch sizes
are, by the true curves, within 5 % of the best until conditions change. Rows: ``bsp`` (equal sizes), Algorithm 1
(``proportional``), Algorithm 2 (``leader-straggler``) and ``equalise``; speeds by a moving average of 0.2.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.common import beside, figure, line, print_table, save, write_json
from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.coordinator import Coordinator
from fedsync.core.protocols import Bounds
from fedsync.observe.ledger import Ledger
from fedsync.observe.recorder import Recorder
from fedsync.policies.balance.by_forecast import EqualisingBalancer
from fedsync.simulation.engine import VirtualDriver
from fedsync.simulation.machine import Machine
from fedsync.simulation.timing_only import NoAggregator, TimingWorker

BALANCERS: dict[str, dict[str, Any]] = {
    "bsp": {"kind": "fixed"},
    "proportional": {"kind": "proportional"},
    "leader-straggler": {"kind": "leader-straggler"},
    "equalise": {"kind": "equalise"},
}
CLOSE = 0.05


@dataclass(frozen=True)
class Scene:
    """What happens. ``transfer(round)`` is what the testee's transfer time is multiplied by."""

    name: str
    silos: tuple[SiloConfig, ...]
    batch: int
    model_bytes: int
    rounds: int
    testee: str
    changes: tuple[int, ...]
    transfer: Callable[[int], float]

    def overhead_s(self, silo: SiloConfig, number: int) -> float:
        """What an order of round ``number`` costs besides its step."""
        factor = self.transfer(number) if silo.name == self.testee else 1.0
        return silo.overhead_s + factor * 2 * Machine(silo, seed=0).transfer_s(self.model_bytes)

    def best(self, number: int) -> tuple[float, list[int]]:
        """The shortest round there is, and its sizes."""
        curves = [replace(silo.build_curve(), overhead_s=self.overhead_s(silo, number)) for silo in self.silos]
        cap = np.array([silo.memory_samples or 10**6 for silo in self.silos])
        bounds = Bounds(np.ones(len(cap), dtype=np.int64), cap)
        total = self.batch * len(cap)
        sizes = EqualisingBalancer().plan([curve.spread(1) for curve in curves], total, bounds).tolist()
        return self.round_s(sizes, number), sizes

    def round_s(self, sizes: list[int], number: int) -> float:
        """A round by the true curves."""
        pairs = zip(self.silos, sizes, strict=True)
        return max(self.overhead_s(silo, number) + silo.build_curve().step_s(size) for silo, size in pairs)

    def spans(self) -> Iterator[range]:
        """Rounds between two changes."""
        for begin, end in itertools.pairwise([0, *self.changes, self.rounds]):
            yield range(begin, end)


class SlowMachine(Machine):
    """A machine whose transfers take ``factor`` times as long."""

    factor = 1.0

    def transfer_s(self, nbytes: int) -> float:
        return self.factor * super().transfer_s(nbytes)


@dataclass
class Network:
    """Changes the testee's bandwidth between rounds."""

    scene: Scene
    machines: dict[str, SlowMachine]

    def follow(self, ledger: Ledger) -> None:
        self.machines[self.scene.testee].factor = self.scene.transfer(len(ledger.rounds))


@dataclass
class Run:
    """One balancer in one scene, round by round."""

    sizes: list[list[int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    nominal: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def play(scene: Scene, balancer: dict[str, Any], jitter: float) -> Run:
    config = StrategyConfig.model_validate(
        {
            "name": "balancers",
            "seed": 7,
            "min_silos": len(scene.silos),
            "stop": {"rounds": scene.rounds},
            "local": {"steps": 1, "batch_size": scene.batch},
            "predictor": {"kind": "ema", "alpha": 0.2},
            "balancer": balancer,
            "barrier": {"kind": "bsp"},
            "task": {"kind": "digits"},
        }
    )
    silos = [silo.model_copy(update={"jitter": jitter, "examples": 10**6}) for silo in scene.silos]
    machines = {silo.name: SlowMachine(silo, config.seed) for silo in silos}
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(
            Path(folder),
            runtime="virtual",
            config=config.model_dump(mode="json"),
            silos=None,
            model_bytes=scene.model_bytes,
            listeners=[Network(scene, machines)],
        )
        workers = {silo.name: TimingWorker.of(silo) for silo in silos}
        coordinator = Coordinator(config.policies(len(silos)))
        try:
            VirtualDriver(coordinator, NoAggregator(scene.model_bytes), machines, workers, recorder).run()
        finally:
            summary = recorder.finish()
    done = Run(notes=summary["notes"])
    for number, row in enumerate(recorder.ledger.rounds):
        sizes = [row.silos[silo.name].batch_size for silo in silos]
        done.sizes.append(sizes)
        done.seconds.append(row.seconds)
        done.nominal.append(scene.round_s(sizes, number))
    return done


def arrived(scene: Scene, run: Run, span: range) -> int | None:
    """Rounds of a span before the first from which on all are close to the best; None if there is none."""
    best_s, _ = scene.best(span.start)
    far = [number for number in span if run.nominal[number] > (1 + CLOSE) * best_s]
    after = far[-1] + 1 - span.start if far else 0
    return after if after < len(span) else None


def drop(quick: bool) -> Scene:
    silos = [silo.model_copy(update={"bandwidth_mbps": 10_000.0}) for silo in ClusterConfig.load("gpus").silos]
    return Scene(
        "drop",
        tuple(silos),
        batch=32,
        model_bytes=95_000_000,
        rounds=170 if quick else 300,
        testee="m60",
        changes=(150,),
        transfer=lambda number: 4.0 if number >= 150 else 1.0,
    )


def oscillation(quick: bool) -> Scene:
    def gpu(name: str, speed: float, launch_s: float) -> SiloConfig:
        curve = {"kind": "affine", "launch_s": launch_s}
        return SiloConfig.model_validate({"name": name, "speed": speed, "curve": curve, "bandwidth_mbps": 480.0})

    silos = [gpu(f"k520-{index}", 420.0, 0.05) for index in range(4)]
    silos += [gpu(f"k80-{index}", 750.0, 0.04) for index in range(2)]
    silos += [gpu(f"m60-{index}", 1000.0, 0.03) for index in range(2)]
    rounds = 200 if quick else 600
    return Scene(
        "oscillation",
        tuple(silos),
        batch=380,
        model_bytes=1_900_000,
        rounds=rounds,
        testee="k520-0",
        changes=tuple(range(100, rounds, 100)),
        transfer=lambda number: 3.0 if number // 100 % 2 else 1.0,
    )


def report(scene: Scene, runs: dict[str, Run]) -> list[dict[str, Any]]:
    spans = list(scene.spans())[:2]
    rows, cells = [], []
    for name, run in runs.items():
        row: dict[str, Any] = {
            "scene": scene.name,
            "balancer": name,
            "mean_s": fmean(run.seconds),
            "best_s": [scene.best(span.start)[0] for span in spans],
            "last_s": [run.nominal[span.stop - 1] for span in spans],
            "arrived_after": [arrived(scene, run, span) for span in spans],
            "sizes": [run.sizes[span.stop - 1] for span in spans],
            "notes": run.notes,
            "rounds": [{"sizes": sizes, "s": s} for sizes, s in zip(run.sizes, run.seconds, strict=True)],
        }
        rows.append(row)
        cells.append([name, f"{row['mean_s']:.3f}", f"{row['mean_s'] / fmean(runs['bsp'].seconds):.3f}"])
        for index in range(2):
            after = row["arrived_after"][index]
            shown = (
                ",".join(map(str, row["sizes"][index])) if len(scene.silos) <= 4 else _testee_size(scene, row, index)
            )
            cells[-1] += ["never" if after is None else str(after), f"{row['last_s'][index]:.3f}", shown]
    best = [scene.best(span.start) for span in spans]
    cells.append(["best", "-", "-"])
    for index, (seconds, sizes) in enumerate(best):
        shown = (
            ",".join(map(str, sizes)) if len(scene.silos) <= 4 else _testee_size(scene, {"sizes": [sizes] * 2}, index)
        )
        cells[-1] += ["-", f"{seconds:.3f}", shown]
    what = "sizes" if len(scene.silos) <= 4 else "testee's batch"
    columns = ["balancer", "mean round [s]", "ratio to bsp"]
    for when in (f"until round {spans[0].stop}", f"from then to {spans[1].stop}"):
        columns += [f"{when}\nrounds to arrive", "round at its end [s]", what]
    print_table(f"Scene {scene.name}: {scene.rounds} rounds", columns, cells)
    for name, run in runs.items():
        for note in run.notes:
            print(f"{name}: {note}")
    return rows


def _testee_size(scene: Scene, row: dict[str, Any], index: int) -> str:
    at = [silo.name for silo in scene.silos].index(scene.testee)
    return str(row["sizes"][index][at])


def draw(scene: Scene, runs: dict[str, Run], path: Path) -> None:
    shown = {name: run for name, run in runs.items() if name != "bsp"}
    made, axes = figure(columns=len(shown), rows=2, width=4.2, height=2.8)
    best = [scene.best(number)[0] for number in range(scene.rounds)]
    for column, (name, run) in enumerate(shown.items()):
        top, bottom = axes[column], axes[len(shown) + column]
        for index, silo in enumerate(scene.silos):
            top.plot([sizes[index] for sizes in run.sizes], **line(index, marker=False), label=silo.name)
        top.set(title=f"{name}: batch sizes", ylabel="samples a step")
        bottom.plot(run.seconds, **line(0, marker=False), label=name)
        bottom.plot(runs["bsp"].seconds, **line(1, marker=False), label="bsp")
        bottom.plot(best, color="black", linewidth=0.8, linestyle="--", label="best")
        bottom.set(xlabel="round", ylabel="seconds a round", ylim=(0, None))
        bottom.legend(fontsize=7, frameon=False)
    axes[0].legend(fontsize=7, frameon=False)
    save(made, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jitter", type=float, default=0.03, help="sigma of a step's lognormal factor")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: to see that it works")
    parser.add_argument("--processes", type=int, default=1, help="not used: all runs take seconds")
    parser.add_argument("--out", type=Path, default=Path("bench/results/balancers.json"))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for scene in (drop(options.quick), oscillation(options.quick)):
        runs = {name: play(scene, balancer, options.jitter) for name, balancer in BALANCERS.items()}
        rows += report(scene, runs)
        draw(scene, runs, beside(options.out, f"-{scene.name}"))
    write_json(options.out, {"jitter": options.jitter, "close": CLOSE, "runs": rows})


if __name__ == "__main__":
    main()
