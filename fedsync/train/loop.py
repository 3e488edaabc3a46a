"""Training loop for tasks that define model, data and loss, with checks of a task before training.

Each error of a check says in one line what to write instead. The strategy file names the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from fedsync.client.lasting import Piece
from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.model.layout import Vector
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.tasks.metrics.measurement import Found, Measuring, Summed
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task, label_sums
from fedsync.train.batches import BatchCap, Batches, Sampler, batches_of
from fedsync.train.local_trainer import BeginPace, LocalTrainer, LoopResult, MeanLoss
from fedsync.train.machine import device as devices
from fedsync.train.machine.device import Precision, is_out_of_memory, resolve
from fedsync.train.module_parts import ModelParts, parts_of
from fedsync.train.options import LocalOptions
from fedsync.train.weights import TaskModel, Weights, build_model

_EVALUATION_BATCH, _BY_WORKERS = 512, 64
"""Samples per evaluation batch; smaller with loader workers, so that several workers get a share."""

_NOTHING: Found = Summed({})

_ROWS_AT_A_TIME = 64
"""Steps whose sample numbers are drawn together."""


class Trainer(LocalTrainer):
    """Trainer of a task.

    The result depends only on order, base and cursor, bit for bit, and on no earlier order. Two exceptions: running out
    of memory changes how sums are split, and a budget is measured in real seconds. Raises `ConfigError` for an unknown
    device or model part (``run`` names parts), an unsupported option, or without a training sample.
    """

    def __init__(self, task: Task, slot: SiloSlot, options: LocalOptions, run: PartPatterns = UNSAID) -> None:
        device = resolve(options.device)
        self._precision = Precision(options.precision, device)
        data = check_data(task.data(slot))
        collate = default_collate if type(task).collate is Task.collate else task.collate
        self._samples, test = (
            batches_of(samples, device, collate, options.workers) for samples in (data.train, data.test)
        )
        held_out = test
        if data.validation is not None:
            held_out = batches_of(data.validation, device, collate, options.workers)
        self._splits = {Split.TEST: test, Split.VALIDATION: held_out if len(held_out) else test}
        if len(self._samples) == 0:
            raise ConfigError("task", f"silo {slot.name!r} holds no training samples", "Give it data, or leave it out")
        self._task = task
        self._slot = slot
        self._sampler, self._scout = (Sampler(len(self._samples), slot.seed, slot.name) for _ in range(2))
        self._model = build_model(task, slot.seed)
        self._parts = ModelParts(self._model, parts_of(self._model, run, task.parts()))
        self._model.to(device)
        with devices.seeded(device, slot.seed):
            check_task(task, self._model, self._samples, self._splits[Split.VALIDATION])
            self._model.train()
            few = self._samples.place(np.arange(FEW) % self.examples)
            self._precision.check(self._model, lambda: task.loss(self._model, self._samples.take(few)))
        self._measuring = Measuring(options.measured.metrics(task.metrics), device)
        weights, parts = Weights(self._model, self._parts.shared), self._parts
        super().__init__(slot.name, weights, device, options, parts.frozen_digest, parts.kept_names)
        self.private_names = parts.private_names
        self.table = task.table(slot)
        self._run = run
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = options.make_optimizer(self._parameters)
        self._starts_empty = not self._optimizer.state
        self._cap = BatchCap()
        self._corrections: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def examples(self) -> int:
        return len(self._samples)

    @property
    def validates(self) -> bool:
        return self._splits[Split.VALIDATION] is not self._splits[Split.TEST]

    def initial_model(self) -> Vector:
        return TaskModel(self._task, self._slot.seed, self._run).initial()

    def _recall(self, cursor: Cursor) -> None:
        if cursor.private or not self._parts.plain:
            self._parts.restore(cursor.private)

    def _begin(self, order: WorkOrder) -> None:
        self._renew_optimizer(order.learning_rate)

    def _correct(self, correction: Vector | None) -> None:
        """Correct trainable shared parameters only; private parts and buffers (no gradients) are not corrected."""
        self._corrections = []
        if correction is not None:
            parts, state = self.layout.split(correction), self._model.state_dict(keep_vars=True)
            for name, values in parts.items():
                parameter = state[name]
                if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                    self._corrections.append((parameter, torch.from_numpy(values).to(parameter)))

    def find_batch_cap_on_gpu(self) -> int | None:
        return self.find_batch_cap() if self._device.type == "cuda" else None

    def find_batch_cap(self, limit_s: float = 10.0) -> int | None:
        """Find the largest batch that fits the memory [samples], with whole steps over batches of growing size.

        Later batches are cut to that size. None if all of the silo's samples fit, or all sizes that were tried in
        ``limit_s``. `RuntimeError` if a single sample does not fit. On a CPU, the system may kill the process.
        """
        end_s = perf_counter() + limit_s

        def step(size: int) -> None:
            self._backward(self._samples.place(np.arange(size)), 1.0)
            self._precision.unscale(self._optimizer)
            self._precision.step(self._optimizer)
            devices.synchronise(self._device)

        self._model.train()
        with devices.seeded(self._device, self._slot.seed):
            # At a learning rate of 0 the optimizer allocates its state but changes nothing.
            self._renew_optimizer(0.0)
            found = self._cap.search(step, self._reset, self.examples, lambda: perf_counter() < end_s)
        self._optimizer.state.clear()
        devices.free_cache(self._device)
        return found

    def _train(self, order: WorkOrder, cursor: Cursor, begin: BeginPace) -> LoopResult:
        losses = MeanLoss()
        self._model.train()
        base = [parameter.detach().clone() for parameter in self._parameters] if self._options.proximal else []
        size = order.batch_size
        piece = max(1, self._cap.piece(size))
        ahead = self._scout.walk(cursor, size, piece)
        self._samples.begin(ahead, order.max_steps * -(-size // piece))
        pace = begin()
        for rows in self._draw(order, cursor):
            losses.add(self._step(rows, base))
            if not pace.step():
                break
        for parameter in self._parameters:
            parameter.grad = None  # gradients take as much memory as the model, and are not needed any more
        self._corrections = []
        pace.finish()
        # An order that only evaluates changes neither the shared nor the private parts of the model.
        private = cursor.private if order.scores_only or self._parts.plain else self._parts.keep()
        left = replace(self._sampler.after(cursor, pace.samples), private=private)
        return LoopResult(pace, losses.mean() or 0.0, left, {}, self._cap.largest)

    def _draw(self, order: WorkOrder, cursor: Cursor) -> Iterator[Tensor]:
        """Yield each step's sample numbers, int64 [n], drawn for many steps at once: drawing evicts the CPU caches."""
        left = order.max_steps
        while left:
            steps = min(left, _ROWS_AT_A_TIME)
            drawn, cursor = self._sampler.take(cursor, steps * order.batch_size)
            yield from torch.split(self._samples.place(drawn), order.batch_size)
            left -= steps

    def _step(self, rows: Tensor, base: list[Tensor]) -> Tensor:
        """Do one local step over ``rows``, with a FedProx term if ``base`` is not empty; return the mean loss."""
        while True:
            loss = self._gradients(rows)
            self._precision.unscale(self._optimizer)
            # The gradient of ``mu / 2 * |w - base|^2`` (FedProx, Li et al. 2020, arXiv:1812.06127, equation 2).
            for parameter, start in zip(self._parameters, base, strict=False):
                if parameter.grad is not None:  # without one it has not moved; it may be sparse
                    moved = parameter.detach() - start
                    parameter.grad = parameter.grad.to_dense().add_(moved, alpha=self._options.proximal)
            if self._options.clip_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, self._options.clip_norm)
            for parameter, correction in self._corrections:
                # A parameter without a gradient counts as zero gradient; the correction applies to it as well.
                parameter.grad = correction.clone() if parameter.grad is None else correction + parameter.grad
            if self._precision.step(self._optimizer):
                return loss

    def _gradients(self, rows: Tensor) -> Tensor:
        # Does what zero_grad does, without its hooks, which cost more than everything else that this loop adds.
        for parameter in self._parameters:
            parameter.grad = None
        losses = self._cap.work_off(rows, self._backward, self._reset)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _backward(self, rows: Tensor, share: float) -> Tensor:
        batch = self._samples.take(rows)
        with self._precision.forward():
            loss = self._task.loss(self._model, batch)
        check_loss(loss)
        if share < 1.0:
            loss = loss * share
        self._precision.backward(loss)
        return loss.detach()

    def _evaluate(self, split: Split) -> Evaluation:
        """Evaluate the loaded weights in float32, so that results of silos with different precision are comparable."""
        self._model.eval()
        samples, measured, tested = self._splits[split], self._measuring.begin(), split is Split.TEST
        total = torch.zeros(4, dtype=torch.float64, device=self._device)
        rows = samples.place(np.arange(len(samples)))
        with devices.seeded(self._device, self._slot.seed), torch.no_grad():
            size = _BY_WORKERS if self._options.workers else _EVALUATION_BATCH
            batches = torch.split(rows, size) if len(rows) else ()
            samples.begin((Piece(self._slot.seed, batch.tolist()) for batch in batches), len(batches))
            for batch in batches:
                for part, found in self._cap.work_off(batch, partial(self._score, samples, tested), self._reset):
                    total += part
                    measured.add(found)
        loss, correct, labels, count = total.tolist()
        sums = measured.sums(len(samples))
        self.judged = measured.judged(sums, len(samples)) if tested else None
        samples_a_label = count / max(labels, 1.0)
        return Evaluation(loss * samples_a_label, correct * samples_a_label, int(count), sums=sums)

    def _score(self, samples: Batches, tested: bool, rows: Tensor, _share: float) -> tuple[Tensor, Found]:
        """Evaluate one piece: sums of loss and correct predictions, and numbers of known labels and of samples that
        have some, float64 [4]; and the inputs of metrics. An own score counts a label for each sample.
        """
        batch, found = samples.take(rows), _NOTHING
        if type(self._task).score is Task.score:
            outputs, targets = self._task.predict(self._model, batch)
            assess = label_sums if type(self._task).assess is Task.assess else self._task.assess
            scored = torch.stack([each.double() for each in assess(outputs, targets)])
        else:
            scored = torch.stack([each.double() for each in self._task.score(self._model, batch)])
            if self._measuring:
                outputs, targets = self._task.predict(self._model, batch)
        if self._measuring:
            found = self._measuring.of(outputs, targets, rows, tested)
        if len(scored) == 2:
            scored = torch.cat([scored, scored.new_full((2,), len(rows))])
        return scored, found

    def _reset(self) -> None:
        self._model.zero_grad()
        devices.free_cache(self._device)

    def _renew_optimizer(self, learning_rate: float) -> None:
        self._precision.renew()
        if self._starts_empty:
            self._optimizer.state.clear()
        else:
            self._optimizer = self._options.make_optimizer(self._parameters)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate


