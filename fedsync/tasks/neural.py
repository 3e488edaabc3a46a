"""Tasks on samples from a source: neural networks, and linear models by mini-batch SGD."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.named import BY_SCORE, classification, regression
from fedsync.model.table_columns import TableForm
from fedsync.policies.schema import NonNegative, PositiveInt
from fedsync.tasks.networks import LstmClassifier, Network, Norm, image_network
from fedsync.tasks.partition import Partition
from fedsync.tasks.samples import Pairs, Samples, Source, deal, held_out
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot, Task


@dataclass(frozen=True, slots=True)
class SourceTask(Task):
    """Task on samples from a source; ``partition`` is None if each silo reads its own samples."""

    source: Source
    partition: Partition | None
    test_share: float = 0.2
    validation: float | None = None

    def data(self, slot: SiloSlot) -> SiloData:
        train, test = deal(self.source, self.partition, self.test_share, slot)
        mine, kept = held_out(train.targets, self.validation, slot)
        validation = None if kept is None else self.dataset(train.take(kept))
        return SiloData(self.dataset(train.take(mine)), self.dataset(test), validation)

    def table(self, slot: SiloSlot) -> TableForm | None:
        table = getattr(self.source, "table", None)
        return None if table is None else table()

    def dataset(self, samples: Samples) -> TensorDataset:
        """Data set of batches; by default inputs, float32 [n, ...], and targets [n]."""
        return TensorDataset(samples.dense(), samples.labels())


class _Classifier(SourceTask):
    """Network with one logit per class."""

    def model(self) -> nn.Module:
        shape = self.source.shape()
        if shape.classes < 2:
            raise ConfigError("task.data", "there are no classes to tell apart", "Choose data with two or more classes")
        return self.network(shape.inputs, shape.classes)

    def metrics(self) -> tuple[AnyMetric, ...]:
        return classification(self.source.shape().classes)

    @abstractmethod
    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module: ...


@dataclass(frozen=True, slots=True)
class ImagesTask(_Classifier):
    """Classifier of images; ``norm`` applies to ``cnn`` and the residual networks."""

    network_name: Network = "lenet5"
    norm: Norm = "group"

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return image_network(self.network_name, self.norm, shape, classes)


@dataclass(frozen=True, slots=True)
class SequencesTask(_Classifier):
    """Classifier of sequences with an LSTM; ``hidden`` is the width of an LSTM layer."""

    hidden: PositiveInt = 64
    layers: PositiveInt = 2

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return LstmClassifier(shape, self.hidden, self.layers, classes)


@dataclass(frozen=True, slots=True)
class MlpTask(_Classifier):
    """Classifier of inputs of any shape with dense layers and ReLU; ``hidden``: widths of the hidden layers."""

    hidden: tuple[int, ...] = (64,)

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), *_dense([prod(shape), *self.hidden, classes]))


def _dense(widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.ReLU(), nn.Linear(before, after)]
    return layers[1:]


LinearLoss = Literal["logistic", "hinge", "squared"]


class LinearModel(nn.Module):
    """Linear map ``inputs @ weight + bias``, for dense or sparse rows.

    Starts at zero: the losses are convex, so a random start has no advantage.
    """

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Outputs [n, outputs] of rows [n, features], or of columns [n, k] and values [n, k]."""
        if len(inputs) == 1:
            return inputs[0].flatten(1) @ self.weight + self.bias
        columns, values = inputs
        return (self.weight[columns] * values[:, :, None]).sum(dim=1) + self.bias


@dataclass(frozen=True, slots=True)
class LinearTask(SourceTask):
    """Linear model with the loss ``logistic``, ``hinge`` or ``squared``.

    ``logistic`` and ``hinge`` have one output for two classes, otherwise one output per class; ``hinge`` then compares
    with the best wrong class. ``squared`` predicts numbers: the loss is half the squared error, and the accuracy is
    minus the squared error. Penalties exclude the bias, and are part of the training loss only, not of the test loss.
    The L1 penalty, ``l1 |w|_1``, uses the subgradient: weights come close to zero, but not exactly to zero. The L2
    penalty is ``l2 / 2 |w|_2^2``. These are A-BSP's jobs (sections 3.4 and 4): LR, SVM, Lasso and RR.
    """

    loss_name: LinearLoss = "logistic"
    l1: NonNegative = 0.0
    l2: NonNegative = 0.0
    by_row: bool = False
    """The loss excludes penalties, which belong to no row; rows are dense, so that each has a gradient of its own."""

    def model(self) -> nn.Module:
        shape = self.source.shape()
        if (self.loss_name == "squared") != (shape.classes == 0):
            found = "classes" if shape.classes else "numbers"
            remedy = "Write loss: logistic or hinge" if shape.classes else "Write loss: squared"
            raise ConfigError("task.loss", f"{self.loss_name} does not fit targets that are {found}", remedy)
        return LinearModel(shape.features, 1 if shape.classes in (0, 2) else shape.classes)

    def dataset(self, samples: Samples) -> TensorDataset:
        if isinstance(samples.inputs, Pairs) and not self.by_row:
            columns, values = torch.from_numpy(samples.inputs.columns), torch.from_numpy(samples.inputs.values)
            return TensorDataset(columns, values, samples.labels())
        return TensorDataset(samples.dense(), samples.labels())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        *inputs, targets = batch
        loss = self._losses(model(*inputs), targets).mean()
        return loss if self.by_row else self._penalised(loss, model)

    def penalty(self, model: nn.Module) -> Tensor | None:
        return self._penalised(torch.zeros(()), model) if self.l1 or self.l2 else None

    def _penalised(self, loss: Tensor, model: nn.Module) -> Tensor:
        weight = model.get_parameter("weight")
        if self.l1:
            loss = loss + self.l1 * weight.abs().sum()
        if self.l2:
            loss = loss + self.l2 / 2 * weight.square().sum()
        return loss

    def predict(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        *inputs, targets = batch
        return model(*inputs), targets

    def metrics(self) -> tuple[AnyMetric, ...]:
        """Metrics of numbers or of classes; without score metrics for ``hinge``, whose margin is no probability."""
        if self.loss_name == "squared":
            return regression()
        found = classification(self.source.shape().classes)
        return found if self.loss_name == "logistic" else tuple(m for m in found if m.name not in BY_SCORE)

    def assess(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Summed loss without penalties, and the number correct or minus the summed squared error."""
        loss = self._losses(outputs, targets).sum()
        if self.loss_name == "squared":
            return loss, -2 * loss
        said = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(dim=1)
        return loss, (said == targets).sum()

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.loss_name == "squared":
            return (outputs[:, 0] - targets).square() / 2
        if outputs.shape[1] == 1:
            # Margin: signed distance to the decision border, with classes as -1 and 1.
            margin = outputs[:, 0] * (2 * targets - 1)
            return nn.functional.softplus(-margin) if self.loss_name == "logistic" else torch.relu(1 - margin)
        if self.loss_name == "logistic":
            return nn.functional.cross_entropy(outputs, targets, reduction="none")
        right = outputs.gather(1, targets[:, None])
        wrong = outputs.scatter(1, targets[:, None], -torch.inf).amax(dim=1)
        return torch.relu(1 + wrong - right[:, 0])
