"""Handwritten digits: 1,797 images of 8 x 8, shipped with scikit-learn. Small enough to train anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from fedsync.core.errors import ConfigError
from fedsync.core.rng import Stream, derive_seed
from fedsync.tasks.partition import Partition
from fedsync.tasks.protocol import SiloData, SiloSlot, Task


@dataclass(frozen=True, slots=True)
class DigitsTask(Task):
    """Tell ten digits apart with a small convolutional network (38,282 parameters).

    Images are float32 [n, 1, 8, 8] in 0..1, labels int64 [n] in 0..9. Every silo holds the same test
    split, stratified, which no silo trains on; the rest is dealt by ``partition``.

    Args:
        partition: how training samples are dealt to silos.
        test_share: share of all samples in the test split, between 0 and 1.

    Raises:
        ConfigError: ``test_share`` is out of range, or scikit-learn is not installed.
    """

    partition: Partition
    test_share: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.test_share < 1:
            raise ConfigError("task.test_share", f"{self.test_share} is not between 0 and 1", "Write, for example, 0.2")

    def model(self) -> nn.Module:
        """Two convolutions and two dense layers; no batch norm, whose statistics silos would disagree on."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def data(self, slot: SiloSlot) -> SiloData:
        """Images and labels of one silo. Raises `ConfigError` where the partition cannot be made."""
        images, labels = _digits()
        train, test = self._split(labels, slot.seed)
        part = train[self.partition.split(labels[train], slot.count, slot.seed)[slot.index]]
        return SiloData(_select(images, labels, part), _select(images, labels, test))

    def _split(self, labels: NDArray[np.int64], seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        from sklearn.model_selection import train_test_split

        try:
            train, test = train_test_split(
                np.arange(len(labels)),
                test_size=self.test_share,
                stratify=labels,
                random_state=derive_seed(seed, Stream.SPLIT) % 2**32,
            )
        except ValueError as error:
            raise ConfigError(
                "task.test_share", f"{self.test_share} leaves a split without some digit", "Write, for example, 0.2"
            ) from error
        return np.sort(train), np.sort(test)


@cache
def _digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """All images, float32 [1797, 1, 8, 8], and labels, int64 [1797]. Read once a process."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "task.kind", "scikit-learn, which ships the digits, is not installed", 'pip install "fedsync[sim]"'
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    return (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64)


def _select(images: NDArray[np.float32], labels: NDArray[np.int64], rows: NDArray[np.int64]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(images[rows]), torch.from_numpy(labels[rows]))