def check_loss(loss: object) -> None:
    """Raise `ConfigError` unless a loss is a scalar tensor with a gradient."""
    place, remedy = "task, loss", "Return the loss as it was computed, without detach(), item() or torch.no_grad()"
    if not isinstance(loss, Tensor):
        raise ConfigError(place, f"it returned a {type(loss).__name__} in place of a tensor", remedy)
    if not loss.requires_grad:
        raise ConfigError(place, "it returned a loss without a gradient", remedy)
    if loss.numel() != 1:
        problem = f"the loss has the shape {tuple(loss.shape)}"
        raise ConfigError(place, problem, "Return a scalar: the mean over the batch")


FEW = 2


def check_data(data: object) -> SiloData:
    """Raise `ConfigError` unless ``data`` is `SiloData` of map-style data sets."""
    place = "task, data(slot)"
    if not isinstance(data, SiloData):
        raise ConfigError(place, f"it returned {type(data).__name__}", "Return SiloData(train=..., test=...)")
    splits = {"train": data.train, "test": data.test, "validation": data.validation}
    for name, dataset in splits.items():
        if name == "validation" and dataset is None:
            continue
        if isinstance(dataset, DataLoader):
            problem = f"{name} is a DataLoader, and batches are the order's"
            remedy = f"Return SiloData({name}=loader.dataset, ...); local.workers and collate do the rest"
            raise ConfigError(place, problem, remedy)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            problem = f"{name} is a {type(dataset).__name__}, which has no length or no samples by number"
            raise ConfigError(place, problem, "Return a map-style data set: len(dataset) and dataset[i]")
    return data


