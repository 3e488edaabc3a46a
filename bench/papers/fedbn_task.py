"""Digits whose features differ from silo to silo, and a network with batch norm, for `fedbn.py`."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync import SiloData, SiloSlot, Task
from fedsync.common.rng import Stream, generator

TEST = 0.25


class Normed(nn.Sequential):
    """Two convolutions and a dense layer, each with batch norm, on images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        layers = {
            "conv1": nn.Conv2d(1, 16, 3, padding=1), "norm1": nn.BatchNorm2d(16), "relu1": nn.ReLU(),
            "pool1": nn.MaxPool2d(2),
            "conv2": nn.Conv2d(16, 32, 3, padding=1), "norm2": nn.BatchNorm2d(32), "relu2": nn.ReLU(),
            "pool2": nn.MaxPool2d(2), "flat": nn.Flatten(),
            "dense": nn.Linear(128, 64), "norm3": nn.BatchNorm1d(64), "relu3": nn.ReLU(),
            "out": nn.Linear(64, 10),
        }  # fmt: skip
        for name, layer in layers.items():
            self.add_module(name, layer)


def shifted(images: Tensor, kind: int, texture: Tensor) -> Tensor:
    """Images as one of five scanners gives them; pixels were in 0..1.

    Args:
        images: float32 [n, 1, 8, 8].
        kind: of the scanner, 0..4.
        texture: what the last one has on its glass, float32 [8, 8].
    """
    match kind:
        case 0:
            return images
        case 1:
            return 1 - images
        case 2:
            return 0.2 * images + 0.7
        case 3:
            return 3 * images - 2
    return images + texture


class ShiftedDigits(Task):
    """Every silo has the same share of each class, as another scanner gives it.

    Args:
        shift: whether scanners differ; without, silos are alike.
    """

    def __init__(self, shift: bool = True) -> None:
        self.shift = shift

    def model(self) -> nn.Module:
        return Normed()

    def data(self, slot: SiloSlot) -> SiloData:
        images, labels = load_digits(return_X_y=True)
        order = generator(slot.seed, Stream.PARTITION).permutation(len(labels))[slot.index :: slot.count]
        inputs = torch.from_numpy(images[order]).float().view(-1, 1, 8, 8) / 16
        targets = torch.from_numpy(labels[order])
        texture = torch.from_numpy(generator(slot.seed, Stream.PARTITION, "glass").normal(size=(8, 8))).float()
        inputs = shifted(inputs, slot.index % 5 if self.shift else 0, texture)
        cut = int(len(order) * TEST)
        return SiloData(TensorDataset(inputs[cut:], targets[cut:]), TensorDataset(inputs[:cut], targets[:cut]))
