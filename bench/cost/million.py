"""A task with a million parameters on little data: large messages, little computation."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task


class Million(Task):
    """A dense network of 1,005,039 parameters on random classes."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(64, 900), nn.ReLU(), nn.Linear(900, 1039), nn.ReLU(), nn.Linear(1039, 10))

    def data(self, slot: SiloSlot) -> SiloData:
        generator = torch.Generator().manual_seed(slot.seed + slot.index)
        labels = torch.randint(0, 10, (600,), generator=generator)
        inputs = torch.randn(600, 64, generator=generator) + nn.functional.one_hot(labels, 64)
        return SiloData(TensorDataset(inputs[:500], labels[:500]), TensorDataset(inputs[500:], labels[500:]))