def check_task(task: Task, model: nn.Module, samples: Batches, held_out: Batches) -> None:
    """Try a task's functions on a few samples; the caller seeds torch.

    Raises `ConfigError` if a default function cannot read the batches, or if the score is not a pair of sums.
    """
    _check_batch(task, samples.take(samples.place(np.arange(1))))
    few = np.arange(min(FEW, len(held_out)))
    if len(few) and (type(task).score is not Task.score or type(task).assess is not Task.assess):
        model.eval()
        try:
            with torch.no_grad():
                _check_score(task, model, *(held_out.take(held_out.place(rows)) for rows in (few, np.tile(few, 2))))
        except (RuntimeError, MemoryError) as error:
            # Not an error: evaluation falls back to smaller pieces.
            if not is_out_of_memory(error):
                raise


def _check_batch(task: Task, batch: Any) -> None:
    if isinstance(batch, Sequence) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return
    kind = type(task)
    reads = {"loss": kind.loss is Task.loss, "score": kind.score is Task.score and kind.predict is Task.predict}
    defaults = [name for name, is_default in reads.items() if is_default]
    if defaults:
        found = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else _shape(batch)
        problem = f"a batch is {found}, and the default {defaults[0]} wants inputs and labels"
        remedy = f"Write {' and '.join(defaults)}, which get a batch as it is, or a collate(samples)"
        raise ConfigError(f"task, {defaults[0]}", problem, remedy)


def _check_score(task: Task, model: nn.Module, batch: Any, twice: Any) -> None:
    """Raise `ConfigError` if a score is no pair of sums; ``twice`` has the samples of ``batch`` twice."""
    place = "task, score"
    pair = task.score(model, batch)
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
        problem = f"it returned {_shape(pair)}"
        raise ConfigError(place, problem, "Return two scalar tensors, the summed loss and the number correct")
    for name, once, more in zip(("loss", "number correct"), pair, task.score(model, twice), strict=True):
        if once.numel() != 1:
            problem = f"the {name} has the shape {tuple(once.shape)}"
            raise ConfigError(place, problem, "Return a scalar: sum it over the batch")
        if once.item() and torch.isclose(once.double(), more.double(), rtol=1e-4, atol=0.0):
            problem = f"the {name} of a batch is that of half the batch, so it is a mean"
            raise ConfigError(place, problem, 'Return sums over the batch, as with reduction="sum"')


def _shape(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(type(part).__name__ for part in value)}"
    return f"a {type(value).__name__}"
