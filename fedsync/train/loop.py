"""The local loop of one silo: an order in, an update and a report out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, sleep

import numpy as np
import torch
from torch import Tensor

from fedsync.core.checks import usable
from fedsync.core.curve import may_begin
from fedsync.core.errors import ConfigError, Diverged
from fedsync.core.layout import Layout, Vector
from fedsync.core.orders import Evaluation, Window, WorkOrder, WorkReport
from fedsync.tasks.protocol import SiloSlot, Task
from fedsync.train import device as devices
from fedsync.train.batches import batches_of
from fedsync.train.machine_probe import MachineProbe, Series
from fedsync.train.memory import BatchCap
from fedsync.train.options import LocalOptions
from fedsync.train.precision import Precision
from fedsync.train.sampler import Cursor, Sampler
from fedsync.train.throttle import Throttle
from fedsync.train.weights import Weights, build_model, initial_model

_EVALUATION_BATCH = 512
_STEPS_AT_A_TIME = 64

Watch = Callable[[int, int], bool]
"""Called after each step with the steps and samples done; False ends the order there."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an order came to.

    Args:
        update: local model minus base, float32 [layout.size].
        report: for the server.
        cursor: for the next order.
    """

    update: Vector
    report: WorkReport
    cursor: Cursor


@dataclass(slots=True)
class _Tally:
    """Running sums of one order."""

    cursor: Cursor
    loss: float | Tensor = 0.0
    steps: int = 0
    compute_s: float = 0.0
    windows: tuple[Window, ...] = ()
    overhead_s: dict[str, float] = field(default_factory=dict)

    def fold(self, losses: list[Tensor]) -> None:
        """Add up the losses, float64 on the device, and empty the list."""
        if losses:
            self.loss = self.loss + torch.stack(losses).sum(dtype=torch.float64)
            losses.clear()


class Trainer:
    """Trains one silo, order after order, with model and data kept on the device.

    The outcome of an order depends on the order, the base, the cursor and on nothing that ran before;
    the same inputs give the same bits. (Two exceptions: running out of memory changes how sums are
    split, and a budget is measured in real seconds.) Not for several threads at once: torch's
    generator is one a process.

    Args:
        task: what to train.
        slot: which silo this is.
        options: how.

    Raises:
        ConfigError: no such device, an option that is beyond it or means nothing to the model, the silo
            holds no training sample, or the task's own complaints.
    """

    def __init__(self, task: Task, slot: SiloSlot, options: LocalOptions) -> None:
        self._task = task
        self._slot = slot
        self._options = options
        self._device = devices.resolve(options.device)
        if options.deterministic:
            devices.allow_determinism(self._device)
        self._precision = Precision(options.precision, self._device)
        data = task.data(slot)
        self._train = batches_of(data.train, self._device)
        self._test = batches_of(data.test, self._device)
        if len(self._train) == 0:
            raise ConfigError("task", f"silo {slot.name!r} holds no training samples", "Give it data, or leave it out")
        self._sampler = Sampler(len(self._train), slot.seed, slot.name)
        self._model = build_model(task, slot.seed).to(self._device)
        if options.channels_last:
            devices.channels_last(self._model)
        self._weights = Weights(self._model)
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = options.make_optimizer(self._parameters)
        self._cap = BatchCap()
        self._probe = MachineProbe(self._device, options.resources)

    @property
    def layout(self) -> Layout:
        return self._weights.layout

    @property
    def examples(self) -> int:
        return len(self._train)

    @property
    def device(self) -> str:
        """Where training runs, for people: ``cpu`` or ``cuda:0``."""
        return str(self._device)

    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; the same on every silo."""
        return initial_model(self._task, self._slot.seed)[0]

    def run(
        self,
        order: WorkOrder,
        base: Vector,
        cursor: Cursor,
        throttle: Throttle | None = None,
        watch: Watch | None = None,
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

        Raises:
            ValueError: the base has the wrong length or is not finite, or the batch is empty.
            Diverged: training came to values that are not finite.
            RuntimeError: one single sample does not fit the memory.
        """
        tally = _Tally(cursor)
        evaluation = None
        self._set_threads()
        with devices.seeded(self._device, order.seed), devices.deterministic(self._options.deterministic):
            with self._timed(tally, "load"):
                self._weights.load(base)
                self._renew_optimizer(order.learning_rate)
            if order.evaluate:
                with self._timed(tally, "evaluate"):
                    evaluation = usable(self._slot.name, self._evaluate())
            self._steps(order, tally, throttle, watch)
        with self._timed(tally, "store"):
            update = self._weights.read()
            update -= base
            finite = bool(np.isfinite(update).all())
            loss = float(tally.loss) / tally.steps if tally.steps else 0.0
        if not (finite and np.isfinite(loss)):
            raise Diverged(
                "local.learning_rate",
                f"training diverged: the loss became {loss} at learning rate {order.learning_rate}",
                "Lower it",
            )
        report = WorkReport(
            base_version=order.base_version,
            steps=tally.steps,
            samples=tally.steps * order.batch_size,
            compute_s=tally.compute_s,
            loss=loss,
            overhead_s=tally.overhead_s,
            windows=tally.windows,
            batch_cap=self._cap.largest,
            evaluation=evaluation,
            metrics=self._probe.metrics(),
        )
        return Outcome(update, report, tally.cursor)

    def evaluate(self, model: Vector) -> Evaluation:
        """Loss and score of ``model``, float32 [layout.size], on the silo's test split.

        Raises:
            ValueError: the vector has the wrong length or is not finite.
        """
        self._set_threads()
        self._weights.load(model)
        with devices.deterministic(self._options.deterministic):
            return self._evaluate()

    def find_batch_cap_on_gpu(self) -> int | None:
        """`find_batch_cap` where it is safe and quick; None on a processor."""
        return self.find_batch_cap() if self._device.type == "cuda" else None

    def find_batch_cap(self, limit_s: float = 10.0) -> int | None:
        """Find the largest batch that fits the memory by whole steps over batches of growing size.

        Cuts later batches to that size. On a processor memory is rarely the limit, and a system that has
        run out of it may end the process instead of saying no: better ask on a GPU only.

        Args:
            limit_s: no further batch is tried after so many seconds.

        Returns:
            Samples, or None if all that the silo holds fit, or as many as there was time to try.

        Raises:
            RuntimeError: one single sample does not fit the memory.
        """
        end_s = perf_counter() + limit_s

        def step(size: int) -> None:
            self._backward(self._train.place(np.arange(size)), 1.0)
            self._precision.unscale(self._optimizer)
            self._precision.step(self._optimizer)
            devices.synchronise(self._device)

        self._model.train()
        with devices.seeded(self._device, self._slot.seed), devices.deterministic(self._options.deterministic):
            # At a rate of 0 the optimizer makes the memory that it will need, and learns nothing.
            self._renew_optimizer(0.0)
            found = self._cap.search(step, self._reset, self.examples, lambda: perf_counter() < end_s)
        self._optimizer.state.clear()
        devices.free_cache(self._device)
        return found

    def _steps(self, order: WorkOrder, tally: _Tally, throttle: Throttle | None, watch: Watch | None) -> None:
        """Train, and fill in the tally.

        A GPU is waited for at the ends of windows only, unless a budget or a throttle has to know how
        long each step took.
        """
        size, budget_s = order.batch_size, math.inf if order.budget_s is None else order.budget_s
        self._model.train()
        stepwise = throttle is not None or order.budget_s is not None
        devices.synchronise(self._device)
        self._probe.start(perf_counter())
        start_s = now_s = deadline_s = perf_counter()
        series = Series(self._probe, start_s)
        losses: list[Tensor] = []
        base = [parameter.detach().clone() for parameter in self._parameters] if self._options.proximal else []
        for rows, following in self._draw(order, tally.cursor):
            step_s = now_s
            losses.append(self._step(rows, base))
            # While the device is still at it.
            if following is not None:
                self._train.ahead(following)
            tally.steps += 1
            if len(losses) == _STEPS_AT_A_TIME:
                tally.fold(losses)
            if stepwise:
                devices.synchronise(self._device)
            now_s = perf_counter()
            if throttle is not None:
                # A deadline, not single sleeps: what one sleep takes too long, the next makes good.
                raw_s = now_s - step_s
                deadline_s += raw_s + throttle.sleep_s(size, raw_s)
                sleep(max(0.0, deadline_s - now_s))
                now_s = perf_counter()
            if now_s >= series.due_s:
                devices.synchronise(self._device)
                now_s = perf_counter()
                series.close(now_s, tally.steps * size)
            if not may_begin(now_s - start_s, now_s - step_s, budget_s, order.overrun) or (
                watch is not None and not watch(tally.steps, tally.steps * size)
            ):
                break
        devices.synchronise(self._device)
        now_s = perf_counter()
        tally.compute_s = now_s - start_s
        tally.fold(losses)
        tally.windows = series.finish(now_s, tally.steps * size)
        tally.cursor = self._sampler.after(tally.cursor, tally.steps * size)

    def _draw(self, order: WorkOrder, cursor: Cursor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Sample numbers of each step and of the one after it, int64 [batch_size], drawn for many steps at a time.

        Drawing takes microseconds but drives the network out of the processor's caches, which costs
        several times as much.
        """
        left, rows = order.max_steps, None
        while left:
            steps = min(left, _STEPS_AT_A_TIME)
            drawn, cursor = self._sampler.take(cursor, steps * order.batch_size)
            for following in torch.split(self._train.place(drawn), order.batch_size):
                if rows is not None:
                    yield rows, following
                rows = following
            left -= steps
        if rows is not None:
            yield rows, None

    def _step(self, rows: Tensor, base: list[Tensor]) -> Tensor:
        """One local step over ``rows``, held back to ``base`` if that is not empty; returns the mean loss."""
        while True:
            loss = self._gradients(rows)
            self._precision.unscale(self._optimizer)
            if base:
                self._hold_back(base)
            if self._precision.step(self._optimizer):
                return loss

    def _gradients(self, rows: Tensor) -> Tensor:
        """Set the parameters' gradients to those of the mean loss over ``rows``; return that loss."""
        # What zero_grad does, without its hooks: they cost more than all else that this loop adds.
        for parameter in self._parameters:
            parameter.grad = None
        losses = self._cap.work_off(rows, self._backward, self._reset)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _hold_back(self, base: list[Tensor]) -> None:
        """Add the gradient of ``mu / 2 * |w - base|^2``, which is ``mu (w - base)``.

        The loss that is reported is without this term: it says how well the model does.

        Source: FedProx (Li et al. 2020, arXiv:1812.06127), equation 2.
        """
        for parameter, start in zip(self._parameters, base, strict=True):
            if parameter.grad is not None:  # a parameter without a gradient has not moved
                parameter.grad.add_(parameter.detach() - start, alpha=self._options.proximal)

    def _backward(self, rows: Tensor, share: float) -> Tensor:
        """One piece of `_gradients`, which weighs ``share`` of the whole."""
        batch = self._train.take(rows)
        with self._precision.forward():
            loss = self._task.loss(self._model, batch)
        if share < 1.0:
            loss = loss * share
        self._precision.backward(loss)
        return loss.detach()

    def _evaluate(self) -> Evaluation:
        """Evaluate the weights that are loaded; in float32, so that silos of any precision compare."""
        self._model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        rows = self._test.place(np.arange(len(self._test)))
        with devices.seeded(self._device, self._slot.seed), torch.no_grad():
            for batch in torch.split(rows, _EVALUATION_BATCH) if len(rows) else ():
                for part in self._cap.work_off(batch, self._score, self._reset):
                    total += part
        loss, correct = total.tolist()
        return Evaluation(loss, correct, len(rows))

    def _score(self, rows: Tensor, _share: float) -> Tensor:
        """One piece of `_evaluate`: loss and correct predictions, float64 [2]."""
        loss, correct = self._task.score(self._model, self._test.take(rows))
        return torch.stack([loss.double(), correct.double()])

    def _reset(self) -> None:
        self._model.zero_grad()
        devices.free_cache(self._device)

    def _renew_optimizer(self, learning_rate: float) -> None:
        """Make the optimizer as good as new: without memory of earlier orders."""
        self._precision.renew()
        self._optimizer.state.clear()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate

    def _set_threads(self) -> None:
        """Each time, since torch's setting is one a process and other silos may want another."""
        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)

    @contextmanager
    def _timed(self, tally: _Tally, kind: str) -> Iterator[None]:
        """Count the time inside as overhead of that kind."""
        start_s = perf_counter()
        yield
        devices.synchronise(self._device)
        tally.overhead_s[kind] = perf_counter() - start_s
