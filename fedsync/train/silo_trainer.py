"""The trainer of a silo, as its session sees it: in this process, or in one that has neither keys nor a network.

Imports no torch: the process that has a silo's keys has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedsync.core.cursor import Cursor
from fedsync.core.orders import Evaluation, Split, WorkOrder, WorkReport
from fedsync.model.layout import Layout, Vector
from fedsync.model.table_columns import TableForm
from fedsync.train.machine.throttle import Throttle

Watch = Callable[[int, int], bool]
"""Called now and then between steps with the steps and samples done; False ends the order there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an order.

    Args:
        update: local model minus base, float32 [layout.size].
        report: for the server.
        cursor: for the next order.
    """

    update: Vector
    report: WorkReport
    cursor: Cursor


class SiloTrainer(Protocol):
    """Trains one silo, order after order. Not for several threads at once.

    `fedsync.train.local_trainer.LocalTrainer` does so in this process, `fedsync.silo.training_process.TrainingProcess` in
    another. Any method may raise `UserCodeError` or `ConfigError`: a user's code runs in it.
    """

    @property
    def layout(self) -> Layout:
        """Tensors that travel."""

    @property
    def frozen_digest(self) -> bytes:
        """SHA-256 of the model's frozen tensors; empty where there are none."""

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of the tensors that do not travel."""

    @property
    def table(self) -> TableForm | None:
        """Columns of the silo's table, which must be the same at all silos; None where there is none."""

    @property
    def device(self) -> str:
        """Where training runs, for people: ``cpu`` or ``cuda:0``."""

    @property
    def examples(self) -> int:
        """Training samples that the silo holds."""

    @property
    def validates(self) -> bool:
        """Whether the silo holds out a validation split; see `Split`."""

    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; the same at every silo."""

    def save_model(self, path: Path, model: Vector) -> None:
        """Write ``model``, float32 [layout.size], as a state dict; see `fedsync.train.weights.save_state`."""

    def find_batch_cap_on_gpu(self) -> int | None:
        """The largest batch that fits a GPU's memory [samples], where that is quick to find; else None."""

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
        """Loss and score of ``model``, float32 [layout.size], on a split; None where that fails."""

    def judge(self, model: Vector, cursor: Cursor, split: Split, subject: str, *, gains: bool) -> Evaluation:
        """The same of the model called ``subject``, and with ``gains`` what it gains over the silo's own."""

    def where(self, thread: int) -> str:
        """The line of code at which the thread stands that waits for this, for people."""
