"""Interface between a silo's session and its trainer. The trainer may run in a process without keys and network.

Imports no torch: the process that has a silo's keys does not load torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder, WorkReport
from fedsync.model.layout import Layout, Vector
from fedsync.model.table_columns import TableForm
from fedsync.privacy.release import PrivateSettings
from fedsync.train.machine.throttle import Throttle

Watch = Callable[[int, int], bool]
"""Callback between steps with the numbers of steps and samples done; False ends the order."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an order.

    Args:
        update: local model minus base, float32 [layout.size].
        report: report for the server.
        cursor: state for the next order.
    """

    update: Vector
    report: WorkReport
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class TrainerFacts:
    """Facts of a built trainer.

    Args:
        layout: layout of the tensors that travel.
        frozen: SHA-256 of the model's frozen tensors, hexadecimal; empty if no tensor is frozen.
        kept_names: names of the tensors that do not travel.
        table: columns of the silo's table, which must be equal at all silos; None for other data.
        device: name of the device for people: ``cpu`` or ``cuda:0``.
        examples: number of training samples that the silo holds.
        validates: whether the silo holds out a validation split; see `Split`.
        tied_names: further names of tensors that travel.
    """

    layout: Layout
    frozen: str
    kept_names: tuple[str, ...]
    table: TableForm | None
    device: str
    examples: int
    validates: bool
    tied_names: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Names of all tensors of the model."""
        return {*self.layout.names, *self.kept_names, *self.tied_names}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor among the values of a model; ``start`` is in bytes, and the same for tied tensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class SiloTrainer(Protocol):
    """Trainer of one silo; not thread-safe.

    `fedsync.train.local_trainer.LocalTrainer` trains in this process, `fedsync.silo.room.process.TrainingProcess`
    in another. Any method may raise `UserCodeError` or `ConfigError`, because methods run user code.
    """

    @property
    def facts(self) -> TrainerFacts:
        """Facts of model, data and device; they do not change."""

    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; equal at every silo."""

    def save_model(self, path: Path, model: Vector) -> None:
        """Write ``model``, float32 [layout.size], as a state dict; see `fedsync.train.weights.save_state`."""

    def find_batch_cap_on_gpu(self) -> int | None:
        """Largest batch that fits the GPU's memory [samples]; None if the search is not quick or not possible."""

    def make_private(self, settings: PrivateSettings) -> int:
        """Train by DP-SGD from now on, with these settings; return the number of the silo's units.

        Without a noise in the settings nothing is trained yet.
        """

    def run(
        self,
        order: WorkOrder,
        base: Vector,
        cursor: Cursor,
        throttle: Throttle | None = None,
        watch: Watch | None = None,
        correction: Vector | None = None,
    ) -> Outcome:
        """Carry out an order; see `fedsync.train.local_trainer.LocalTrainer.run`."""

    def try_evaluate(self, model: Vector, cursor: Cursor, split: Split) -> Evaluation | None:
        """Loss and score of ``model``, float32 [layout.size], on a split; None if the evaluation fails."""

    def judge(self, model: Vector, cursor: Cursor, split: Split, subject: str, *, gains: bool) -> Evaluation:
        """Evaluate the model named ``subject``; with ``gains``, also its gains over the silo's own model."""

    def where(self, thread: int) -> str:
        """Line of code at which ``thread``, which waits for this trainer, currently is; for people."""
