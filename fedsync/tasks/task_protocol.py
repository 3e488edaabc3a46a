"""What is trained: a model, one silo's data, a loss and a score. The only thing a user writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.survey.table_sums import Columns
from fedsync.model.table_columns import TableForm
from fedsync.model.tensor_parts import PartPatterns

Batch = Any
"""What `Task.collate` makes of the samples of one batch, on the model's device."""


@dataclass(frozen=True, slots=True)
class SiloSlot:
    """Which share of the data a silo holds.

    Args:
        name: of the silo; unique within a run.
        index: its place among the silos, ``0 <= index < count``.
        count: number of silos.
        seed: of the run; the same for every silo.
    """

    name: str
    index: int
    count: int
    seed: int


@dataclass(frozen=True, slots=True)
class SiloData:
    """One silo's samples. Map-style: ``len(dataset)`` and ``dataset[i]``.

    A `torch.utils.data.TensorDataset` is moved to the device once and cut by index, unless the task collates in its
    own way. Anything else is read batch by batch if it has ``__getitems__``, else sample by sample, and collated.

    Args:
        train: samples to train on.
        test: samples to evaluate on; may be empty.
        validation: samples to evaluate on while the run goes on; the test split is then evaluated when all is decided.
            None or empty: the silo evaluates on its test split in every round.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    validation: Dataset[Any] | None = None


class Task(ABC):
    """Model, data and metrics of one training problem.

    The defaults of `loss` and `score` fit classification: a batch is ``(inputs, labels)`` and the model
    returns one logit a class. Override both for anything else. A task draws random numbers from torch
    only: its generator is seeded around every call, others are not.
    """

    @abstractmethod
    def model(self) -> nn.Module:
        """A fresh model on the CPU. The caller seeds torch, so that all silos build the same one."""

    @abstractmethod
    def data(self, slot: SiloSlot) -> SiloData:
        """The samples of the silo ``slot``. A function of the slot: two calls give the same samples."""

    def columns(self, slot: SiloSlot) -> Columns | None:
        """What a survey of all silos' columns adds up: the training rows of the silo ``slot``. Default: nothing."""
        return None

    def table(self, slot: SiloSlot) -> TableForm | None:
        """The columns that features come from, which must be the same at all silos; called after `data`.

        Default: there is no table.
        """
        return None

    def parts(self) -> PartPatterns:
        """Which tensors of the model travel, and which stay at their silo.

        Default: all that is trained travels, and all buffers.
        """
        return PartPatterns()

    def collate(self, samples: list[Any]) -> Batch:
        """A batch of samples, whose tensors, in dicts, lists and tuples too, go to the device.

        Default: `torch.utils.data.default_collate`.
        """
        return default_collate(samples)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the batch, a scalar to differentiate. Default: cross-entropy."""
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)

    def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and number of correct predictions over the batch, both scalars.

        Sums, not means, so that batches and silos can be pooled. Default: `assess` of what the model predicts.
        """
        return self.assess(*self.predict(model, batch))

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs for the batch, and what is true, as `metrics` are measured. Default: those of inputs, and labels."""
        inputs, labels = batch
        return model(inputs), labels

    def assess(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """As `score`, of what `predict` returned: one pass for both and `metrics`. Default: cross-entropy, arg max."""
        loss = nn.functional.cross_entropy(outputs, targets, reduction="sum")
        return loss, (torch.argmax(outputs, dim=1) == targets).sum()

    def metrics(self) -> tuple[AnyMetric, ...]:
        """What is measured of `predict` at every evaluation, beside loss and score; see `fedsync.tasks.metrics`.

        Default: nothing. Shipped tasks with classes have accuracy, balanced accuracy and F1, and of two classes what
        follows from scores; those that predict numbers have MAE, RMSE and R2.
        """
        return ()
