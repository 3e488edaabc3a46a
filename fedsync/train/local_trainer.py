"""Base class of local trainers: carries out an order (a training request), and returns update and report."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import ClassVar, Protocol, Unpack

import numpy as np
import torch

from fedsync.common import foreign
from fedsync.common.errors import ConfigError, Diverged, FedSyncError, PolicyError
from fedsync.core.orders import UNCHANGED, Cursor, Evaluation, Split, WorkOrder, WorkReport
from fedsync.core.report_checks import check_evaluation
from fedsync.evaluation.metrics.gain import JudgedSamples, LocalGains
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.layout import Layout, Vector
from fedsync.model.table_columns import TableForm
from fedsync.privacy.release import PrivateSettings
from fedsync.train.divergence_search import DivergenceSearch
from fedsync.train.guests.guest_code import guarded, line_of
from fedsync.train.machine import device as devices
from fedsync.train.options import LocalOptions
from fedsync.train.order_clock import MachineProbe, Pace
from fedsync.train.silo_trainer import Outcome, RunOptions, Throttle, TrainerFacts, Watch
from fedsync.train.weights import save_state

logger = foreign.logger(__name__)

_STEPS_AT_A_TIME = 64

_LARGE_BYTES = 2**25
"""Model size from which heap cleanup after training, about ten milliseconds, is worth its time [bytes]."""

BeginPace = Callable[[], Pace]


@dataclass(frozen=True, slots=True)
class LoopResult:
    """Result of an order's steps: mean ``loss`` over the steps, None if training code reports none; ``cursor`` for the
    next order; ``batch_cap``, the largest batch that fits the memory [samples], if memory ran out.
    """

    pace: Pace
    loss: float | None
    cursor: Cursor
    metrics: Mapping[str, float] = field(default_factory=dict)
    batch_cap: int | None = None


class TravellingModel(Protocol):
    """Model with conversion to and from one flat vector; see `fedsync.train.weights.Weights`."""

    @property
    def layout(self) -> Layout: ...

    rounds: bool
    """Whether `load` rounds values to half precision."""

    ties: Mapping[str, str]
    """Further names of tensors that travel, each with the name in ``layout``."""

    def load(self, vector: Vector) -> None: ...

    def read(self) -> Vector: ...

    def state(self) -> Mapping[str, torch.Tensor]: ...


class ModelKeeper(Protocol):
    """Object that knows a model's layout and can write the model to a file, such as a `LocalTrainer`."""

    @property
    def layout(self) -> Layout: ...

    def save_model(self, path: Path, model: Vector, private: bytes = b"") -> None:
        """Write ``model``, float32 [layout.size], as ``torch.load(path, weights_only=True)`` reads it, with frozen
        parts, and with private parts from ``private`` (`Cursor.private`), else as built.
        """


class MeanLoss:
    """Mean of an order's losses, summed in float64 on the losses' device."""

    def __init__(self) -> None:
        self._sum: float | torch.Tensor = 0.0
        self._recent: list[torch.Tensor] = []
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add a step's mean loss, a detached scalar, without synchronising the device."""
        self._recent.append(loss)
        if len(self._recent) == _STEPS_AT_A_TIME:
            self._fold()

    def mean(self) -> float | None:
        self._fold()
        return float(self._sum) / self._count if self._count else None

    def _fold(self) -> None:
        if self._recent:
            self._sum = self._sum + torch.stack(self._recent).sum(dtype=torch.float64)
            self._count += len(self._recent)
            self._recent.clear()


