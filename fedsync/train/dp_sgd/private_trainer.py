"""Trainer of a task by DP-SGD: each step clips the gradient of each unit and adds Gaussian noise.

A step draws each unit independently with the same probability, so that the mean number is the ordered batch size
(Poisson sampling). A step without any unit is noise alone. The noisy sum is divided by the ordered batch size, which is
public, and not by the number of units drawn.

A malicious server may send a model for which one row's gradient is not finite. Such a gradient or loss counts as zero;
otherwise the failed order would reveal that the row exists.

Source: Abadi et al. 2016 (arXiv:1607.00133), Algorithm 1. Opacus computes and clips the gradients of single rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor

from fedsync.common.errors import ConfigError, Diverged, ProtocolError
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.core.report_checks import check_evaluation
from fedsync.model.layout import Vector
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.privacy.release import PrivateSettings
from fedsync.tasks.metrics.measurement import Measuring
from fedsync.tasks.task_protocol import SiloSlot, Task
from fedsync.train.divergence_search import DivergenceSearch
from fedsync.train.dp_sgd import private_step
from fedsync.train.dp_sgd.private_step import (
    PrivateRandom,
    SystemRandom,
    clipped_sums,
    gradients_of,
    noisy_mean,
    random_of,
)
from fedsync.train.local_trainer import BeginPace, LoopResult
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

_MOST_VALUES = 2**25
"""Values of single gradients that are computed together; they take four bytes each."""


class PrivateTrainer(Trainer):
    """Trainer with private updates; `ConfigError` if an option, layer or loss allows no gradients of single rows."""

    def __init__(self, task: Task, slot: SiloSlot, options: LocalOptions, run: PartPatterns = UNSAID) -> None:
        private_step.check_options(options)
        private_step.check_penalty(task)
        super().__init__(task, slot, options, run)
        private_step.check_layers(self._model)
        with torch.random.fork_rng():
            private_step.check_rows(task, self._model, self._samples, self._parameters)
        self._quick = GradSampleModule(self._model, strict=True)
        self._settings: PrivateSettings | None = None
        self._random: PrivateRandom = SystemRandom()
        self._rows_of: list[NDArray[np.int64]] | None = None
        self._clipping: DPOptimizer | None = None

    def make_private(self, settings: PrivateSettings) -> int:
        if settings.person_column:
            self._rows_of = _grouped(self._task.persons(self._slot, settings.person_column), self.examples)
        self._settings = settings
        if not settings.scores:
            self._measuring = Measuring((), self._device)
        unused = torch.optim.SGD(self._parameters, lr=0.0)
        self._clipping = DPOptimizer(unused, max_grad_norm=settings.clip, **private_step.CLIPPING)
        return self.examples if self._rows_of is None else len(self._rows_of)

    def find_batch_cap(self, limit_s: float = 10.0) -> int | None:
        return None

    def _train(self, order: WorkOrder, cursor: Cursor, begin: BeginPace) -> LoopResult:
        if self._settings is None or self._settings.noise is None:
            raise ConfigError("privacy", "the silo has chosen no noise yet", "Begin the run again")
        self._random = random_of(order.seed, seeded=self._settings.seeded)
        self._ordered = order.batch_size
        before = [each.detach().clone() for each in self._untrained()]
        result = super()._train(order, cursor, begin)
        self._compare(before, self._untrained(), "a buffer of the model, such as running statistics,")
        return result

    def _untrained(self) -> list[Tensor]:
        """Buffers, and parameters without a gradient that travel all the same."""
        sent = set(self.layout.names)
        others = [each for name, each in self._model.named_parameters() if name in sent and not each.requires_grad]
        return [*self._model.buffers(), *others]

    def _compare(self, before: Sequence[Tensor], after: Sequence[Tensor], what: str) -> None:
        """Raise `ConfigError` on a change; ``after`` is looked up again, as modules may bind names to other tensors."""
        if len(before) != len(after) or not all(map(_same, before, after)):
            remedy = "Use layers without running statistics, such as GroupNorm, and change weights by gradients alone"
            raise ConfigError("privacy", f"training changes {what} which has no noise", remedy)

    def _why_diverged(
        self, order: WorkOrder, base: Vector, cursor: Cursor, correction: Vector | None, loss: float | None
    ) -> Diverged:
        return DivergenceSearch().error(order.learning_rate, loss)

    def _evaluate(self, split: Split) -> Evaluation:
        """Evaluate; unless scores are public and finite, without figures that a single row can make unusable."""
        found = super()._evaluate(split)
        if self._settings is None or not self._settings.scores:
            return Evaluation(None, found.correct, found.samples)
        try:
            check_evaluation(self._name, found)
        except ProtocolError:
            return Evaluation(None, found.correct, found.samples)
        return found

    def _draw(self, order: WorkOrder, cursor: Cursor) -> Iterator[Tensor]:
        assert self._settings is not None
        units = self.examples if self._rows_of is None else len(self._rows_of)
        rate = self._settings.rate(order.batch_size)
        for _ in range(order.max_steps):
            yield torch.from_numpy(self._random.chosen(units, rate))

    def _gradients(self, rows: Tensor) -> Tensor:
        """Set the parameters' gradients to the noisy mean over units; return the mean loss of their rows."""
        assert self._settings is not None
        sums: list[Tensor] | None = None
        before = [parameter.detach().clone() for parameter in self._parameters]
        losses = torch.zeros((), device=self._device)
        for piece in torch.split(rows, self._piece) if len(rows) else ():
            loss, clipped = self._clipped(piece.numpy())
            losses += loss
            sums = clipped if sums is None else list(map(torch.add, sums, clipped))
        now = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._compare(before, now, "a parameter outside the step of the optimizer,")
        sums = sums or [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, total in zip(self._parameters, sums, strict=True):
            parameter.grad = noisy_mean(total, self._random, self._settings, self._ordered)
        penalty = private_step.penalty_of(self._task, self._model)
        if penalty is not None:
            penalty.backward()  # type: ignore[no-untyped-call]  # it adds to these gradients
        return losses / max(self._number_of_rows(rows.numpy()), 1)

    def _number_of_rows(self, units: NDArray[np.int64]) -> int:
        return len(units) if self._rows_of is None else sum(len(self._rows_of[unit]) for unit in units)

    @property
    def _piece(self) -> int:
        values = sum(parameter.numel() for parameter in self._parameters)
        return max(1, min(_MOST_VALUES // values, self._cap.largest or self.examples))

    def _clipped(self, units: NDArray[np.int64]) -> tuple[Tensor, list[Tensor]]:
        assert self._clipping is not None
        loss, of_units = self._single(units) if self._rows_of is None else self._means(self._rows_of, units)
        total = loss * self._number_of_rows(units)
        return total.nan_to_num(0.0, 0.0, 0.0), clipped_sums(self._clipping, of_units)

    def _single(self, rows: NDArray[np.int64]) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss of rows, and the gradient of each, [rows, ...] a parameter."""
        for parameter in self._parameters:  # without the hooks of zero_grad, which take time
            parameter.grad = parameter.grad_sample = None  # type: ignore[attr-defined]  # Opacus adds it
        loss = self._backward(self._samples.place(rows), 1.0)
        return loss, [gradients_of(parameter, len(rows)) for parameter in self._parameters]

    def _means(self, rows_of: list[NDArray[np.int64]], units: NDArray[np.int64]) -> tuple[Tensor, list[Tensor]]:
        """Return the mean loss of all rows of units, and the mean gradient of each unit, [units, ...] a parameter. Rows
        are added up in pieces that fit: a unit may have any number of rows.
        """
        owned = [rows_of[unit] for unit in units]
        rows, of = np.concatenate(owned), np.repeat(np.arange(len(units)), list(map(len, owned)))
        totals = [parameter.new_zeros((len(units), *parameter.shape)) for parameter in self._parameters]
        losses = torch.zeros((), device=self._device)
        for start in range(0, len(rows), self._piece):
            part = slice(start, start + self._piece)
            loss, single = self._single(rows[part])
            losses += loss * (len(rows[part]) / len(rows))
            index = torch.from_numpy(of[part]).to(self._device)
            for total, each in zip(totals, single, strict=True):
                total.index_add_(0, index, private_step.finite(each.to(total.dtype)))
        counts = torch.from_numpy(np.array(list(map(len, owned)))).to(self._device)
        return losses, [total / counts.view(-1, *[1] * (total.dim() - 1)) for total in totals]


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN, so that training that diverged is called so."""
    alike = one.is_floating_point() and (one.dtype, one.shape) == (other.dtype, other.shape)
    return torch.equal(one, other) or (alike and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))


def _grouped(persons: NDArray[np.int64], examples: int) -> list[NDArray[np.int64]]:
    if persons.shape != (examples,):
        raise ConfigError("task, persons", f"{persons.shape} numbers for {examples} rows", "Return one a training row")
    order = np.argsort(persons, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(persons[order])) + 1)
