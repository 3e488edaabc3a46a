"""Parts of a model under the shipped loop: private tensors are kept with the order, frozen ones cost nothing."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.common.errors import ConfigError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Cursor
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.silo.protocol import ANSWER, EvaluateModel, Identity
from fedsync.silo.session.current_order import LastOrder
from fedsync.silo.session.session import SiloSession
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task
from fedsync.train.loop import Trainer
from fedsync.train.module_parts import FrozenTensors, frozen_digest, parts_of
from fedsync.train.options import LocalOptions
from fedsync.train.weights import TaskModel
from tests.train.make import order

TASK = """
import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedsync import SiloData, Task


class Normed(Task):
    '''Norms may stay, 40,000 values of a body are frozen, and the rest travels: 4 x 3 + 4.'''

    def model(self):
        body = nn.Linear(2, 20_000).requires_grad_(False)
        return nn.ModuleDict({"body": body, "norm": nn.BatchNorm1d(3), "head": nn.Linear(3, 4)})

    def data(self, slot):
        inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(7)) * (1 + slot.index) + slot.index
        samples = TensorDataset(inputs, inputs.abs().argmax(dim=1))
        return SiloData(samples, samples)

    def loss(self, model, batch):
        if os.path.exists("crash") and self.calls == 2:
            raise KeyboardInterrupt
        self.calls = (self.calls + 1) % 3
        inputs, labels = batch
        return nn.functional.cross_entropy(model["head"](model["norm"](inputs)), labels)

    calls = 0

    def score(self, model, batch):
        inputs, labels = batch
        logits = model["head"](model["norm"](inputs))
        return nn.functional.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    monkeypatch.chdir(tmp_path)
    Path("normed.py").write_text(TASK)
    sets = ['task={"kind": "custom", "file": "normed.py"}', 'model={"private": ["norm.*"]}']
    config = StrategyConfig.load("fedavg", sets)
    return RunSpec(seed=7, silos=2, task=config.task, local=config.local, model=config.model)


def session(spec: RunSpec, folder: Path, index: int = 0) -> SiloSession:
    folder.mkdir(exist_ok=True)
    return SiloSession(Identity(spec.dump(), index, f"silo-{index}"), spec, folder=folder)


def test_a_killed_order_begins_anew_from_the_private_parts_before_it(tmp_path: Path, spec: RunSpec) -> None:
    orders = [order(batch_size=8, max_steps=3, seed=number, evaluate=True) for number in (1, 2)]
    calm, shaken = session(spec, tmp_path / "calm"), session(spec, tmp_path / "shaken")
    base = calm.initial_model()
    expected = [calm.train(each, base) for each in orders]
    shaken.train(orders[0], base)
    Path("crash").touch()
    with pytest.raises(KeyboardInterrupt):
        shaken.train(orders[1], base)
    Path("crash").unlink()
    again = session(spec, tmp_path / "shaken")
    found = again.train(orders[1], base)
    assert found.report.evaluation == expected[1].report.evaluation != expected[0].report.evaluation
    assert (found.update == expected[1].update).all()
    assert again.cursor == calm.cursor and again.cursor.private
    assert again.evaluate(base, EvaluateModel(0)) == calm.evaluate(base, EvaluateModel(0))
    private = again.cursor.private
    again.train(order(batch_size=8, max_steps=3, learning_rate=0.0, seed=3), base)
    assert again.cursor.private == private, "an order that only scores leaves them"
    other = session(spec, tmp_path / "other", 1)
    other.train(orders[0], base)
    assert other.cursor.private != shaken.cursor.private, "each silo has its own"


def test_what_is_frozen_is_neither_sent_nor_stored(tmp_path: Path, spec: RunSpec) -> None:
    silo = session(spec, tmp_path / "a")
    base = silo.initial_model()
    done = silo.train(order(batch_size=8, max_steps=3), base)
    assert base.nbytes == done.update.nbytes == 4 * 16
    answer = tmp_path / "a" / ANSWER
    assert answer.stat().st_size < 4_000 < 4 * 40_000
    assert LastOrder.load(answer) is not None
    silo.save_model(Path("model.pt"), base)
    whole = torch.load("model.pt", weights_only=True)
    built = TaskModel(spec.task.build(), spec.seed, spec.model.build())
    built.save_model(Path("server.pt"), base)
    of_server = torch.load("server.pt", weights_only=True)
    assert whole.keys() == of_server.keys() == built._module.state_dict().keys()
    assert all(torch.equal(whole[name], of_server[name]) for name in whole), "private ones are as they are built"


