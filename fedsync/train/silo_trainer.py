"""Interface between a silo's session (keys, messages) and its trainer, which may run in a confined process.

Imports no torch: the process that has a silo's keys does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, Unpack

import numpy as np

from fedsync.common.errors import Diverged, UserCodeError
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder, WorkReport
from fedsync.core.speed.curve import Curve
from fedsync.model.layout import Layout, Vector
from fedsync.model.table_columns import TableForm
from fedsync.privacy.release import PrivateSettings

Watch = Callable[[int, int], bool]
"""Callback between steps with the numbers of steps and samples done; False ends the order."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an order: local model minus base, float32 [layout.size], report, and state for the next order."""

    update: Vector
    report: WorkReport
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """Facts of a built trainer.

    Args:
        frozen: SHA-256 of the model's frozen tensors, hexadecimal; empty if no tensor is frozen.
        kept_names: names of the tensors that do not travel.
        table: columns of the silo's table, which must be equal at all silos; None for other data.
        device: ``cpu`` or ``cuda:0``, for people.
        examples: number of training samples that the silo holds.
        validates: whether the silo holds out a validation split; see `Split`.
        ties: further names of tensors that travel, each with the name in ``layout``.
        private_names: names of the tensors that the silo trains and keeps, where models in files may bring others.
    """

    layout: Layout
    frozen: str
    kept_names: tuple[str, ...]
    table: TableForm | None
    device: str
    examples: int
    validates: bool
    ties: Mapping[str, str] = field(default_factory=dict)
    private_names: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        return {*self.layout.names, *self.kept_names, *self.ties}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor among the values of a model; ``start`` is in bytes, and the same for tied tensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class RunOptions(TypedDict, total=False):
    """Optional arguments of `SiloTrainer.run`: a throttle, a callback between steps, a control [layout.size]."""

    throttle: Throttle | None
    watch: Watch | None
    correction: Vector | None


class SiloTrainer(Protocol):
    """Trainer of one silo, in this process (`LocalTrainer`) or another (`TrainingProcess`); not thread-safe. Any method
    may raise `UserCodeError` or `ConfigError`, because methods run user code.
    """

    @property
    def facts(self) -> TrainerFacts: ...

    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; equal at every silo."""

    def save_model(self, path: Path, model: Vector) -> None:
        """Write ``model``, float32 [layout.size], as a state dict; see `fedsync.train.weights.save_state`."""

    def find_batch_cap_on_gpu(self) -> int | None:
        """Largest batch that fits the GPU's memory [samples]; None if the search is not quick or not possible."""

    def make_private(self, settings: PrivateSettings) -> int:
        """Train by DP-SGD from now on, as soon as the settings have a noise; return the number of the silo's units."""

    def run(self, order: WorkOrder, base: Vector, cursor: Cursor, **options: Unpack[RunOptions]) -> Outcome:
        """See `fedsync.train.local_trainer.LocalTrainer.run`."""

    def judge(self, model: Vector, cursor: Cursor, split: Split, subject: str, *, gains: bool) -> Evaluation:
        """Evaluate the model named ``subject``; with ``gains``, also its gains over the silo's own model."""

    def where(self, thread: int) -> str:
        """Line of code at which ``thread``, which waits for this trainer, currently is; for people."""


ESTIMATED = 2
"""Steps of an order from which a first update is estimated."""

_LARGEST = np.float32(2.0**24)
"""Upper bound for the values of an update."""


def likely_update(
    trainer: SiloTrainer, begins: Callable[[WorkOrder], int | None], batch_size: int, steps: int, rate: float, seed: int
) -> tuple[Vector, int, int, int | None]:
    """Estimate a first update: do a few steps and scale the result up to all steps of an order. ``begins`` is called
    before them, and returns the weight by precision; ``rate`` is the learning rate.

    Steps partly cancel each other, so the estimate is rather too large than too small. If the steps diverge, it is the
    upper bound: the person who chose the learning rate must not learn about the data from the greeting. Returns the
    update, float32 [layout.size], ``steps``, the number of samples in these steps, and that weight.
    """
    count, precision = min(steps, ESTIMATED), None
    order = WorkOrder(
        update_id="",
        base_version=0,
        round=0,
        batch_size=batch_size,
        max_steps=count,
        learning_rate=rate,
        seed=seed,
        evaluate=False,
    )
    try:
        first = trainer.initial_model()  # if it fails, no row was read, and nothing is spent
        precision = begins(order)
        update = trainer.run(order, first, Cursor()).update
    except UserCodeError:
        # The first real order will fail in the same way and report the error.
        update = np.zeros(trainer.facts.layout.size, np.float32)
    except Diverged:
        update = np.full(trainer.facts.layout.size, _LARGEST)
    np.clip(update, -_LARGEST, _LARGEST, out=update)
    update *= np.float32(steps / count)
    return update, steps, steps * order.batch_size, precision


@dataclass(frozen=True, slots=True)
class Throttle:
    """Extra time that stretches local steps to the duration on an emulated machine.

    A step over b samples lasts ``max(curve.step_s(b), raw_s * fastest_ratio)`` seconds: the emulated duration, unless
    this machine is too slow for it; then all silos slow down together. ``fastest_ratio`` is the speed of the fastest
    emulated silo divided by this silo's, at least 1.
    """

    curve: Curve
    fastest_ratio: float

    def sleep_s(self, batch_size: int, raw_s: float) -> float:
        """Seconds to add to a step that took ``raw_s`` seconds; never negative."""
        return max(self.curve.step_s(batch_size), raw_s * self.fastest_ratio) - raw_s
