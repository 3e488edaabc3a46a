"""Tasks that train neural networks, or linear models by mini-batch SGD, on samples of a data source."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.named import BY_SCORE, classification, regression
from fedsync.extras.readers.samples import Pairs, Samples, Source, deal
from fedsync.model.table_columns import TableForm
from fedsync.policies.schema import Chosen, NonNegative, PositiveInt, register
from fedsync.tasks.partition import DEALT, Iid, Own, Partition
from fedsync.tasks.row_split import held_out
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot
from fedsync.tasks.task_section import PartOfData, Scores, ShippedTask

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

_IMAGES, _SEQUENCES, _ROWS = ("digits28", "idx", "cifar", "femnist"), ("keywords", "speech"), ("libsvm", "table")
AnyData = Annotated[Source, Chosen("data", among=("blobs", "sparse", *_ROWS, "npz", *_IMAGES, *_SEQUENCES))]

Network = Literal["lenet5", "cnn", "resnet20", "resnet32"]
Norm = Literal["group", "batch"]
LinearLoss = Literal["logistic", "hinge", "squared"]


@dataclass(frozen=True, slots=True)
class SourceTask(ShippedTask):
    """Base of tasks on samples from a source."""

    spelled: ClassVar[Mapping[str, str]] = {"source": "data", "network_name": "model", "loss_name": "loss"}

    source: AnyData
    """Source of the samples."""

    partition: Annotated[Partition | Own, Chosen("partition", among=(*DEALT, "natural", "own"))] = field(
        default_factory=Iid
    )
    """Distribution of one data set among silos."""

    test_share: PartOfData = 0.2
    """Share held out for tests, if the data have no separate test samples."""

    validation: PartOfData | None = None
    """Share of a silo's training samples that is held out to evaluate rounds; the test samples are then used only once,
    at the end. None: the test samples evaluate every round."""

    def __post_init__(self) -> None:
        if isinstance(self.partition, Own) and not self.source.paths:
            raise ValueError(
                f"partition.kind own gives every silo the same samples, for {self.source.kind} are generated; "
                "choose another partition"
            )

    @property
    def libraries(self) -> tuple[str, ...]:
        return self.source.libraries

    def relocated(self, locate: Callable[[str], str]) -> Self:
        return replace(self, source=self.source.relocated(locate))

    def samples(self) -> Source:
        """Return the source as the task reads it."""
        return self.source

    def data(self, slot: SiloSlot) -> SiloData:
        dealt = None if isinstance(self.partition, Own) else self.partition
        train, test = deal(self.samples(), dealt, self.test_share, slot)
        mine, kept = held_out(train.targets, self.validation, slot)
        validation = None if kept is None else self.dataset(train.take(kept))
        return SiloData(self.dataset(train.take(mine)), self.dataset(test), validation)

    def table(self, slot: SiloSlot) -> TableForm | None:
        table = getattr(self.source, "table", None)
        return None if table is None else table()

    def dataset(self, samples: Samples) -> TensorDataset:
        """Data set of batches; by default inputs, float32 [n, ...], and targets [n]."""
        from torch.utils.data import TensorDataset

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


@register("images")
@dataclass(frozen=True, slots=True)
class ImagesTask(_Classifier):
    """Image classification with LeNet-5, a small CNN with two convolutions, or a residual network."""

    source: Annotated[Source, Chosen("data", among=(*_IMAGES, "npz"))]
    """Source of the images."""

    network_name: Network = "lenet5"
    """Name of the network."""

    norm: Norm = "group"
    """Normalisation in ``cnn`` and the residual networks. Batch norm uses statistics of a silo's own batches, which
    differ between silos that hold different classes."""

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        from fedsync.extras.tasks.networks import image_network

        return image_network(self.network_name, self.norm, shape, classes)


@register("sequences")
@dataclass(frozen=True, slots=True)
class SequencesTask(_Classifier):
    """Classification of sequences with an LSTM."""

    source: Annotated[Source, Chosen("data", among=(*_SEQUENCES, "npz"))]
    """Source of the sequences."""

    hidden: PositiveInt = 64
    """Width of a recurrent layer."""

    layers: PositiveInt = 2
    """Number of recurrent layers."""

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        from fedsync.extras.tasks.networks import LstmClassifier

        return LstmClassifier(shape, self.hidden, self.layers, classes)


@register("mlp")
@dataclass(frozen=True, slots=True)
class MlpTask(_Classifier):
    """Classification of any data with dense layers."""

    hidden: list[PositiveInt] = field(default_factory=lambda: [64])
    """Widths of the hidden layers, first to last."""

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        from fedsync.extras.tasks.networks import dense_layers

        return dense_layers(shape, self.hidden, classes)


@register("linear")
@dataclass(frozen=True, slots=True)
class LinearTask(SourceTask):
    """Linear model, trained by mini-batch SGD. With ``squared``, accuracy is minus the mean squared error.

    ``logistic`` and ``hinge`` have one output for two classes, otherwise one output per class; ``hinge`` then compares
    with the best wrong class. ``squared`` predicts numbers: the loss is half the squared error, and the accuracy is
    minus the squared error. Penalties exclude the bias, and are part of the training loss only, not of the test loss.
    The L1 penalty, ``l1 |w|_1``, uses the subgradient: weights come close to zero, but not exactly to zero. The L2
    penalty is ``l2 / 2 |w|_2^2``. These are A-BSP's jobs (sections 3.4 and 4): LR, SVM, Lasso and RR.
    """

    loss_name: LinearLoss = "logistic"
    """Loss: ``logistic`` regression, ``hinge`` for a linear SVM, ``squared`` for lasso (with ``l1``) and ridge
    regression (with ``l2``)."""

    l1: NonNegative = 0.0
    """Strength of the L1 penalty."""

    l2: NonNegative = 0.0
    """Strength of the L2 penalty; half of it times the squared norm is added to the loss."""

    @property
    def scores(self) -> Scores:
        return "error" if self.loss_name == "squared" else "share"

    def model(self) -> nn.Module:
        shape = self.source.shape()
        if (self.loss_name == "squared") != (shape.classes == 0):
            found = "classes" if shape.classes else "numbers"
            remedy = "Write loss: logistic or hinge" if shape.classes else "Write loss: squared"
            raise ConfigError("task.loss", f"{self.loss_name} does not fit targets that are {found}", remedy)
        from fedsync.extras.tasks.networks import LinearModel

        return LinearModel(shape.features, 1 if shape.classes in (0, 2) else shape.classes)

    def dataset(self, samples: Samples) -> TensorDataset:
        import torch
        from torch.utils.data import TensorDataset

        if isinstance(samples.inputs, Pairs):
            columns, values = torch.from_numpy(samples.inputs.columns), torch.from_numpy(samples.inputs.values)
            return TensorDataset(columns, values, samples.labels())
        return SourceTask.dataset(self, samples)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        from fedsync.extras.tasks.networks import linear_losses

        *inputs, targets = batch
        loss = linear_losses(self.loss_name, model(*inputs), targets).mean()
        return self._penalised(loss, model)

    def build_by_row(self) -> LinearTask:
        return RowwiseLinearTask(*(getattr(self, each.name) for each in fields(self)))

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
        from fedsync.extras.tasks.networks import linear_losses

        loss = linear_losses(self.loss_name, outputs, targets).sum()
        if self.loss_name == "squared":
            return loss, -2 * loss
        said = outputs[:, 0] > 0 if outputs.shape[1] == 1 else outputs.argmax(dim=1)
        return loss, (said == targets).sum()


@dataclass(frozen=True, slots=True)
class RowwiseLinearTask(LinearTask):
    """Linear task of a private run: the loss excludes penalties, which belong to no row, and rows are dense, so that
    each has a gradient of its own.
    """

    dataset = SourceTask.dataset

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        from fedsync.extras.tasks.networks import linear_losses

        *inputs, targets = batch
        return linear_losses(self.loss_name, model(*inputs), targets).mean()

    def penalty(self, model: nn.Module) -> Tensor | None:
        import torch

        return self._penalised(torch.zeros(()), model) if self.l1 or self.l2 else None
