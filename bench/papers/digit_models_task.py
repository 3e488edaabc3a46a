"""Fifteen networks of different depth, width, norms and branches on 8 x 8 digits, for `rate_growth.py`."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from fedsync import SiloData, SiloSlot, Task

MODEL = "DIGIT_MODEL"
"""Environment variable with the name of the network."""
TRAINING = 1437
WIDTH = 32


class Residual(nn.Module):
    """Two convolutions, each before a norm, and a branch around them."""

    def __init__(self, inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inputs, outputs, 3, 1, 1), norm(outputs)
        self.second, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1), norm(outputs)
        self.around = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.norm2(self.second(functional.relu(self.norm1(self.first(x)))))
        return functional.relu(inner + self.around(x))


def residual(norm: Callable[[int], nn.Module]) -> nn.Module:
    pooled = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(Residual(1, 8, norm), nn.MaxPool2d(2), Residual(8, 16, norm), *pooled)


class Vision(nn.Module):
    """A transformer on 16 patches of 2 x 2."""

    def __init__(self, blocks: int, *, norm_first: bool) -> None:
        super().__init__()
        self.patches = nn.Linear(4, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        block = (WIDTH, 4, 4 * WIDTH, 0.0)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(*block, batch_first=True, norm_first=norm_first) for _ in range(blocks))
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = functional.unfold(x, 2, stride=2).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(self.patches(patches) + self.positions).mean(1)))
        return logits


class Recurrent(nn.Module):
    """Two layers of gated recurrent units over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.units, self.head = nn.GRU(8, WIDTH, 2, batch_first=True), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.units(x[:, 0])[0][:, -1])
        return logits


def dense(hidden: int, width: int = 48, *, norms: bool = False, first: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), *([nn.LayerNorm(64)] if first else [])]
    for number in range(hidden):
        layers += [nn.Linear(width if number else 64, width), *([nn.LayerNorm(width)] if norms else []), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def convolutions(channels: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, channels), (channels, 2 * channels)):
        layers += [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2)]
    hidden = (nn.Linear(8 * channels, 4 * channels), nn.ReLU(), nn.Linear(4 * channels, 10))
    return nn.Sequential(*layers, nn.Flatten(), *hidden)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual, batch norm": lambda: residual(nn.BatchNorm2d),
    "residual, group norm": lambda: residual(lambda channels: nn.GroupNorm(4, channels)),
    "transformer, norm first": lambda: Vision(3, norm_first=True),
    "transformer, norm last": lambda: Vision(2, norm_first=False),
    "recurrent": Recurrent,
    "dense, 2 layers": lambda: dense(1),
    "dense, 4 layers": lambda: dense(3),
    "dense, 8 layers": lambda: dense(7),
    "dense, 4 layers, layer norm": lambda: dense(3, norms=True),
    "dense, 8 layers, layer norm": lambda: dense(7, norms=True),
    "dense, 4 layers, norm of inputs": lambda: dense(3, first=True),
    "dense, 3 layers of 768": lambda: dense(2, 768),
    "dense, 3 layers of 2048": lambda: dense(2, 2048),
    "dense, 6 layers of 768": lambda: dense(5, 768),
    "convolutions, 128 channels": lambda: convolutions(128),
}


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images, float32 [1797, 1, 8, 8] in 0..1, and classes, int64 [1797], in random order."""
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(5))
    return (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16)[order], torch.tensor(classes)[order]


class DigitModelsTask(Task):
    """Half of each silo's samples are a random share of all; the other half are of few neighbouring classes."""

    def model(self) -> nn.Module:
        return MODELS[os.environ[MODEL]]()

    def data(self, slot: SiloSlot) -> SiloData:
        images, classes = digits()
        mixed, rest = torch.arange(TRAINING).tensor_split(2)
        ordered = rest[torch.argsort(classes[rest], stable=True)]
        own = torch.cat([mixed.tensor_split(slot.count)[slot.index], ordered.tensor_split(slot.count)[slot.index]])
        test = TensorDataset(images[TRAINING:], classes[TRAINING:])
        return SiloData(TensorDataset(images[own], classes[own]), test)

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def score(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        logits = model(batch[0])
        return functional.cross_entropy(logits, batch[1], reduction="sum"), (
            logits.argmax(-1) == batch[1]
        ).float().sum()