class Small(Task):
    """A batch norm, whose buffers a forward pass changes, and a weight."""

    patterns = UNSAID

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))

    def data(self, slot: SiloSlot) -> SiloData:
        inputs = torch.randn(20, 2, generator=torch.Generator().manual_seed(7))
        return SiloData(TensorDataset(inputs, (inputs[:, 0] > 0).long()), TensorDataset(inputs[:0], torch.zeros(0)))

    def parts(self) -> PartPatterns:
        return self.patterns


def small(own: PartPatterns = UNSAID, run: PartPatterns = UNSAID) -> Trainer:
    task = Small()
    task.patterns = own
    return Trainer(task, SiloSlot("a", 0, 1, 7), LocalOptions(device="cpu"), run)


def test_a_share_list_freezes_what_it_leaves_out_parameters_and_buffers() -> None:
    subject = small(PartPatterns(["2.*"]))
    before = {name: tensor.clone() for name, tensor in subject._model.state_dict().items()}
    outcome = subject.run(order(), subject.initial_model(), Cursor())
    assert outcome.update.any() and outcome.cursor.private == b""
    subject.evaluate(subject.initial_model(), outcome.cursor)
    after = subject._model.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert subject.layout.names == ("2.weight", "2.bias")


def test_the_run_and_the_task_both_keep_parts_private() -> None:
    subject = small(PartPatterns(private=["1.*"]), PartPatterns(private=["0.bias"]))
    assert subject.layout.names == ("0.weight", "2.weight", "2.bias")
    with pytest.raises(ConfigError, match=r"0.weight is in share, and the silo's own code shares 2\.\* only"):
        small(PartPatterns(["2.*"]), PartPatterns(["*weight"]))


class Stateful(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 1}


def test_a_state_that_is_no_plain_tensor_is_named() -> None:
    sparse = nn.Linear(2, 2)
    sparse.register_buffer("odd", torch.eye(2).to_sparse())
    for module, name in ((Stateful(2, 2), "_extra_state"), (sparse, "odd")):
        with pytest.raises(ConfigError, match=f"{name} is no plain tensor"):
            parts_of(module, UNSAID)


def test_frozen_parameters_that_training_changes_all_the_same_are_found() -> None:
    module = nn.Linear(2, 2)
    frozen = FrozenTensors(module, ["bias"])
    with torch.no_grad():
        module.bias.mul_(1.0)  # written to, and the same
    module.bias.data = module.bias.data.clone()  # moved, and the same
    frozen.check()
    with torch.no_grad():
        module.bias += 1.0
    for use in (frozen.check, frozen.restore):  # before each later order and evaluation, whose figures would be wrong
        with pytest.raises(ConfigError, match="training changed bias, which is frozen"):
            use()


def test_a_digest_is_of_names_types_shapes_and_values() -> None:
    def digest(name: str, tensor: Tensor) -> bytes:
        return frozen_digest([(name, tensor)])

    values = torch.arange(3_000_000, dtype=torch.float32)
    same = digest("a", values)
    assert same == digest("a", values.view(1000, 3000).T.contiguous().T.reshape(-1)), "whatever the strides"
    changed = values.clone()
    changed[-1] += 1
    others = [("b", values), ("a", values.half()), ("a", values.view(-1, 3)), ("a", changed)]
    assert len({same, *(digest(*other) for other in others)}) == 5
    assert digest("a", torch.tensor(1.5, dtype=torch.bfloat16)) and frozen_digest([]) == b""
    pair = [("a", values[:1]), ("b", values[:1])]
    assert frozen_digest(pair) != frozen_digest(reversed(pair))


def test_silos_digest_is_the_servers(tmp_path: Path, spec: RunSpec) -> None:
    built = TaskModel(spec.task.build(), spec.seed, spec.model.build())
    assert session(spec, tmp_path / "a").form.frozen == built.frozen_digest.hex() != ""
    assert json.loads(spec.dump())["model"] == {"share": None, "private": ["norm.*"]}
