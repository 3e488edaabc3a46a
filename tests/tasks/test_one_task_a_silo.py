"""In virtual time all silos live in one process, and none sees what another's task keeps."""

from pathlib import Path

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

TASK = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset
from fedsync import SiloData, Task

SEEN = []

class Weighing(Task):
    def model(self):
        return nn.Linear(2, 2)

    def data(self, slot):
        self.mine = slot.index          # as class weights, that are counted in the data
        SEEN.append(slot.index)
        inputs, labels = torch.full((8, 2), float(slot.index)), torch.arange(8) % 2
        return SiloData(TensorDataset(inputs, labels), TensorDataset(inputs, labels))

    def loss(self, model, batch):
        assert (batch[0] == self.mine).all(), "another silo's"
        assert SEEN == [self.mine], "another silo's"
        return super().loss(model, batch)
"""
STRATEGY = """\
name: weighing
stop: {rounds: 2}
local: {steps: 2, batch_size: 4, device: cpu, resources: false}
balancer: {kind: fixed}
barrier: {kind: bsp}
task: {kind: custom, file: weighing.py}
"""


def test_what_data_keeps_stays_with_its_silo(tmp_path: Path) -> None:
    (tmp_path / "weighing.py").write_text(TASK)
    (tmp_path / "weighing.yaml").write_text(STRATEGY)
    silos = [{"name": name, "speed": 100.0} for name in ("a", "b", "c")]
    config = StrategyConfig.load(tmp_path / "weighing.yaml")

    summary = run_virtual(config, ClusterConfig.model_validate({"silos": silos}), tmp_path)

    assert summary["rounds"] == 2


def test_a_silo_with_fewer_samples_than_a_batch_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "weighing.py").write_text(TASK)
    (tmp_path / "weighing.yaml").write_text(STRATEGY.replace("batch_size: 4", "batch_size: 12"))
    config = StrategyConfig.load(tmp_path / "weighing.yaml")

    run_virtual(config, ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 1.0}]}), tmp_path)

    assert "silo a holds 8 training samples, fewer than local.batch_size 12: its batches have 8 at most" in caplog.text
