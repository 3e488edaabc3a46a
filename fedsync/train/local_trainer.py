"""What every way to train at a silo has in common: an order in, an update and a report out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Protocol

import numpy as np
import torch

from fedsync.common import foreign
from fedsync.common.errors import Diverged, FedSyncError, PolicyError
from fedsync.core.cursor import Cursor
from fedsync.core.orders import Evaluation, Split, WorkOrder, WorkReport
from fedsync.core.report_checks import check_evaluation, usable
from fedsync.evaluation.metrics.gain import JudgedSamples
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.layout import Layout, Vector
from fedsync.model.table_columns import TableForm
from fedsync.train.guests.guest_code import guarded
from fedsync.train.machine import device as devices
from fedsync.train.machine.machine_probe import MachineProbe
from fedsync.train.machine.throttle import Throttle
from fedsync.train.options import LocalOptions
from fedsync.train.pace import Pace
from fedsync.train.postmortem import Postmortem
from fedsync.train.silo_trainer import Outcome, Watch
from fedsync.train.weights import load_model, save_state

logger = foreign.logger(__name__)

_STEPS_AT_A_TIME = 64

_LARGE_BYTES = 2**25
"""A model for which ten milliseconds are not much."""

BeginPace = Callable[[], Pace]
"""Starts the clock of an order's first step."""


@dataclass(frozen=True, slots=True)
class LoopResult:
    """What the steps of an order came to.

    Args:
        pace: how they went.
        loss: mean over the steps; None if nobody said.
        cursor: for the next order.
        metrics: other figures of training.
        batch_cap: largest batch that fits the memory, if it ran out.
    """

    pace: Pace
    loss: float | None
    cursor: Cursor
    metrics: Mapping[str, float] = field(default_factory=dict)
    batch_cap: int | None = None


class TravellingModel(Protocol):
    """A model that becomes one flat vector and back; see `fedsync.train.weights.Weights`."""

    @property
    def layout(self) -> Layout: ...

    def load(self, vector: Vector) -> None:
        """Set every tensor from float32 [layout.size]; raises ValueError if it is no such, or not finite."""

    def read(self) -> Vector:
        """All tensors, float32 [layout.size], in memory of their own."""

    def state(self) -> Mapping[str, torch.Tensor]:
        """The state dict, with what appears twice in it, and with what does not travel."""


class StayingParts(Protocol):
    """What does not travel of a model; see `fedsync.train.module_parts.ModelParts`."""

    @property
    def frozen_digest(self) -> bytes:
        """SHA-256 of the model's frozen tensors; empty where there are none."""

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of the tensors that do not travel."""


class ModelKeeper(Protocol):
    """What knows a model's form, and writes one to a file: a `LocalTrainer`, or less where less will do."""

    @property
    def layout(self) -> Layout: ...

    def save_model(self, path: Path, model: Vector, private: bytes = b"") -> None:
        """Write ``model``, float32 [layout.size], as ``torch.load(path, weights_only=True)`` reads it.

        Private parts are in it as `Cursor.private` of an order has them, by default as they are built; so are frozen
        ones.
        """


class MeanLoss:
    """The losses of an order's steps, added up now and then, float64 on their device."""

    def __init__(self) -> None:
        self._sum: float | torch.Tensor = 0.0
        self._recent: list[torch.Tensor] = []
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """Take a step's mean loss, a detached scalar; nothing waits for the device."""
        self._recent.append(loss)
        if len(self._recent) == _STEPS_AT_A_TIME:
            self._fold()

    def mean(self) -> float | None:
        """Over all that were added; None if none was."""
        self._fold()
        return float(self._sum) / self._count if self._count else None

    def _fold(self) -> None:
        if self._recent:
            self._sum = self._sum + torch.stack(self._recent).sum(dtype=torch.float64)
            self._count += len(self._recent)
            self._recent.clear()


def open_device(options: LocalOptions) -> torch.device:
    """The device that ``options`` name, before anything runs on it.

    Raises:
        ConfigError: there is none such, or it began without what determinism takes.
    """
    device = devices.resolve(options.device)
    if options.deterministic:
        devices.allow_determinism(device)
    return device


