"""Classification of handwritten digits: 1,797 images of 8 x 8, shipped with scikit-learn; trains anywhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, not_installed
from fedsync.common.rng import Stream, derive_seed
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.named import classification
from fedsync.policies.schema import Chosen, register
from fedsync.tasks.partition import DEALT, Iid, Partition, Rows
from fedsync.tasks.row_split import held_out
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.tasks.task_section import PartOfData, ShippedTask

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import TensorDataset


@register("digits")
@dataclass(frozen=True, slots=True)
class DigitsTask(ShippedTask):
    """Scikit-learn's 1,797 handwritten digits and a small CNN.

    The network has 10,026 parameters. Images are float32 [n, 1, 8, 8] in 0..1, labels int64 [n] in 0..9. All silos
    share one stratified test split, which no silo trains on; ``partition`` divides the rest. A digit that no silo
    trains on is left out of the test split. Raises `ConfigError` if scikit-learn is not installed.
    """

    libraries: ClassVar[tuple[str, ...]] = ("sklearn.datasets", "sklearn.model_selection")

    partition: Annotated[Partition, Chosen("partition", among=DEALT)] = field(default_factory=Iid)
    """Distribution of the digits among silos."""

    test_share: PartOfData = 0.2
    """Share of all samples that is held out for tests."""

    validation: PartOfData | None = None
    """Share of a silo's training samples that is held out to evaluate rounds; the test samples are then used only once,
    at the end. None: the test samples evaluate every round."""

    def model(self) -> nn.Module:
        """Two convolutions and a dense layer. Group norm keeps training stable if silos hold different classes; the
        statistics of batch norm would describe the silo, not the model.
        """
        from torch import nn

        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 10),
        )

    def metrics(self) -> tuple[AnyMetric, ...]:
        return classification(10)

    def data(self, slot: SiloSlot) -> SiloData:
        images, labels = _digits()
        parts, test = _split(self.partition, self.test_share, slot.count, slot.seed)
        part = parts[slot.index]
        mine, kept = held_out(labels[part], self.validation, slot)
        validation = None if kept is None else _select(images, labels, part[kept])
        return SiloData(_select(images, labels, part[mine]), _select(images, labels, test), validation)


@lru_cache(maxsize=4)
def _split(partition: Partition, test_share: float, count: int, seed: int) -> tuple[list[Rows], Rows]:
    """Rows of each silo's training part, and of the test split; cached, as a simulation asks once per silo."""
    from sklearn.model_selection import train_test_split

    _, labels = _digits()
    try:
        train, test = train_test_split(
            np.arange(len(labels)),
            test_size=test_share,
            stratify=labels,
            random_state=derive_seed(seed, Stream.SPLIT) % 2**32,
        )
    except ValueError as error:
        problem = f"{test_share} leaves a digit out of one of the two splits: {error}"
        raise ConfigError("task.test_share", problem, "Write, for example, 0.2") from error
    train, test = np.sort(train), np.sort(test)
    parts = [train[part] for part in partition.split(labels[train], count, seed)]
    held = np.unique(labels[np.concatenate(parts)])
    return parts, test[np.isin(labels[test], held)]


@cache
def _digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All images, float32 [1797, 1, 8, 8], and labels, int64 [1797]; read once per process."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise not_installed("task.kind", "scikit-learn, which ships the digits,", "sim") from error
    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)


def _select(images: NDArray[np.float32], labels: NDArray[np.int64], rows: NDArray[np.int64]) -> TensorDataset:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.from_numpy(images[rows]), torch.from_numpy(labels[rows]))
