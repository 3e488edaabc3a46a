"""A model of any size whose training costs almost nothing: large messages, little computation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task

TENSOR = 1_000_000
"""Values in a tensor: 4 MB."""


def sizes(parameters: int) -> Iterator[int]:
    """Lengths of the tensors of a model of so many parameters."""
    while parameters > 0:
        yield min(parameters, TENSOR)
        parameters -= TENSOR


class _Wide(nn.Module):
    """A linear classifier, and tensors of which it adds one value each, so that all that may have a gradient have one.

    Args:
        parameters: of all.
        frozen: how many have no gradient; they are bfloat16, as a language model is loaded.
    """

    def __init__(self, parameters: int, frozen: int) -> None:
        super().__init__()
        self.head = nn.Linear(8, 2)
        beside = frozen + sum(each.numel() for each in self.head.parameters())
        self.body = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes(parameters - beside))
        for size in sizes(frozen):
            self.body.append(nn.Parameter(torch.randn(size).bfloat16(), requires_grad=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        moved: torch.Tensor = self.head(inputs) + torch.stack([each[0].float() for each in self.body]).sum()
        return moved


class Large(Task):
    """Two classes of eight random features.

    Args:
        parameters: of the model.
        frozen: of them, how many do not train, and do not travel.
    """

    def __init__(self, parameters: int, frozen: int = 0) -> None:
        self._parameters = parameters
        self._frozen = frozen

    def model(self) -> nn.Module:
        return _Wide(self._parameters, self._frozen)

    def data(self, slot: SiloSlot) -> SiloData:
        generator = torch.Generator().manual_seed(slot.seed + slot.index)
        inputs = torch.randn(32, 8, generator=generator)
        labels = (inputs[:, 0] > 0).long()
        return SiloData(TensorDataset(inputs[:24], labels[:24]), TensorDataset(inputs[24:], labels[24:]))