class LocalTrainer(ABC):
    """Trains one silo, order after order, with model and data kept on the device.

    Not for several threads at once: torch's generator is one a process.

    Args:
        name: of the silo.
        weights: the model that training changes, as it travels.
        staying: what does not travel of it.
        device: where it is.
        options: how to train.
    """

    def __init__(
        self, name: str, weights: TravellingModel, staying: StayingParts, device: torch.device, options: LocalOptions
    ) -> None:
        self._name = name
        self._weights = weights
        self._staying = staying
        self._device = device
        self._options = options
        self._probe = MachineProbe(device, options.resources)
        self._said = ""
        self.table: TableForm | None = None
        """Columns of the silo's table, which must be the same at all silos; None where there is none."""
        self.judged: JudgedSamples | None = None
        """What the last evaluation found sample by sample, on the test split; None where nobody knows."""

    @property
    def layout(self) -> Layout:
        return self._weights.layout

    @property
    def frozen_digest(self) -> bytes:
        """As `StayingParts.frozen_digest`."""
        return self._staying.frozen_digest

    @property
    def kept_names(self) -> tuple[str, ...]:
        """As `StayingParts.kept_names`."""
        return self._staying.kept_names

    @property
    def device(self) -> str:
        """Where training runs, for people: ``cpu`` or ``cuda:0``."""
        return str(self._device)

    @property
    @abstractmethod
    def examples(self) -> int:
        """Training samples that the silo holds."""

    @abstractmethod
    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; the same on every silo."""

    def find_batch_cap_on_gpu(self) -> int | None:
        """The largest batch that fits a GPU's memory [samples], where that is quick to find; else None.

        So it is where code of a user's own trains: nobody knows what it does with a batch.
        """
        return None

    def _correct(self, correction: Vector | None) -> None:
        """Add this to the gradients of the next order's steps, float32 [layout.size]; None leaves them as they are.

        Raises:
            PolicyError: there are no gradients to get at.
        """
        if correction is not None:
            raise PolicyError("training code with a loop of its own is to correct its steps")

    def _recall(self, cursor: Cursor) -> None:  # noqa: B027  # most keep nothing
        """Take up what the last order left; nothing, where training keeps nothing."""

    @property
    def validates(self) -> bool:
        """Whether the silo holds out a validation split; see `Split`."""
        return False

    @abstractmethod
    def _begin(self, order: WorkOrder) -> None:
        """Make ready for an order; the base model is loaded."""

    @abstractmethod
    def _train(self, order: WorkOrder, cursor: Cursor, begin: BeginPace) -> LoopResult:
        """Do the steps."""

    @abstractmethod
    def _evaluate(self, split: Split) -> Evaluation:
        """Evaluate the weights that are loaded."""

    def run(
        self,
        order: WorkOrder,
        base: Vector,
        cursor: Cursor,
        throttle: Throttle | None = None,
        watch: Watch | None = None,
        correction: Vector | None = None,
    ) -> Outcome:
        """Do an order.

        Ends after ``order.max_steps`` steps, or after the step in which ``order.budget_s`` ran out (so
        after one step at least), or when ``watch`` says so.

        Args:
            order: what to do.
            base: model to start from, float32 [layout.size].
            cursor: where the silo is in its data.
            throttle: machine to emulate, if any; its sleeps count as compute time.
            watch: told after each step, if given; its time counts as compute time, so let it be quick.
            correction: what is added to the gradient of each step, float32 [layout.size]; see
                `fedsync.model.control_variates`.

        Raises:
            ValueError: the base has the wrong length or is not finite, or the batch is empty.
            Diverged: training came to values that are not finite.
            RuntimeError: one single sample does not fit the memory.
        """
        overhead_s: dict[str, float] = {}
        evaluation = None
        self._set_threads()
        with devices.seeded(self._device, order.seed), devices.deterministic(self._options.deterministic):
            with self._timed(overhead_s, "load"):
                self._prepare(order, base, cursor, correction)
            if order.evaluate:
                with self._timed(overhead_s, "evaluate"):
                    evaluation = self._attempt(lambda: self._evaluate(order.split))
                if evaluation is None:  # who knows what it left behind
                    self._prepare(order, base, cursor, correction)
            trained = self._train(order, cursor, lambda: Pace(order, self._device, self._probe, throttle, watch))
        with self._timed(overhead_s, "store"):
            if self.layout.nbytes >= _LARGE_BYTES:
                devices.free_heap()  # of gradients; the update takes as much
            update, finite = self._weights.read(), True
            for start, stop in spans(update.size, update.itemsize):
                part = update[start:stop]
                part -= base[start:stop]
                finite &= bool(np.isfinite(part).all())
                give_back(base)
        if not (finite and (trained.loss is None or np.isfinite(trained.loss))):
            raise self._why_diverged(order, base, cursor, correction, trained.loss)
        pace = trained.pace
        if pace.untimed_s:
            overhead_s["evaluate"] = overhead_s.get("evaluate", 0.0) + pace.untimed_s
        report = WorkReport(
            base_version=order.base_version,
            steps=pace.steps,
            samples=pace.samples,
            compute_s=pace.compute_s,
            loss=trained.loss,
            overhead_s=overhead_s,
            windows=pace.windows,
            batch_cap=trained.batch_cap,
            evaluation=evaluation,
            metrics={**self._probe.metrics(), **trained.metrics},
        )
        return Outcome(update, report, trained.cursor)

    def _prepare(self, order: WorkOrder, base: Vector, cursor: Cursor, correction: Vector | None) -> None:
        self._weights.load(base)
        self._recall(cursor)
        self._begin(order)
        self._correct(correction)

    def _why_diverged(
        self, order: WorkOrder, base: Vector, cursor: Cursor, correction: Vector | None, loss: float | None
    ) -> Diverged:
        """Do the order once more, with an eye on each step, to find what was not finite first."""
        found = Postmortem()
        if self._alone:
            again = replace(order, budget_s=None)
            exact = devices.deterministic(self._options.deterministic)
            with found.watching(), devices.seeded(self._device, order.seed), exact:
                self._prepare(order, base, cursor, correction)
                self._train(again, cursor, lambda: Pace(again, self._device, self._probe))
        return found.error(order.learning_rate, loss)

    @property
    def _alone(self) -> bool:
        """Whether this process does all of an order, so that it may leave out or repeat a part of it."""
        return True

    def _attempt(self, evaluate: Callable[[], Evaluation]) -> Evaluation | None:
        """An evaluation; None where it fails, which is said once in the silo's own log, and costs nothing else."""
        if not self._alone:
            return usable(self._name, evaluate())
        try:
            with guarded():
                found = evaluate()
            check_evaluation(self._name, found)
        except FedSyncError as error:
            said = f"{self._name} trains, but its evaluation failed: {error}"
            if said != self._said:
                self._said = said
                logger.warning("%s", said)
            return None
        return found

    def try_evaluate(self, model: Vector, cursor: Cursor, split: Split) -> Evaluation | None:
        """As `evaluate`; None where that fails."""
        return self._attempt(lambda: self.evaluate(model, cursor, split))

    def evaluate(self, model: Vector, cursor: Cursor | None = None, split: Split = Split.VALIDATION) -> Evaluation:
        """Loss and score of ``model``, float32 [layout.size], on a split of the silo.

        Args:
            model: the model.
            cursor: what the last order left; None where there was none.
            split: on which samples; a silo that holds out no validation split has its test split in its place.

        Raises:
            ValueError: the vector has the wrong length or is not finite.
        """
        self._set_threads()
        self._weights.load(model)
        self._recall(cursor or Cursor())
        with devices.deterministic(self._options.deterministic):
            return self._evaluate(split)

    def save_model(self, path: Path, model: Vector, private: bytes = b"") -> None:
        """As `ModelKeeper.save_model`."""
        self._weights.load(model)
        self._recall(Cursor(private=private))
        save_state(path, self._weights.state())

    def load_model(self, path: Path) -> Vector:
        """The model in a file, float32 [layout.size]; see `fedsync.train.weights.load_model`."""
        return load_model(path, self.layout, self._weights.state())

    def _set_threads(self) -> None:
        """Each time, since torch's setting is one a process and other silos may want another."""
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)

    @contextmanager
    def _timed(self, overhead_s: dict[str, float], kind: str) -> Iterator[None]:
        """Count the time inside as overhead of that kind."""
        start_s = perf_counter()
        yield
        devices.synchronise(self._device)
        overhead_s[kind] = perf_counter() - start_s
