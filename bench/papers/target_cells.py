"""The tasks, clusters and sides of the tuned comparison, and what each is as a strategy and a silo file.

Targets were fixed by FedAvg as shipped (20 local steps, rate 0.1) alone, before any other strategy had run: it reaches
0.90 on digits in about 9 rounds, 0.75 on digits28 in about 13, and 0.80 on heart, a convex task, in 1 to 8.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.papers.target_search import Point
from fedsync.config.cluster import ClusterConfig

FEDAVG = "fedavg"
OURS = ("lb-bsp", "a-bsp", "fsp", "lb-a-bsp", "lb-fsp")
AUTO = "auto"
CLUSTERS = ("homogeneous", "one-to-three", "contention", "one-slow")
OVERHEADS = (1.0, 0.2)
BATCH = 32
MEAN_SPEED = 200.0
MOMENTUM = "server_optimizer={kind: fedavgm, momentum: 0.8}"
TIMED = ("fsp", "lb-fsp")
"""Those whose rounds are so many seconds, not so many steps."""

_HOSPITALS = Path(__file__).parents[2] / "examples" / "heart" / "data"
_FILES = ", ".join(str(_HOSPITALS / f"{name}.csv") for name in ("cleveland", "hungarian", "switzerland", "va"))


@dataclass(frozen=True)
class Learning:
    """A task.

    Args:
        silos: how many share it, 8 or 4.
        task: its section of the strategy file.
        target: accuracy.
    """

    silos: int
    task: str
    target: float


TASKS = {
    "digits": Learning(8, "{kind: digits, partition: {kind: pathological, classes_per_silo: 2}}", 0.90),
    "digits28": Learning(
        8,
        "{kind: images, model: lenet5, data: {kind: digits28, samples: 2000, test_samples: 400}, "
        "partition: {kind: dirichlet, alpha: 0.3}}",
        0.75,
    ),
    "heart": Learning(
        4,
        f"{{kind: csv, files: [{_FILES}], target: num, positive_above: 0, standardise: federated, validation: 0.2}}",
        0.80,
    ),
}

_FOUR = {
    "homogeneous": [{"name": "silo", "count": 4, "speed": 200.0}],
    "one-to-three": [{"name": f"silo-{at}", "speed": speed} for at, speed in enumerate((100.0, 167.0, 233.0, 300.0))],
    "one-slow": [{"name": "silo", "count": 3, "speed": 200.0}, {"name": "silo-3", "speed": 20.0}],
}
"""The shipped clusters of eight with as many as there are hospitals."""


def machines(cluster: str, silos: int, overhead_s: float) -> ClusterConfig:
    """A cluster of eight or four silos, each order of which costs so many seconds besides training."""
    config = ClusterConfig.load(cluster)
    if silos != len(config.silos):
        equal = config.silos[0].model_dump(exclude_defaults=True) | {"name": "silo", "count": silos}
        config = ClusterConfig.model_validate({"silos": _FOUR.get(cluster, [equal])})
    entries = [silo.model_dump(exclude_defaults=True) | {"overhead_s": overhead_s} for silo in config.silos]
    return ClusterConfig.model_validate({"silos": entries})


@dataclass(frozen=True, order=True)
class Side:
    """A strategy, with server momentum or without."""

    strategy: str
    momentum: bool = False

    @property
    def name(self) -> str:
        return self.strategy + (" + momentum" if self.momentum else "")


@dataclass(frozen=True, order=True)
class Cell:
    """Machines: a cluster, and the seconds that an order costs besides training."""

    cluster: str
    overhead_s: float


def sets(task: str, side: Side, point: Point | None, seed: int, overhead_s: float = 0.0) -> tuple[str, ...]:
    """What is changed in a strategy's file; without a point all else is as shipped.

    A strategy whose rounds are timed gets the seconds that its steps take a machine of mean speed.
    """
    changes = [f"task={TASKS[task].task}", f"seed={seed}"]
    if point is not None:
        changes += [f"local.steps={point.tau}", f"local.learning_rate={point.rate}", f"local.batch_size={BATCH}"]
        if side.strategy in TIMED:
            seconds = overhead_s + point.tau * BATCH / MEAN_SPEED
            changes.append(f"barrier.interval={{kind: fixed, interval_s: {seconds:g}}}")
    return (*changes, MOMENTUM) if side.momentum else tuple(changes)
