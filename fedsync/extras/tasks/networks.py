"""PyTorch models of the shipped tasks: LeNet-5, residual networks, a small network, LSTM, dense layers, linear map."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from fedsync.common.errors import ConfigError

_GROUPS = 4
_LENET_SIDE = 32
_BLOCKS = {"resnet20": 3, "resnet32": 5}


def image_network(name: str, norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
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


def small_cnn(norm: str, shape: tuple[int, ...], classes: int) -> nn.Module:
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

    def __init__(self, blocks: int, norm: str, channels: int, classes: int) -> None:
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

    def __init__(self, before: int, after: int, norm: str) -> None:
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


def _norm(norm: str, channels: int) -> nn.Module:
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


def dense_layers(shape: Sequence[int], hidden: Sequence[int], classes: int) -> nn.Module:
    """Dense layers with ReLU between them, for inputs of any shape; ``hidden``: widths of the hidden layers."""
    layers: list[nn.Module] = []
    for before, after in pairwise([prod(shape), *hidden, classes]):
        layers += [nn.ReLU(), nn.Linear(before, after)]
    return nn.Sequential(nn.Flatten(), *layers[1:])


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


def linear_losses(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Loss of each sample, [n], without penalties."""
    if name == "squared":
        return (outputs[:, 0] - targets).square() / 2
    if outputs.shape[1] == 1:
        # Margin: signed distance to the decision border, with classes as -1 and 1.
        margin = outputs[:, 0] * (2 * targets - 1)
        return nn.functional.softplus(-margin) if name == "logistic" else torch.relu(1 - margin)
    if name == "logistic":
        return nn.functional.cross_entropy(outputs, targets, reduction="none")
    right = outputs.gather(1, targets[:, None])
    wrong = outputs.scatter(1, targets[:, None], -torch.inf).amax(dim=1)
    return torch.relu(1 + wrong - right[:, 0])
