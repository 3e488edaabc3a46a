"""Networks for images and sequences: LeNet-5, residual networks, a small network, and an LSTM."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from fedsync.common.errors import ConfigError

Norm = Literal["group", "batch"]
Network = Literal["lenet5", "cnn", "resnet20", "resnet32"]

_GROUPS = 4
_LENET_SIDE = 32
_BLOCKS = {"resnet20": 3, "resnet32": 5}


def image_network(name: Network, norm: Norm, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Make a network for inputs of ``shape`` (channels, height, width); ``norm`` has no effect on LeNet-5.

    Group norm's statistics describe the sample, batch norm's the silo's batches: silos with different classes disagree
    about them, and their average fits no silo. Raises `ConfigError` if the inputs are not images, or too small.
    """
    if len(shape) != 3 or min(shape[1:]) < 4:
        raise ConfigError("task.data", f"inputs of shape {shape} are no images", "Choose data of (channels, 4+, 4+)")
    if name == "lenet5":
        return lenet5(shape, classes)
    return small_cnn(norm, shape, classes) if name == "cnn" else ResNet(_BLOCKS[name], norm, shape[0], classes)


def lenet5(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5: two convolutions and three dense layers; 61,706 parameters for one channel and ten classes.

    Uses ReLU and max pooling, as is common today, instead of the original's squashing function and trained means.
    Images smaller than 32 x 32 are padded to this size, as in the original.

    Source: LeCun et al. 1998, Gradient-based learning applied to document recognition, section II.B; LB-BSP,
    section 5.5.
    """
    channels, height, width = shape
    margins = [max(0, _LENET_SIDE - width), max(0, _LENET_SIDE - height)]
    border = [side for margin in margins for side in (margin // 2, margin - margin // 2)]
    last = [((max(side, _LENET_SIDE) - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        nn.ZeroPad2d((border[0], border[1], border[2], border[3])),
        nn.Conv2d(channels, 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * last[0] * last[1], 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def small_cnn(norm: Norm, shape: tuple[int, ...], classes: int) -> nn.Module:
    channels, height, width = shape
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        _norm(norm, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        _norm(norm, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), classes),
    )


class ResNet(nn.Module):
    """Residual network of 6 ``blocks`` + 2 layers for small images: 20 layers with 3 blocks per stage, 32 with 5.

    Three stages of 16, 32 and 64 channels; the second and third start with a stride of 2. Shortcuts have no parameters:
    they drop every second pixel and add channels of zeros.

    Source: He et al. 2016, arXiv:1512.03385, section 4.2 (option A).
    """

    def __init__(self, blocks: int, norm: Norm, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), _norm(norm, 16), nn.ReLU())
        widths = [16] * blocks + [32] * blocks + [64] * blocks
        before = [16, *widths[:-1]]
        self.blocks = nn.Sequential(*(_Block(old, new, norm) for old, new in zip(before, widths, strict=True)))
        self.head = nn.Linear(64, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, height, width]."""
        features: Tensor = self.blocks(self.stem(images))
        logits: Tensor = self.head(features.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Residual block: the input is added to the output of two convolutions."""

    def __init__(self, before: int, after: int, norm: Norm) -> None:
        super().__init__()
        self.stride = 1 if before == after else 2
        self.added = after - before
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=self.stride, padding=1, bias=False),
            _norm(norm, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            _norm(norm, after),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features [n, after, height / stride, width / stride]."""
        shortcut = features[:, :, :: self.stride, :: self.stride]
        shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, self.added // 2, self.added - self.added // 2))
        return torch.relu(shortcut + self.body(features))


def _norm(norm: Norm, channels: int) -> nn.Module:
    return nn.GroupNorm(_GROUPS, channels) if norm == "group" else nn.BatchNorm2d(channels)


class LstmClassifier(nn.Module):
    """LSTM layers, and a dense layer on the last layer's output at the end of the sequence.

    ``shape`` is (frames, features); raises `ConfigError` for other shapes.

    Source: LB-BSP, section 5.5 (two recurrent layers).
    """

    def __init__(self, shape: tuple[int, ...], hidden: int, layers: int, classes: int) -> None:
        super().__init__()
        if len(shape) != 2:
            problem = f"inputs of shape {shape} are no sequences"
            raise ConfigError("task.data", problem, "Choose data of (frames, features)")
        self.recurrent = nn.LSTM(shape[1], hidden, num_layers=layers, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, sequences: Tensor) -> Tensor:
        """Logits [n, classes] of sequences [n, frames, features]."""
        states, _ = self.recurrent(sequences)
        logits: Tensor = self.head(states[:, -1])
        return logits
