"""UniFed's task ``breast_horizontal``, for `unifed_breast.py`: its rows, clients, scale and models.

UniFed takes FATE's files ``breast_homo_guest``, ``breast_homo_host`` and ``breast_homo_test``: two clients with 227 and
228 rows to train on, and 114 rows to test. The rows are scikit-learn's, and each column is scaled by its mean and
deviation over all 569 rows, to six digits. ``id`` in the files is scikit-learn's number of a row. `GUEST` and `TEST`
say which rows two of the files have. The columns of the files have another order, which changes nothing.

Models as in UniFed's Flower client: ``logistic_regression`` has a sigmoid before the cross-entropy, ``mlp_128`` one
hidden layer of 128 and ``mlp_128_128_128`` three, with ReLU. All have two outputs.

Sources: https://github.com/FederatedAI/FATE, ``examples/data``, at 5a06d9e4c; the client is ``client.py`` of
https://github.com/xiaojunxu/colink-unifed-flower at b50be92.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync import SiloData, SiloSlot, Task

MODELS = ("logistic_regression", "mlp_128", "mlp_128_128_128")
GUEST = int(
    "18480d6e04504d7c834e01726406c040380327b1844dcc4555456062813b129cba099f88"
    "90e9448b9cf5161e82383e30fd2d4255930d0796ab4bb594b6c304434622802021040a9",
    16,
)
"""Rows of the first client: bit i is row i."""
TEST = int(
    "104c091c0a0108040118000090806230088800a42300302229003000204c541049020202"
    "8040004000240a11403810002820400007040684080400a0004780090551ace4a12444",
    16,
)
"""Rows of the test: bit i is row i."""
HELD = 5
"""One of so many training rows of a client is held out to choose a rate."""


def rows(part: str) -> tuple[Tensor, Tensor]:
    """Scaled features and labels (1 is benign) of ``guest``, ``host`` or ``test``: float32 [n, 30] and int64 [n]."""
    found = load_breast_cancer()
    scaled = (found.data - found.data.mean(axis=0)) / found.data.std(axis=0)
    guest, test = ([bool(mask >> row & 1) for row in range(len(scaled))] for mask in (GUEST, TEST))
    masks = {"guest": np.array(guest), "test": np.array(test), "host": ~(np.array(guest) | np.array(test))}
    mask = masks[part]
    return torch.from_numpy(scaled[mask].round(6).astype(np.float32)), torch.from_numpy(found.target[mask])


def training(parts: tuple[str, ...], held: bool | None) -> tuple[Tensor, Tensor]:
    """Training rows of clients: all if ``held`` is None, the held-out ones if True, the others if False."""
    kept = []
    for inputs, labels in map(rows, parts):
        out = torch.arange(len(labels)) % HELD == 0
        mask = torch.ones_like(out) if held is None else out if held else ~out
        kept.append((inputs[mask], labels[mask]))
    return torch.cat([inputs for inputs, _ in kept]), torch.cat([labels for _, labels in kept])


def network(name: str) -> nn.Module:
    if name == "logistic_regression":
        return nn.Sequential(nn.Linear(30, 2), nn.Sigmoid())
    widths = (30, *(int(width) for width in name.split("_")[1:]))
    hidden = [layer for pair in pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(widths[-1], 2))


class UnifedBreast(Task):
    """Two classes, cross-entropy of two outputs.

    Args:
        name: of `MODELS`.
        parts: clients whose rows the only silo has; empty: each silo is a client.
        tuning: train without the held-out rows, and test on them.
    """

    def __init__(self, name: str, parts: tuple[str, ...] = (), tuning: bool = False) -> None:
        self._name, self._parts, self._tuning = name, tuple(parts), tuning

    def model(self) -> nn.Module:
        return network(self._name)

    def data(self, slot: SiloSlot) -> SiloData:
        parts = self._parts or (("guest", "host")[slot.index],)
        train = training(parts, False if self._tuning else None)
        test = training(parts, True) if self._tuning else rows("test")
        return SiloData(TensorDataset(*train), TensorDataset(*test))


def area(model: nn.Module, tuning: bool = False) -> float:
    """AUC over the 114 test rows, or over the held-out training rows of both clients; of the second output."""
    inputs, labels = training(("guest", "host"), True) if tuning else rows("test")
    with torch.no_grad():
        return float(roc_auc_score(labels.numpy(), model(inputs)[:, 1].numpy()))
