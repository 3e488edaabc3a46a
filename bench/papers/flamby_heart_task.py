"""FLamby's Heart Disease task, for `flamby_heart.py`: their columns, rows, split, scale and model.

Source: https://github.com/owkin/FLamby at edacf54, ``flamby/datasets/fed_heart_disease``. Three columns with many gaps
are dropped, then rows with a gap. ``cp`` and ``restecg`` become indicators without the first category: 13 features.
The split is scikit-learn's by seed 43, stratified where both classes have more than two rows.

FLamby trains a federated model on rows that each centre scales by its own training rows. Its column "Pooled Test"
scales the test rows by all training rows together. `accuracy` does both kinds of test.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, TensorDataset

from fedsync import SiloData, SiloSlot, Task

CENTRES = ("cleveland", "hungarian", "switzerland", "va")
DATA = Path(__file__).parents[2] / "examples" / "heart" / "data"


def tables() -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Features, labels, training rows and test rows of each centre: float32 [n, 13], float32 [n, 1], int64, int64."""
    read = [pd.read_csv(DATA / f"{name}.csv", na_values="?").drop(columns=["slope", "ca", "thal"]) for name in CENTRES]
    kept = [table.dropna() for table in read]
    lengths = [len(table) for table in kept]
    joined = pd.concat(kept, ignore_index=True)
    features = pd.get_dummies(joined.drop(columns="num"), columns=["cp", "restecg"], drop_first=True)
    inputs = torch.from_numpy(features.to_numpy(np.float32)).split(lengths)
    labels = torch.from_numpy((joined["num"] > 0).to_numpy(np.float32))[:, None].split(lengths)
    return [(x, y, *_split(y[:, 0].numpy())) for x, y in zip(inputs, labels, strict=True)]


def _split(labels: np.ndarray) -> tuple[Tensor, Tensor]:
    several = min(np.bincount(labels.astype(int), minlength=2)) > 2
    train, test = train_test_split(
        np.arange(len(labels)),
        test_size=1 - 0.66,
        train_size=0.66,
        random_state=43,
        stratify=labels if several else None,
    )
    return torch.from_numpy(np.sort(train)), torch.from_numpy(np.sort(test))


Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def scaled(parts: list[Rows], by: list[Rows] | None = None) -> SiloData:
    """Rows in deviations of the training rows ``by``, of these parts if None; n - 1 in the divisor, as in FLamby."""
    train = torch.cat([x[rows] for x, _, rows, _ in by or parts])
    mean, deviation = train.mean(dim=0), train.std(dim=0)
    made = [((x - mean) / (deviation + 1e-9), y, train, test) for x, y, train, test in parts]
    return SiloData(
        ConcatDataset([TensorDataset(x[train], y[train]) for x, y, train, _ in made]),
        ConcatDataset([TensorDataset(x[test], y[test]) for x, y, _, test in made]),
    )


class FlambyHeart(Task):
    """Logistic regression with one output.

    Args:
        seed: of the first model, which is FLamby's of this seed.
        centres: of the only silo, for rows of their table without federation; empty: each silo is a centre.
        common: one scale for all silos, as `standardise: federated` gives it.
    """

    def __init__(self, seed: int, centres: tuple[int, ...] = (), common: bool = False) -> None:
        self._seed, self._centres, self._common = seed, tuple(centres), common

    def model(self) -> nn.Module:
        torch.manual_seed(self._seed)
        return nn.Linear(13, 1)

    def data(self, slot: SiloSlot) -> SiloData:
        every = tables()
        return scaled([every[centre] for centre in self._centres or (slot.index,)], every if self._common else None)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        return nn.functional.binary_cross_entropy_with_logits(model(inputs), labels)

    def assess(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")
        return loss, ((outputs > 0) == (targets > 0)).sum()


def accuracy(model: nn.Module, own: bool = False) -> float:
    """Share of right answers over all test rows, scaled by all training rows, or each by its ``own`` centre's."""
    every = tables()
    right, rows = 0, 0
    for group in [[each] for each in every] if own else [every]:
        test: Dataset[tuple[Tensor, Tensor]] = scaled(group).test
        for inputs, label in test:  # type: ignore[attr-defined]
            right, rows = right + int((model(inputs) > 0) == (label > 0)), rows + 1
    return right / rows
