"""Interface of tasks: a model, one silo's data, a loss and a score. A user's own task needs no other interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.survey.table_sums import Columns
from fedsync.model.table_columns import TableForm
from fedsync.model.tensor_parts import PartPatterns

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import Dataset

Batch = Any
"""Result of `Task.collate` for the samples of one batch, on the model's device."""


@dataclass(frozen=True, slots=True)
class SiloSlot:
    """Identity of a silo, which selects its share of the data.

    Args:
        name: name of the silo, unique within a run.
        index: position among the silos, ``0 <= index < count``.
        count: number of silos.
        seed: seed of the run, equal for every silo.
    """

    name: str
    index: int
    count: int
    seed: int


@dataclass(frozen=True, slots=True)
class SiloData:
    """Samples of one silo, as map-style data sets: ``len(dataset)`` and ``dataset[i]``.

    A `torch.utils.data.TensorDataset` is moved to the device once and cut by index, unless the task has its own
    `collate`. Other data sets are read batch by batch if they have ``__getitems__``, else sample by sample, and
    collated.

    Args:
        train: samples to train on.
        test: samples to evaluate on; may be empty.
        validation: samples to evaluate on during the run; the test split is then evaluated only at the end. None or
            empty: the silo evaluates on its test split in every round.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    validation: Dataset[Any] | None = None


class Task(ABC):
    """Model, data and metrics of one training problem.

    The defaults of `loss` and `score` fit classification: a batch is ``(inputs, labels)`` and the model returns one
    logit per class. Override both for other problems. Draw random numbers from torch only: FedSync seeds torch's
    generator around every call, but no other generator.
    """

    @abstractmethod
    def model(self) -> nn.Module:
        """Make a new model on the CPU. The caller seeds torch, so that all silos build the same model."""

    @abstractmethod
    def data(self, slot: SiloSlot) -> SiloData:
        """Samples of the silo ``slot``; two calls with the same slot must give the same samples."""

    def columns(self, slot: SiloSlot) -> Columns | None:
        """Training rows of the silo ``slot`` for a survey of all silos' columns. Default: None."""
        return None

    def table(self, slot: SiloSlot) -> TableForm | None:
        """Columns behind the features, which must be equal at all silos; called after `data`. Default: None."""
        return None

    def persons(self, slot: SiloSlot, column: str) -> NDArray[np.int64]:
        """Number of the person behind each training sample, int64 [n]; ``column`` is the owner's ``person_column``.
        Default: `ConfigError`, so that no run counts a person's samples as different persons'.
        """
        problem = "the task does not tell which samples are of one person"
        raise ConfigError("task, persons", problem, "Define persons(slot, column) in the task, or write unit: example")

    def parts(self) -> PartPatterns:
        """Patterns of tensors that travel, and that stay at the silo. Default: trained tensors and buffers travel."""
        return PartPatterns()

    def collate(self, samples: list[Any]) -> Batch:
        """Make a batch of samples; tensors in it move to the device. Default: `torch.utils.data.default_collate`."""
        from torch.utils.data import default_collate

        return default_collate(samples)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss over the batch, a scalar to differentiate. Default: cross-entropy."""
        from torch.nn.functional import cross_entropy

        inputs, labels = batch
        return cross_entropy(model(inputs), labels)

    def penalty(self, model: nn.Module) -> Tensor | None:
        """Terms of a private run's loss that depend on no sample: their gradient needs no noise. Default: None."""
        return None

    def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss and number of correct predictions over the batch, both scalars: sums, not means, so that batches
        and silos can be pooled. Default: `assess` of `predict`.
        """
        return self.assess(*self.predict(model, batch))

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Outputs and true values for `assess` and `metrics`. Default: the model's outputs for inputs, and labels."""
        inputs, labels = batch
        return model(inputs), labels

    def assess(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Score the result of `predict`, as `score` does.

        Default: cross-entropy and arg max. If a sample has several labels, or none (-100), the means over known labels
        stand for each sample.
        """
        loss, right, labels, _ = label_sums(outputs, targets)
        samples_a_label = len(targets) / labels.clamp(min=1)
        return loss * samples_a_label, right * samples_a_label

    def metrics(self) -> tuple[AnyMetric, ...]:
        """Metrics of `predict` at each evaluation, beside loss and score; see `fedsync.tasks.metrics`. Default: ()."""
        return ()


def label_sums(outputs: Tensor, targets: Tensor) -> list[Tensor]:
    """Cross-entropy and number of correct predictions over known labels, number of known labels, and number of samples
    that have some; all scalars. Labels below 0 are unknown.
    """
    from torch.nn.functional import cross_entropy

    known = targets >= 0
    loss, right = cross_entropy(outputs, targets, reduction="sum"), (outputs.argmax(dim=1) == targets).sum()
    return [loss, right, known.sum(), known.reshape(len(known), -1).any(dim=1).sum()]
