"""The tasks, machines and sides of the map, and each of them as a strategy and a silo file.

| task | kind | silos | target | fixed by |
|---|---|---|---|---|
| digits | small CNN, two classes a silo | 8 | accuracy 0.90 | FedAvg as shipped, before any other strategy had run |
| digits28 | LeNet-5, Dirichlet 0.3 | 8 | accuracy 0.75 | FedAvg as shipped, before any other strategy had run |
| heart | logistic regression on four hospitals' tables | 4 | loss 1 % above that of pooled training | FedAvg alone |
| text | character transformer | 4 | loss 3.0 nats | FedAvg alone: 42 rounds of 5 steps at rate 1, 28 of 20 at 0.3 |
| large | dense network of ten million parameters | 4 | accuracy 0.70 | set before any run, reached since |
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.papers.target_search import Point
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig

FEDAVG, BALANCED, AUTO = "fedavg", "lb-bsp", "auto"
OURS = (BALANCED, "elastic", "a-bsp", "fsp", "quorum")
"""Tuned strategies, in the order in which they run."""
TIMED = ("fsp",)
"""Strategies whose rounds have a duration instead of a number of steps."""
BATCH = 32
PLAIN, CAUTIOUS = "none", "cautious-adam"
LOCAL = {"local-adam": "local.optimizer=adam", "fedprox": "local.proximal=0.01"}
"""Substitutes for a server optimizer at the silos; the rate is theirs."""
OPTIMIZERS = (PLAIN, CAUTIOUS, "fedavgm", "fedadam", "fedyogi", "fedadagrad", *LOCAL)
USUAL = (PLAIN, CAUTIOUS)
"""Optimizers of the map, unless others are named."""
CONTENTION, ONE_SLOW = "contention", "one slow"
MACHINES = ("1", "1.5", "3", "10", ONE_SLOW, CONTENTION)
"""Fastest speed over the slowest, spread evenly between them; one silo ten times slower than the others; other load."""
OVERHEADS = (0.03, 0.1, 0.3, 1.0, 3.0)
SPEED = 200.0
"""Mean speed of the spreads, and speed of the machines of which one is slow [samples/s]."""
LOADED = {"speed": 300.0, "contention": {"kind": "markov", "factor": 0.3, "on_s": 30.0, "off_s": 60.0}}
"""A machine with other load, as in ``strategies/silos/contention.yaml``."""

_ROOT = Path(__file__).parents[2]
_FILES = ", ".join(
    str(_ROOT / "examples" / "heart" / "data" / f"{name}.csv")
    for name in ("cleveland", "hungarian", "switzerland", "va")
)
_WIDE = "{kind: mlp, hidden: [2800, 2800], data: {kind: digits28, samples: 2000, test_samples: 400}, "


@dataclass(frozen=True)
class Learning:
    """A task.

    Args:
        silos: that share it.
        task: its section of the strategy file.
        target: accuracy, loss, or by how much the loss may exceed that of pooled training, as a share of it.
        metric: ``accuracy``, ``loss`` or ``pooled``, for one of these.
        rounds: after which a run has missed the target.
    """

    silos: int
    task: str
    target: float
    metric: str = "accuracy"
    rounds: int = 400


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
        0.01,
        "pooled",
        100,
    ),
    "text": Learning(4, f"{{kind: custom, file: {Path(__file__).with_name('text_task.py')}}}", 3.0, "loss", 200),
    "large": Learning(4, _WIDE + "partition: {kind: dirichlet, alpha: 0.3}}", 0.70, rounds=100),
}


@dataclass(frozen=True, order=True)
class Cell:
    """Machines, and the overhead of an order over the time of one local step of the slowest silo."""

    machines: str
    overhead: float

    @property
    def overhead_s(self) -> float:
        """Overhead of an order [s]."""
        return self.overhead * BATCH / self.slowest

    @property
    def slowest(self) -> float:
        """Speed of the slowest silo [samples/s]; of a loaded one under contention."""
        if self.machines == CONTENTION:
            return 300.0 * 0.3
        return SPEED / 10 if self.machines == ONE_SLOW else 2 * SPEED / (1 + float(self.machines))

    def speeds(self, silos: int) -> list[float]:
        """Speeds without other load [samples/s]."""
        if self.machines == CONTENTION:
            return [300.0] * silos
        if self.machines == ONE_SLOW:
            return [SPEED] * (silos - 1) + [self.slowest]
        step = 2 * (SPEED - self.slowest) / (silos - 1)
        return [self.slowest + at * step for at in range(silos)]

    def mean_speed(self, silos: int) -> float:
        """Mean over silos and time [samples/s]."""
        share = 2 / 3 + 0.3 / 3 if self.machines == CONTENTION else 1.0
        return share * sum(self.speeds(silos)) / silos

    def bound(self, silos: int, steps: int) -> float | None:
        """Least ratio of the seconds of a round at equal steps, with perfect balance; None under contention."""
        if self.machines == CONTENTION:
            return None
        balanced = self.slowest / self.mean_speed(silos)
        return (balanced * steps + self.overhead) / (steps + self.overhead)

    def cluster(self, silos: int) -> ClusterConfig:
        loaded = {**LOADED, "jitter": 0.05} if self.machines == CONTENTION else {}
        entries = [
            {"name": f"silo-{at}", "speed": speed, **loaded, "overhead_s": self.overhead_s}
            for at, speed in enumerate(self.speeds(silos))
        ]
        return ClusterConfig.model_validate({"silos": entries})

    @property
    def noisy(self) -> bool:
        """Whether the seconds of a round depend on the seed."""
        return self.machines == CONTENTION


@dataclass(frozen=True, order=True)
class Side:
    """A strategy with a server optimizer, or an entry of `LOCAL`."""

    strategy: str
    optimizer: str = PLAIN

    @property
    def tuned(self) -> bool:
        return self.strategy != AUTO


def sets(task: str, side: Side, cell: Cell, point: Point, seed: int) -> tuple[str, ...]:
    """Changes of a strategy's file.

    With a server optimizer the rate is the server's, and the learning rate of the silos stays 0.1. A strategy whose
    rounds are timed gets the seconds that its steps take a machine of mean speed.
    """
    learning = TASKS[task]
    changes = [f"task={learning.task}", f"seed={seed}"]
    if not side.tuned:
        return tuple(changes)
    changes += [f"local.steps={point.tau}", f"local.batch_size={BATCH}"]
    if side.optimizer == PLAIN or side.optimizer in LOCAL:
        changes.append(f"local.learning_rate={point.rate}")
        changes += [LOCAL[side.optimizer]] if side.optimizer in LOCAL else []
    else:
        changes += ["local.learning_rate=0.1", f"server_optimizer={{kind: {side.optimizer}, rate: {point.rate}}}"]
    if side.strategy in TIMED:
        seconds = cell.overhead_s + point.tau * BATCH / cell.mean_speed(learning.silos)
        changes.append(f"barrier.interval={{kind: fixed, interval_s: {seconds:.9g}}}")
    if side.strategy == "elastic":
        changes.append("barrier={kind: elastic}")  # its bounds follow the steps
    return tuple(changes)


def preset() -> Point:
    """Steps and server rate of the shipped ``auto``, which is not tuned."""
    config = StrategyConfig.load(AUTO)
    assert config.server_optimizer is not None
    return Point(config.local.steps, float(getattr(config.server_optimizer, "rate", 0.3)))


def pooled(task: str, seed: int) -> tuple[str, ...]:
    """Settings with which FedAvg trains as if all rows lay in one place: one step over all of them, at a rate of 1.

    The loss has settled to five digits after 200 rounds.
    """
    whole = ("local.steps=1", "local.learning_rate=1.0", "local.batch_size=512", "stop={rounds: 200}")
    return (f"task={TASKS[task].task}", f"seed={seed}", *whole)
