"""Opponents of a private silo: their canaries, their orders, and their scores of each canary's presence.

Each meets the real trainer, guard and ledger, which `broken` may have changed in this process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench.faults.breakages.privacy import MUTANTS
from bench.privacy.audit_bounds import Coins, Scores, bound_of_one_run, bound_of_runs
from fedsync.config.sections.privacy import BudgetConfig, PrivacyConfig
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.model.layout import Vector
from fedsync.privacy.release import PrivateSettings
from fedsync.silo.owner import privacy_guard
from fedsync.silo.owner.privacy_ledger import PrivacyLedger
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot, Task
from fedsync.train.dp_sgd import private_step as noise_source
from fedsync.train.dp_sgd import private_trainer
from fedsync.train.dp_sgd.private_step import SeededRandom
from fedsync.train.options import LocalOptions

DELTA, CLIP, RATE = 1e-5, 1.0, 1e-3
_STEEP = 50.0
"""Size of a canary's feature: its gradient is 25 times the clip."""

_ORDINARY, _FEATURES = 100, 10
_MODULES = (noise_source, private_trainer, privacy_guard)


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Run the source of a mutant of `bench.faults.breakages.privacy` in its module; "" changes nothing."""
    before = [dict(vars(module)) for module in _MODULES]
    try:
        for mutant in MUTANTS:
            if mutant.name == name:
                module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
                exec(compile(mutant.source(), mutant.file, "exec"), vars(module))
                if module is noise_source:  # whose classes the trainer has imported by name
                    path = Path(str(private_trainer.__file__))
                    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(private_trainer))
        yield
    finally:
        for module, kept in zip(_MODULES, before, strict=True):
            vars(module).clear()
            vars(module).update(kept)


class Rows(Task):
    """Logistic regression, or an MLP with ``hidden`` neurons, on given rows; all labels are 0 or 1."""

    def __init__(self, inputs: Tensor, labels: Tensor, test: Tensor | None = None, hidden: int = 0) -> None:
        self._train, self._hidden = TensorDataset(inputs, labels), hidden
        shown = inputs if test is None else test
        self._test = TensorDataset(shown, torch.ones(len(shown), 1))

    def model(self) -> nn.Module:
        width = self._train.tensors[0].shape[1]
        if not self._hidden:
            return nn.Linear(width, 1, bias=False)
        return nn.Sequential(nn.Linear(width, self._hidden), nn.ReLU(), nn.Linear(self._hidden, 1))

    def data(self, slot: SiloSlot) -> SiloData:
        return SiloData(self._train, self._test)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        right = ((model(batch[0]) > 0) == (batch[1] > 0)).sum()
        return self.loss(model, batch) * len(batch[0]), right


class Victim:
    """Silo with a trainer, a guard and a ledger of its own."""

    def __init__(self, task: Task, units: int, noise: float, score_noise: float | None = None) -> None:
        self.ledger = PrivacyLedger("audit", BudgetConfig(epsilon=100, delta=DELTA, examples=units))
        settings = PrivateSettings(CLIP, noise, units)
        self.trainer = private_trainer.PrivateTrainer(task, SLOT, LocalOptions(device="cpu", threads=1, private=True))
        self.trainer.make_private(settings)
        config = PrivacyConfig(kind="dp-sgd", clip=CLIP, noise_multiplier=noise, score_noise=score_noise)
        self.guard = privacy_guard.PrivacyGuard(config, (self.ledger,), settings, self.trainer, "audit", 1, counts=True)
        self.base: Vector = np.zeros(self.trainer.layout.size, np.float32)

    def sums(self, order: WorkOrder) -> NDArray[np.float64]:
        """Return the update as the sum of noisy sums of gradients over the steps, with the ordered batch size."""
        self.guard.begins(self.guard.allow(order))
        update = self.guard.released(order, self.trainer.run(order, self.base, Cursor())).update
        return -update.astype(np.float64) * order.batch_size / order.learning_rate


SLOT = SiloSlot("audit", 0, 1, 0)


def asked(batch_size: int, steps: int, number: int = 1) -> WorkOrder:
    return WorkOrder(f"audit/{number}", 0, number, batch_size, steps, RATE, seed=number, evaluate=False)


@dataclass(frozen=True, slots=True)
class Guesses:
    """Scores of canaries, the coins that put them into the data, and the ledger's epsilon."""

    scores: Scores
    present: Coins
    ledger: float
    bound: float


def _canaries(count: int, seed: int) -> tuple[Tensor, Tensor, Coins]:
    """Return ordinary rows with those canaries that coins put beside them, their labels, and the coins.

    Each canary has a feature of its own, so that the gradients of canaries are orthogonal.
    """
    drawn = np.random.default_rng(seed)
    present = drawn.random(count) < 0.5
    inputs = np.zeros((_ORDINARY + int(present.sum()), _FEATURES + count), np.float32)
    inputs[:_ORDINARY, :_FEATURES] = drawn.normal(size=(_ORDINARY, _FEATURES))
    inputs[np.arange(_ORDINARY, len(inputs)), _FEATURES + np.flatnonzero(present)] = _STEEP
    labels = np.ones((len(inputs), 1), np.float32)
    labels[:_ORDINARY, 0] = inputs[:_ORDINARY, :_FEATURES].sum(axis=1) > 0
    return torch.from_numpy(inputs), torch.from_numpy(labels), present