class LocalTrainer(ABC):
    """Base of trainers of one silo; model and data stay on the device between orders. Not thread-safe: torch has one
    generator per process.
    """

    _evaluates_in_place: ClassVar[bool] = True
    """Whether the model that an evaluation gets is the model that the order then trains."""

    _steps_by_itself = True
    """Whether the optimizer's steps are not the user's, who may forget one."""

    def __init__(
        self,
        name: str,
        weights: TravellingModel,
        device: torch.device,
        options: LocalOptions,
        frozen_digest: bytes = b"",
        kept_names: tuple[str, ...] = (),
    ) -> None:
        self._name = name
        self._weights, self.layout = weights, weights.layout
        self.frozen_digest, self.kept_names = frozen_digest, kept_names
        """SHA-256 of the frozen tensors, empty for none; names of the tensors that do not travel."""
        self._device = device
        self._options = options
        self._probe = MachineProbe(device, options.resources)
        self._said: set[str] = set()
        self.table: TableForm | None = None
        """Columns of the silo's table, which must be equal at all silos; None for other data."""
        self.private_names: tuple[str, ...] = ()
        self.judged: JudgedSamples | None = None
        """Per-sample results of the last evaluation on the test split; None if unknown."""

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    @abstractmethod
    def examples(self) -> int:
        """Number of training samples."""

    @abstractmethod
    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; equal on every silo."""

    def facts(self) -> TrainerFacts:
        return TrainerFacts(
            layout=self.layout,
            frozen=self.frozen_digest.hex(),
            kept_names=self.kept_names,
            table=self.table,
            device=self.device,
            examples=self.examples,
            validates=self.validates,
            ties=self._weights.ties,
            private_names=self.private_names,
        )

    def find_batch_cap_on_gpu(self) -> int | None:
        """See `SiloTrainer`. This default returns None: the memory that user code needs for a batch is unknown."""
        return None

    def make_private(self, settings: PrivateSettings) -> int:
        """See `SiloTrainer`. This default refuses: nobody sees what a loop of the user's own does in a step."""
        problem = "this training code has a loop of its own, of which FedSync cannot see that each step is private"
        raise ConfigError("privacy", problem, "Write a task without a loop, or leave privacy out")

    def _correct(self, correction: Vector | None) -> None:
        """Add ``correction``, float32 [layout.size], to the gradients of the next order's steps; None adds nothing."""
        if correction is not None:
            raise PolicyError("training code with a loop of its own is to correct its steps")

    def _recall(self, cursor: Cursor) -> None:  # noqa: B027  # most keep nothing
        """Restore private state of the last order."""

    @property
    def validates(self) -> bool:
        return False

    @abstractmethod
    def _begin(self, order: WorkOrder) -> None: ...

    @abstractmethod
    def _train(self, order: WorkOrder, cursor: Cursor, begin: BeginPace) -> LoopResult: ...

    @abstractmethod
    def _evaluate(self, split: Split) -> Evaluation: ...

    def run(
        self,
        order: WorkOrder,
        base: Vector,
        cursor: Cursor,
        *,
        throttle: Throttle | None = None,
        watch: Watch | None = None,
        correction: Vector | None = None,
    ) -> Outcome:
        """Carry out an order, at least one step of it, from ``base``, float32 [layout.size].

        The order ends after ``order.max_steps`` steps, after the step in which ``order.budget_s`` runs out, or when
        ``watch`` returns False.

        Args:
            throttle: machine to emulate; its sleeps count as compute time.
            watch: called after each step; its time counts as compute time, so the call should be quick.
            correction: added to the gradient of each step, float32 [layout.size]; see `fedsync.model.control_variates`.

        Raises:
            ValueError: the base has the wrong length or is not finite, or the batch is empty.
            Diverged: training gave values that are not finite.
            RuntimeError: a single sample does not fit the memory.
        """
        overhead_s: dict[str, float] = {}
        evaluation = None
        self._set_threads()
        with devices.seeded(self._device, order.seed):
            with self._timed(overhead_s, "load"):
                self._prepare(order, base, cursor, correction)
            if order.evaluate:
                with self._timed(overhead_s, "evaluate"):
                    evaluation = self._attempt(lambda: self._evaluate(order.split))
                if evaluation is None or self._evaluates_in_place:  # it may have changed model or private state
                    self._prepare(order, base, cursor, correction)
            # The update is what training changed, without the rounding of the received model.
            start_model = self._weights.read() if self._weights.rounds else base
            trained = self._train(order, cursor, lambda: Pace(order, self._device, self._probe, throttle, watch))
        with self._timed(overhead_s, "store"):
            if self.layout.nbytes >= _LARGE_BYTES:
                devices.free_heap()  # of gradients: the update needs as much memory as they did
            update, finite, changed = self._weights.read(), True, self._steps_by_itself or order.scores_only
            for start, stop in spans(update.size, update.itemsize):
                part = update[start:stop]
                part -= start_model[start:stop]
                finite &= bool(np.isfinite(part).all())
                changed = changed or bool(part.any())
                give_back(start_model)
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
            metrics={**self._probe.metrics(), **trained.metrics, **({} if changed else self._unchanged(pace))},
        )
        return Outcome(update, report, trained.cursor)

    def _unchanged(self, pace: Pace) -> dict[str, float]:
        remedy = "call optimizer.step() for each batch; if gradients add up over batches, let orders have more steps"
        self._warn(f"silo {self._name}: an order's steps changed nothing in the model; {remedy}")
        return {UNCHANGED: float(pace.steps)}

    def _prepare(self, order: WorkOrder, base: Vector, cursor: Cursor, correction: Vector | None) -> None:
        self._weights.load(base)
        self._recall(cursor)
        self._begin(order)
        self._correct(correction)

    def _why_diverged(
        self, order: WorkOrder, base: Vector, cursor: Cursor, correction: Vector | None, loss: float | None
    ) -> Diverged:
        """Repeat the order with a check of each step, to find the first value that was not finite."""
        found, again = DivergenceSearch(), replace(order, budget_s=None)
        with found.watching(), devices.seeded(self._device, order.seed):
            self._prepare(order, base, cursor, correction)
            self._train(again, cursor, lambda: Pace(again, self._device, self._probe))
        return found.error(order.learning_rate, loss)

    def _attempt(self, evaluate: Callable[[], Evaluation]) -> Evaluation | None:
        """Return the evaluation, or None if it fails; a failure is only logged, once per message."""
        try:
            with guarded():
                found = evaluate()
            check_evaluation(self._name, found)
        except FedSyncError as error:
            self._warn(f"{self._name} trains, but its evaluation failed: {error}")
            return None
        return found

    def _warn(self, said: str) -> None:
        if said not in self._said:
            self._said.add(said)
            logger.warning("%s", said)

    def evaluate(self, model: Vector, cursor: Cursor | None = None, split: Split = Split.VALIDATION) -> Evaluation:
        """Loss and score of ``model``, float32 [layout.size], on a split, or on the test split without such a split;
        `ValueError` for a wrong length or a value that is not finite. ``cursor`` has the state after the last order.
        """
        self._set_threads()
        self._weights.load(model)
        self._recall(cursor or Cursor())
        return self._evaluate(split)

    def save_model(self, path: Path, model: Vector, private: bytes = b"") -> None:
        self._weights.load(model)
        self._recall(Cursor(private=private))
        save_state(path, self._weights.state())

    def _set_threads(self) -> None:
        """Set torch's threads before each call: the setting is per process, and other silos may change it."""
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)

    @contextmanager
    def _timed(self, overhead_s: dict[str, float], kind: str) -> Iterator[None]:
        start_s = perf_counter()
        yield
        devices.synchronise(self._device)
        overhead_s[kind] = perf_counter() - start_s


