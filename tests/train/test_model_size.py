"""A model that no memory holds is one error, before any memory is asked for."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedsync.common.errors import ConfigError, HugeModel
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.tasks.networks import LstmClassifier
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.protocol import Identity, Refusal
from fedsync.silo.session.service import TrainerService
from fedsync.train.machine.resources import FittingModel, machine_bytes
from fedsync.train.weights import TaskModel

# name: what a file says of the task, 10^12 units wide.
HUGE = {
    "mlp": "task={kind: mlp, hidden: [64, 1000000000000], data: {kind: blobs}, partition: {kind: iid}}",
    "sequences": "task={kind: sequences, hidden: 1000000000000, data: {kind: keywords}, partition: {kind: iid}}",
}


@pytest.mark.parametrize("name", HUGE)
def test_ten_to_the_twelve_hidden_units_are_one_error_at_the_server_and_at_a_silo(name: str) -> None:
    strategy = StrategyConfig.load("fedavg", [HUGE[name]])
    spec = RunSpec(seed=7, silos=1, task=strategy.task, local=strategy.local)
    with pytest.raises(HugeModel, match=r"task, its model: the model takes [\d,.]+ GiB at least\. Choose narrower"):
        TaskModel(strategy.task.build(), strategy.seed)
    with pytest.raises(HugeModel) as caught:
        TrainerService(Identity(spec.dump(), 0, "silo-0"))
    assert refuse(caught.value).code is Refusal.CONFIG


def test_what_is_larger_than_this_machine_says_so_and_may_be_tried_elsewhere() -> None:
    # 4 x 3 values and 3, of four bytes: 60 bytes.
    with FittingModel(60):
        nn.Linear(4, 3)
    too_large = r"takes 0\.0 GiB at least, and this machine has 0\.0 GiB"
    with pytest.raises(ConfigError, match=too_large) as caught, FittingModel(59):
        nn.Linear(4, 3)
    assert not isinstance(caught.value, HugeModel)
    # Both recurrent layers count, one alone would fit: 4 gates of 8 by (3 + 8) and two biases, then by (8 + 8).
    one, two = 4 * 4 * 8 * (3 + 8 + 2), 4 * 4 * 8 * (8 + 8 + 2)
    with FittingModel(one + two + 4 * (8 * 2 + 2)):
        LstmClassifier((5, 3), 8, 2, 2)
    with pytest.raises(ConfigError), FittingModel(one + two):
        LstmClassifier((5, 3), 8, 2, 2)


def test_what_is_made_elsewhere_or_of_other_numbers_is_counted_as_what_it_takes() -> None:
    with FittingModel(8):
        torch.empty(2**50, device="meta")
        torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(ConfigError), FittingModel(15):
        torch.zeros((2,), dtype=torch.float64)


def test_the_memory_of_a_machine_ends_where_its_groups_say(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/job"
    for file, text in {"proc/self/cgroup": "0::/job/inner\n", "sys/fs/cgroup/job/memory.max": "max\n"}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    assert machine_bytes(tmp_path) == machine_bytes(tmp_path / "nowhere") > 12345
    (group / "memory.max").write_text("12345\n")
    assert machine_bytes(tmp_path) == 12345
