"""A user's own task in virtual time: what it raises is said in one line, and no silo sees what another's task keeps."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.silo.owner.refusals import explained, refuse
from fedsync.silo.protocol import Refusal, Refused
from fedsync.simulation.run import run_virtual

TASK = """\
import json
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from fedsync import SiloData, Task

class Rows(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, row):
        return torch.zeros(2), torch.tensor(row % 2)       # a sample

class Mine(Task):
    def model(self):
        return nn.Linear(2, 2)                             # model
    def data(self, slot):
        few = torch.zeros(8, 2), torch.arange(8) % 2       # data
        return SiloData(Rows(), TensorDataset(*few))
    def loss(self, model, batch):
        return super().loss(model, batch)                  # loss
    def score(self, model, batch):
        return super().score(model, batch)                 # score
    def collate(self, samples):
        return super().collate(samples)                    # collate
"""
WEIGHING = """\
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
name: own
stop: {rounds: 2}
local: {steps: 2, batch_size: 12, device: cpu, resources: false}
balancer: {kind: fixed}
barrier: {kind: bsp}
task: {kind: custom, file: mine.py}
"""


def run(folder: Path, task: str, silos: str = "ab") -> dict[str, Any]:
    (folder / "mine.py").write_text(task)
    (folder / "own.yaml").write_text(STRATEGY)
    cluster = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 100.0} for name in silos]})
    return run_virtual(StrategyConfig.load(folder / "own.yaml"), cluster, folder / "out")


def test_what_data_keeps_stays_with_its_silo_and_few_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert run(tmp_path, WEIGHING, "abc")["rounds"] == 2
    assert "silo a holds 8 training samples, fewer than local.batch_size 12: its batches have 8 at most" in caplog.text


def broken(where: str, by: str) -> tuple[str, int]:
    """The task with a line that raises before the one that is marked so, and that line's number."""
    lines = TASK.splitlines()
    (place,) = (number for number, line in enumerate(lines) if line.endswith(f"# {where}"))
    indent = re.match(" *", lines[place])[0]
    return "\n".join([*lines[:place], indent + by, *lines[place:]]), place + 1


@pytest.mark.parametrize(
    ("where", "by", "problem"),
    [
        *((where, "{}['gamma']", "KeyError: 'gamma'") for where in ("a sample", "model", "data", "score", "collate")),
        # Where a library raises it is the user's line, too.
        ("loss", "json.loads('{')", "JSONDecodeError: Expecting property name"),
        ("loss", "torch.zeros(2) @ torch.zeros(3)", "RuntimeError: inconsistent tensor size"),
        ("loss", "nn.Linear(3, 3)(batch[0])", "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    ],
)
def test_it_names_its_line(where: str, by: str, problem: str, tmp_path: Path) -> None:
    task, line = broken(where, by)
    with pytest.raises(RunError, match=rf"{tmp_path}/mine\.py, line {line}: {problem}"):
        run(tmp_path, task)


def test_an_error_of_fedsyncs_own_is_not_dressed_as_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(self: object) -> float:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("fedsync.train.local_trainer.MeanLoss.mean", bug)
    # A test's own file is as much the user's as any.
    monkeypatch.setattr("fedsync.train.guests.guest_code._OURS", Path(__file__).parents[2])
    with pytest.raises(ZeroDivisionError, match="ours"):
        run(tmp_path, TASK)


def test_a_server_that_hears_the_reason_is_not_told_of_memory() -> None:
    reason = "/home/me/mine.py, line 7: KeyError: 'gamma'"
    refused = refuse(RunError(reason))
    assert refused == Refused(Refusal.INTERNAL, reason)
    assert reason in explained("a", refused) and "killed" not in explained("a", refused)
