"""Batch norm in rounds of unequal steps: variances stay positive, plain and encrypted."""

from pathlib import Path

import pytest
import torch

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


@pytest.mark.parametrize("cipher", ["{kind: plain}", "{kind: pad, metrics: plain, examples: 400}"])
def test_running_variances_stay_positive_where_silos_do_unequal_steps(cipher: str, tmp_path: Path) -> None:
    (tmp_path / "narrow.py").write_text(TASK)
    task = f"task={{kind: custom, file: {tmp_path / 'narrow.py'}}}"
    fixed = "barrier={kind: fsp, passes: 9.0, interval: {kind: fixed, interval_s: 2.0}}"
    config = StrategyConfig.load("fsp", [task, fixed, f"cipher={cipher}", "stop={rounds: 1}", "local.threads=1"])
    silos = [SiloConfig(name=name, speed=speed) for name, speed in (("a", 3200.0), ("b", 16.0))]
    run_virtual(config, ClusterConfig(silos=silos), tmp_path / "out")
    variance = torch.load(tmp_path / "out" / "model.pt")["0.running_var"]
    assert (variance > 0).all() and (variance < 0.9).all(), variance
