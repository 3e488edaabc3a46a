"""Batch norm in rounds of unequal steps: variances stay positive, plain and encrypted."""

import json
from pathlib import Path

import pytest
import torch

from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

TASK = '''
import torch
from torch import nn
from torch.utils.data import TensorDataset
from fedsync import SiloData, Task


class Narrow(Task):
    """Inputs of little variance, which a new model's running variance of 1 has to come down to."""

    def model(self):
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))

    def data(self, slot):
        inputs = 0.1 * torch.randn(400, 4, generator=torch.Generator().manual_seed(slot.index))
        data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
        return SiloData(data, data)
'''


PAD = "cipher={kind: pad, metrics: plain, examples: 400}"
LIMITED = "barrier={kind: fsp, passes: 9.0, interval: {kind: fixed, interval_s: 2.0}}"


def variance(folder: Path, *changes: str) -> torch.Tensor:
    """The running variance after a round in which one of two silos does a hundred times as many steps."""
    (folder / "narrow.py").write_text(TASK)
    task = f"task={{kind: custom, file: {folder / 'narrow.py'}}}"
    config = StrategyConfig.load("fsp", [task, LIMITED, "stop={rounds: 1}", "local.threads=1", *changes])
    silos = [SiloConfig(name=name, speed=speed) for name, speed in (("a", 3200.0), ("b", 16.0))]
    run_virtual(config, ClusterConfig(silos=silos), folder / "out")
    found: torch.Tensor = torch.load(folder / "out" / "model.pt")["0.running_var"]
    return found


@pytest.mark.parametrize(
    "changes",
    [
        [],
        [PAD],
        [PAD[:-1] + ", only: ['1.*']}"],
        ["aggregation={kind: fednova, weight: examples, server_rate: 3.0}"],
        [PAD, "aggregation={kind: fednova, weight: examples, server_rate: 3.0}"],
        [PAD, "aggregation={kind: fedbuff, server_rate: 3.0, staleness: {kind: constant}}"],
    ],
    ids=["plain", "sealed", "in the clear", "plain, far", "sealed, far", "sealed, not normalised"],
)
def test_running_variances_stay_positive_where_silos_do_unequal_steps(changes: list[str], tmp_path: Path) -> None:
    found = variance(tmp_path, *changes)
    assert (found > 0).all() and (found < 0.9).all(), found


@pytest.mark.parametrize("parts", [[], ["model={private: ['0.*']}"]], ids=["travel", "stay"])
def test_no_silo_gets_a_batch_of_one_sample_that_batch_norm_cannot_train_on(parts: list[str], tmp_path: Path) -> None:
    """By speed, the slow silo's share of 64 samples would be 0.3."""
    balanced = ["barrier={kind: bsp}", "balancer={kind: proportional}", "stop={rounds: 3}", *parts]
    variance(tmp_path, *balanced)
    silos = {each["name"]: each for each in json.loads((tmp_path / "out" / "summary.json").read_text())["silos"]}
    assert (silos["b"]["batch_size"], silos["b"]["orders"], silos["b"]["failures"]) == (2, 3, 0)


def test_few_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cipher\.bits.*Write bits: 16, use group norm"):
        variance(tmp_path, PAD[:-1] + ", bits: 8}")