class GuardedTrainer:
    """`SiloTrainer` around a `LocalTrainer`; raises `UserCodeError` for errors in user code."""

    def __init__(self, make: Callable[[], LocalTrainer]) -> None:
        before = sys.modules.copy()
        with guarded():
            self._trainer = make()
            self.facts: TrainerFacts = self._trainer.facts()
        # Silos of one process each have modules of their own, by the same names, under which loader workers pickle.
        self._modules = {name: each for name, each in sys.modules.copy().items() if before.get(name) is not each}
        self._gains = LocalGains()

    @guarded()
    def initial_model(self) -> Vector:
        return self._trainer.initial_model()

    @guarded()
    def save_model(self, path: Path, model: Vector) -> None:
        self._trainer.save_model(path, model)

    @guarded()
    def find_batch_cap_on_gpu(self) -> int | None:
        return self._trainer.find_batch_cap_on_gpu()

    @guarded()
    def make_private(self, settings: PrivateSettings) -> int:
        return self._trainer.make_private(settings)

    @guarded()
    def run(self, order: WorkOrder, base: Vector, cursor: Cursor, **options: Unpack[RunOptions]) -> Outcome:
        sys.modules.update(self._modules)
        return self._trainer.run(order, base, cursor, **options)

    @guarded()
    def judge(self, model: Vector, cursor: Cursor, split: Split, subject: str, *, gains: bool) -> Evaluation:
        sys.modules.update(self._modules)
        found = self._trainer.evaluate(model, cursor, split)
        return self._gains.told(subject, found, self._trainer.judged if gains else None)

    def where(self, thread: int) -> str:
        return line_of(thread)
