"""The task: model and data of a run. Change the places marked CHANGE, and keep the rest.

FedSync runs this file at every silo, and once at the server to get the model's shapes. The file is never sent: each
party keeps its own copy, at the same path.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync import ConfigError, SiloData, SiloSlot, Task

# CHANGE: numbers per sample, and number of classes.
READINGS = 32
STATES = 4
TEST_SHARE = 0.2


class MachineTask(Task):
    """Classifier of machine states: four classes, from a window of vibration readings.

    The arguments are the ``options`` of ``task`` in strategy.yaml.

    Args:
        file: this silo's own data, in this file's folder; "" generates data.
        samples: number of generated samples per silo.
    """

    def __init__(self, file: str = "", samples: int = 400) -> None:
        self.file = file
        self.samples = samples

    def model(self) -> nn.Module:
        """CHANGE: any network. FedSync seeds torch before the call, so that all silos start with the same weights."""
        return nn.Sequential(nn.Linear(READINGS, 64), nn.ReLU(), nn.Linear(64, STATES))

    def data(self, slot: SiloSlot) -> SiloData:
        """This silo's samples. Return the same samples at every call: the silo remembers its position in them."""
        inputs, labels = self._read() if self.file else self._make_up(slot)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(slot.seed))
        test, train = order.tensor_split([round(TEST_SHARE * len(labels))])
        return SiloData(TensorDataset(inputs[train], labels[train]), TensorDataset(inputs[test], labels[test]))

    # The defaults are a classifier's loss and score: cross-entropy, and the share of correct predictions. To change
    # them, for example to predict numbers, write `loss(self, model, batch)` and `score(self, model, batch)`.

    def _read(self) -> tuple[Tensor, Tensor]:
        """CHANGE: read the data on this silo's machine; here, a file of `np.savez(file, inputs=..., labels=...)`."""
        path = Path(__file__).parent / self.file
        if not path.is_file():
            raise ConfigError("task.options.file", f"{path} does not exist", "Put this silo's data there")
        with np.load(path) as arrays:
            inputs, labels = arrays["inputs"].astype(np.float32), arrays["labels"].astype(np.int64)
        if inputs.shape != (len(labels), READINGS) or not np.isfinite(inputs).all():
            problem = f"inputs of {path} are {inputs.shape} for {len(labels)} labels, or not all of them are numbers"
            raise ConfigError("task.options.file", problem, f"Save rows of {READINGS} finite numbers, one a label")
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def _make_up(self, slot: SiloSlot) -> tuple[Tensor, Tensor]:
        """Data for trials: each state has its own frequency, and each silo has more samples of one of the states."""
        generator = torch.Generator().manual_seed((1000 * slot.seed + slot.index) % 2**63)
        labels = torch.randint(STATES, (self.samples,), generator=generator)
        often = torch.rand(self.samples, generator=generator) < 0.4
        labels = torch.where(often, slot.index % STATES, labels)
        time = torch.linspace(0, 2 * math.pi, READINGS)
        phase = 2 * math.pi * torch.rand(self.samples, 1, generator=generator)
        noise = 0.6 * torch.randn(self.samples, READINGS, generator=generator)
        return torch.sin((1 + labels[:, None]) * time + phase) + noise, labels
