"""Classification by neural networks: of images, of sequences, and of any inputs by dense layers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from torch import nn
from torch.utils.data import TensorDataset

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.named import classification
from fedsync.model.table_columns import TableForm
from fedsync.policies.schema import PositiveInt
from fedsync.tasks.limits import at_least, check_bounds
from fedsync.tasks.networks.convolutional import Network, Norm, image_network
from fedsync.tasks.networks.lstm_classifier import LstmClassifier
from fedsync.tasks.partition import Partition
from fedsync.tasks.samples import Samples, Source, check_shares, deal, held_out
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task


@dataclass(frozen=True, slots=True)
class SourceTask(Task):
    """Task on samples from a source; ``partition`` is None if each silo reads its own samples.

    Raises:
        ConfigError: an option is out of range; later, errors of the source.
    """

    source: Source
    partition: Partition | None
    test_share: float = 0.2
    validation: float | None = None

    def __post_init__(self) -> None:
        check_shares(self.test_share, self.validation)
        check_bounds(self)

    def data(self, slot: SiloSlot) -> SiloData:
        """Samples of one silo; raises `ConfigError` if they cannot be read or divided."""
        train, test = deal(self.source, self.partition, self.test_share, slot)
        mine, kept = held_out(train.targets, self.validation, slot)
        validation = None if kept is None else self.dataset(train.take(kept))
        return SiloData(self.dataset(train.take(mine)), self.dataset(test), validation)

    def table(self, slot: SiloSlot) -> TableForm | None:
        """Columns of the source, if it is a table."""
        table = getattr(self.source, "table", None)
        return None if table is None else table()

    def dataset(self, samples: Samples) -> TensorDataset:
        """Data set of batches; by default inputs, float32 [n, ...], and targets [n]."""
        return TensorDataset(samples.dense(), samples.labels())


class _Classifier(SourceTask):
    """Network with one logit per class."""

    __slots__ = ()

    def model(self) -> nn.Module:
        shape = self.source.shape()
        if shape.classes < 2:
            raise ConfigError("task.data", "there are no classes to tell apart", "Choose data with two or more classes")
        return self.network(shape.inputs, shape.classes)

    def metrics(self) -> tuple[AnyMetric, ...]:
        return classification(self.source.shape().classes)

    @abstractmethod
    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """Make a new network for inputs of this shape."""


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

    def __post_init__(self) -> None:
        _Classifier.__post_init__(self)
        at_least("task.hidden", min(self.hidden, default=1), 1)

    def network(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), *_dense([prod(shape), *self.hidden, classes]))


def _dense(widths: Sequence[int]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.ReLU(), nn.Linear(before, after)]
    return layers[1:]
