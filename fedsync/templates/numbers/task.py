"""The task: model and data of a run. Change the places marked CHANGE, and keep the rest.

FedSync runs this file at every silo, and once at the server to get the model's shapes. The file is never sent: each
party keeps its own copy, at the same path.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync import ConfigError, SiloData, SiloSlot, Task

# CHANGE: numbers per sample.
FEATURES = 6
TEST_SHARE = 0.2


class DemandTask(Task):
    """Prediction of a number, such as tomorrow's demand, from today's data.

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
        return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))

    def data(self, slot: SiloSlot) -> SiloData:
        """This silo's samples. Return the same samples at every call: the silo remembers its position in them."""
        inputs, targets = self._read() if self.file else self._make_up(slot)
        order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(slot.seed))
        test, train = order.tensor_split([round(TEST_SHARE * len(targets))])
        return SiloData(TensorDataset(inputs[train], targets[train]), TensorDataset(inputs[test], targets[test]))

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """CHANGE: the loss that training minimises, a mean over the samples of the batch."""
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def score(self, model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        """CHANGE: loss and score, each summed over the samples of the batch; a larger score is better.

        Reports show the score divided by the number of samples as accuracy; here it is minus the mean squared error.
        """
        inputs, targets = batch
        loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
        return loss, -loss

    def _read(self) -> tuple[Tensor, Tensor]:
        """CHANGE: read the data on this silo's machine; here, a file of `np.savez(file, inputs=..., targets=...)`."""
        path = Path(__file__).parent / self.file
        if not path.is_file():
            raise ConfigError("task.options.file", f"{path} does not exist", "Put this silo's data there")
        with np.load(path) as arrays:
            inputs, targets = arrays["inputs"].astype(np.float32), arrays["targets"].astype(np.float32)
        if inputs.shape != (len(targets), FEATURES) or not (np.isfinite(inputs).all() and np.isfinite(targets).all()):
            problem = f"inputs of {path} are {inputs.shape} for {len(targets)} targets, or not all of them are numbers"
            raise ConfigError("task.options.file", problem, f"Save rows of {FEATURES} finite numbers, one a target")
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _make_up(self, slot: SiloSlot) -> tuple[Tensor, Tensor]:
        """Data for trials: all silos share one true function, and each silo sees a shifted region; variance about 1."""
        generator = torch.Generator().manual_seed((1000 * slot.seed + slot.index) % 2**63)
        inputs = torch.randn(self.samples, FEATURES, generator=generator)
        inputs[:, 0] += slot.index / slot.count
        noise = 0.1 * torch.randn(self.samples, generator=generator)
        targets = torch.sin(inputs[:, 0]) + 0.6 * inputs[:, 1] - 0.3 * inputs[:, 2] * inputs[:, 3]
        return inputs, targets + noise