def directions(size: int, seed: int) -> Guesses:
    """One order of 40 steps with half of the rows; a canary's score is the update along its gradient."""
    victim, present, order = _one_run(size, seed)
    scores = -victim.sums(order)[_FEATURES:]
    return _of_one_run(scores, present, victim)


def seed_of_the_run(size: int, seed: int) -> Guesses:
    """The same, without the noise that the order's seed would give."""
    victim, present, order = _one_run(size, seed)
    sums, random = victim.sums(order), SeededRandom(order.seed)
    for _ in range(order.max_steps):
        noise = torch.zeros(1, len(sums))
        random.add_noise(noise, _NOISE * CLIP)
        sums -= noise.numpy()[0]
    return _of_one_run(-sums[_FEATURES:], present, victim)


def two_orders(size: int, seed: int) -> Guesses:
    """Two orders of the same steps, the second with twice the batch: equal noise has gone from their difference."""
    victim, present, order = _one_run(size, seed, steps=20)
    large = asked(2 * order.batch_size, order.max_steps, number=2)
    scores = victim.sums(order)[_FEATURES:] - victim.sums(large)[_FEATURES:]
    return _of_one_run(scores, present, victim)


_NOISE = 6.0


def _one_run(size: int, seed: int, steps: int = 40) -> tuple[Victim, Coins, WorkOrder]:
    inputs, labels, present = _canaries(size, seed)
    units = _ORDINARY + size  # the owner tells more than there are, so that their number says nothing
    return Victim(Rows(inputs, labels), units, _NOISE), present, asked(units // 2, steps)


def _of_one_run(scores: Scores, present: Coins, victim: Victim) -> Guesses:
    return Guesses(scores, present, victim.ledger.epsilon(), bound_of_one_run(scores, present, DELTA))


def opposite(size: int, seed: int) -> Guesses:
    """Many runs of one step with one ordinary row; the canary, 40 times as steep, points to the other side."""
    inputs = torch.zeros(2, 2)
    inputs[0, 0], inputs[1, 0] = _STEEP, 40 * _STEEP
    return _runs(8 * size, seed, inputs, 2.0, lambda sums: float(sums[0]))


def spread(size: int, seed: int) -> Guesses:
    """Many runs of one step on rows without a gradient; the size of the noise tells the divisor."""
    return _runs(size, seed, torch.zeros(10, 10_000), 4.0, lambda sums: -float(sums.std()))


def _runs(runs: int, seed: int, inputs: Tensor, noise: float, score: Callable[[NDArray[np.float64]], float]) -> Guesses:
    """Runs of one step over all rows, of which the last, with the label 0, is the canary."""
    labels = torch.ones(len(inputs), 1)
    labels[-1] = 0
    victims = [Victim(Rows(inputs[:count], labels[:count]), len(inputs), noise) for count in (len(inputs) - 1, None)]
    present, order = np.random.default_rng(seed).random(runs) < 0.5, asked(len(inputs), 1)
    first = victims[1].sums(order)
    assert np.isfinite(first).all()
    ledger = victims[1].ledger.epsilon()
    scores = np.empty(runs)
    for run, inside in enumerate(present):
        victim = victims[int(inside)]
        update = victim.trainer.run(order, victim.base, Cursor()).update.astype(np.float64)
        scores[run] = score(-update * order.batch_size / order.learning_rate)
    return Guesses(scores, present, ledger, bound_of_runs(scores, present, DELTA))


def evaluations(size: int, seed: int) -> Guesses:
    """Four evaluations a canary, each of a model that is right about a random half of the canaries in the test rows."""
    drawn, count = np.random.default_rng(seed), size // 5
    present = drawn.random(count) < 0.5
    test = torch.from_numpy(np.eye(count, dtype=np.float32)[present])
    victim = Victim(Rows(torch.eye(count), torch.ones(count, 1), test), count, _NOISE, score_noise=5.0)
    halves = drawn.random((4 * count, count)) < 0.5
    found = []
    for number, half in enumerate(halves):
        model = np.where(half, 1.0, -1.0).astype(np.float32)
        told = victim.guard.judged(lambda _, model=model: victim.trainer.evaluate(model), f"audit {number}")
        assert told.correct is not None
        found.append(told.correct)
    scores = np.linalg.lstsq(halves.astype(np.float64), np.array(found), rcond=None)[0]
    return _of_one_run(scores, present, victim)


OPPONENTS: dict[str, tuple[Callable[[int, int], Guesses], Sequence[str]]] = {
    "own directions": (
        directions,
        (
            "gradients-of-rows-are-not-clipped",
            "noise-is-divided-by-the-batch-twice",
            "the-rate-is-that-of-usual-batches-and-not-the-order-s",
            "executed-steps-are-not-counted",
        ),
    ),
    "seed of the run": (seed_of_the_run, ("noise-comes-from-the-seed-that-the-server-knows",)),
    "two orders": (two_orders, ("noise-comes-again-after-a-crash",)),
    "opposite row": (opposite, ("the-sum-of-rows-is-clipped-and-not-each-row",)),
    "size of the noise": (spread, ("the-divisor-tells-how-many-rows-were-drawn",)),
    "evaluations": (evaluations, ("an-evaluation-is-not-counted",)),
}
"""Opponents, each with the breakages that it is for."""
