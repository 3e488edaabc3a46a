"""SCAFFOLD on quadratic problems of silos that want different models, beside the paper's algorithm in float64."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import UpdateMeta, WorkOrder
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.silo.protocol import Completed, Identity
from fedsync.silo.session import current_order
from fedsync.silo.session.own_variate import VARIATE, StepControl
from fedsync.silo.session.session import SiloSession

FULL = ConfigError("answer.bin", "the disk is full", "Make room")
RATE, ETA = 0.8, 0.1
SAMPLES = (8, 24, 16)
CURVED = np.array([[4.0, 0.5, 1.0, 2.0], [0.5, 3.0, 1.0, 1.0], [1.0, 1.0, 5.0, 0.25]])
WANTED = np.array([[1.0, -2.0, 0.5, 3.0], [-1.0, 1.0, 2.0, -1.0], [4.0, 0.0, -3.0, 0.5]])

TASK = textwrap.dedent(
    f'''
    """Half of curved (w - wanted)^2, the same for each of a silo's samples; and a tensor that no loss uses."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    from fedsync.tasks.task_protocol import SiloData, Task

    class Bowl(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4))
            self.unused = nn.Parameter(torch.zeros(2))
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, rows):
            if self.training:
                self.seen += 1
            return rows[:, :4] / 2 * (self.w - rows[:, 4:]) ** 2

    class Quadratic(Task):
        def model(self):
            return Bowl()

        def data(self, slot):
            silo = slot.index
            row = torch.tensor({CURVED.tolist()})[silo].tolist() + torch.tensor({WANTED.tolist()})[silo].tolist()
            samples = {SAMPLES}[silo]
            data = TensorDataset(torch.tensor([row] * samples), torch.zeros(samples, dtype=torch.long))
            return SiloData(data, data)

        def loss(self, model, batch):
            return model(batch[0]).sum(dim=1).mean()
    '''
)


def strategy(folder: Path, *overrides: str) -> StrategyConfig:
    folder.mkdir(exist_ok=True)
    file = folder / "quadratic.py"
    file.write_text(TASK)
    sets = [
        f"task={{kind: custom, file: {file}}}",
        "aggregation={kind: fednova, weight: examples, server_rate: 0.9}",
        f"local={{steps: 10, batch_size: 4, learning_rate: {ETA}}}",
        f"server_optimizer={{kind: scaffold, rate: {RATE}}}",
        "silos=[a, b, c]",
    ]
    return StrategyConfig.load("bsp", [*sets, *overrides])


@dataclass
class Federation:
    """Three silos and a server in the clear, without a driver."""

    folder: Path
    config: StrategyConfig
    version: int = 0
    serials: dict[str, int] = field(default_factory=dict)
    silos: dict[str, SiloSession] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = RunSpec.of(self.config, None, 3)
        for name in "abc":
            self.restart(name)
        assert self.config.server_optimizer is not None
        first = self.silos["a"].initial_model()
        self.aggregator = PlainAggregator(first, optimizer=self.config.server_optimizer.build())
        self.policies = self.config.policies()

    def restart(self, name: str) -> SiloSession:
        """The silo's trainer is killed, and another goes on with what is in its folder."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        self.silos[name] = SiloSession(Identity(self.spec.dump(), "abc".index(name), name), self.spec, folder=folder)
        return self.silos[name]

    def order(self, name: str, steps: int) -> WorkOrder:
        serial = self.serials[name] = self.serials.get(name, 0) + 1
        self.aggregator.begin(f"{name}/{serial}")
        return WorkOrder(f"{name}/{serial}", self.version, serial, 4, steps, ETA, seed=serial, evaluate=False)

    def train(self, order: WorkOrder) -> Completed:
        return self.silos[order.update_id[0]].train(order, self.aggregator.outgoing(order.update_id[0]))

    def round(self, steps: Mapping[str, int], discarded: Collection[str] = (), lost: Collection[str] = ()) -> Vector:
        """These silos train so many steps, and a version is made; returns what travels of its model."""
        metas = []
        for name, count in steps.items():
            order = self.order(name, count)
            done = self.train(order)
            if name in lost:
                continue
            self.aggregator.put(name, order.update_id, np.array(done.update))
            meta = UpdateMeta.of(name, order, done.report, self.silos[name].facts.examples, done.update.nbytes)
            if name in discarded:
                self.aggregator.discard(order.update_id)
            else:
                metas.append(meta)
        self.version += 1
        self.aggregator.commit(self.policies.weighed(metas, self.version, ()))
        return self.aggregator.model

    @property
    def control(self) -> Vector:
        return self.aggregator._moments.vectors[0]


class Paper:
    """Algorithm 1 of arXiv:1910.06378 with option II, in float64 and in units of gradients, with weighted means."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.model = np.zeros(4)
        self.control = np.zeros(4)
        self.own = np.zeros((3, 4))

    def round(self, steps: Mapping[str, int], missing: Collection[str] = ()) -> NDArray[np.float64]:
        weights = np.array(SAMPLES) / sum(SAMPLES)
        sums = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]()
        for name, count in steps.items():
            silo, local = "abc".index(name), self.model.copy()
            for _ in range(count):
                gradient = CURVED[silo] * (local - WANTED[silo]) + self.decay * local
                local -= ETA * (gradient - self.own[silo] + self.control)
            renewed = self.own[silo] - self.control + (self.model - local) / (count * ETA)
            if name not in missing:
                sums[name] = (local - self.model, renewed)
        share = {name: weights["abc".index(name)] / sum(weights["abc".index(n)] for n in sums) for name in sums}
        effective = sum(share[name] * steps[name] for name in sums)
        moved = sum(share[name] * effective / steps[name] * update for name, (update, _) in sums.items())
        for name, (_, renewed) in sums.items():
            silo = "abc".index(name)
            self.control += weights[silo] * (renewed - self.own[silo])
            self.own[silo] = renewed
        self.model += RATE * 0.9 * moved
        return self.model


ROUNDS: list[tuple[dict[str, int], str, str]] = [
    ({"a": 12, "b": 12, "c": 12}, "", ""),
    ({"a": 12, "b": 12}, "", ""),
    ({"a": 12, "b": 12, "c": 12}, "b", ""),
    ({"a": 3, "b": 9, "c": 20}, "", "a"),
    ({"a": 12, "b": 12, "c": 12}, "", ""),
    ({"c": 5}, "", ""),
    ({"a": 7, "b": 12, "c": 1}, "", ""),
]
"""Steps of who trains, whose update is discarded, and whose answer is lost."""


@pytest.mark.parametrize(("killed", "decay"), [("", 0.0), ("", 0.2), ("abc", 0.0)])
def test_every_round_is_the_paper_s_to_float32(killed: str, decay: float, tmp_path: Path) -> None:
    """One silo misses rounds, one update is discarded, one lost, steps differ, and trainers are killed in between."""
    config = strategy(tmp_path, f"local.weight_decay={decay}")
    federation, paper = Federation(tmp_path, config), Paper(decay)
    for number, (steps, discarded, lost) in enumerate(ROUNDS):
        expected = paper.round(steps, discarded + lost)
        model = federation.round(steps, discarded, lost)
        np.testing.assert_allclose(model[:4], expected, rtol=2e-5, atol=1e-5, err_msg=f"round {number + 1}")
        np.testing.assert_allclose(federation.control[:4], -ETA * paper.control, atol=1e-6)
        np.testing.assert_array_equal(model[4:6], 0)
        for name in killed:
            federation.restart(name)


def test_an_order_not_saved_is_done_again_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer dies between the two files: what the order proposed is there, the order is not."""
    calm = Federation(tmp_path / "calm", strategy(tmp_path))
    shaken = Federation(tmp_path / "shaken", strategy(tmp_path))
    all_ = {"a": 9, "b": 9, "c": 9}
    for federation in (calm, shaken):
        federation.round(all_)
        federation.round(all_)
    expected = calm.train(calm.order("a", 9)).update
    order = shaken.order("a", 9)
    with monkeypatch.context() as full, pytest.raises(ConfigError, match="full"):
        full.setattr(current_order.LastOrder, "save", Mock(side_effect=FULL))
        shaken.train(order)
    shaken.restart("a")
    np.testing.assert_array_equal(shaken.train(order).update, expected)
    shaken.restart("a")
    np.testing.assert_array_equal(shaken.train(order).update, expected)


@pytest.mark.parametrize("damage", ["gone", "short", "bit", "head"])
def test_a_silo_without_its_variate_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    federation = Federation(tmp_path, strategy(tmp_path))
    steps = {"a": 9, "b": 9, "c": 9}
    federation.round(steps)
    federation.restart("b")
    federation.round(steps)
    assert "lost" not in caplog.text
    file = tmp_path / "b" / VARIATE
    assert file.stat().st_mode & 0o777 == 0o600
    data = bytearray(file.read_bytes())
    data[{"head": 40, "bit": -1}.get(damage, 0)] ^= 1
    file.unlink()
    if damage != "gone":
        file.write_bytes(data[:-4] if damage == "short" else data)
    federation.restart("b")
    assert ("variate.bin is corrupt" in caplog.text) == (damage != "gone")
    federation.round(steps)
    assert caplog.text.count("update 2 of this silo is in the model, and its control variate is lost") == 1
    federation.round(steps)
    assert caplog.text.count("is in the model") == 1, "once"


def test_who_trains_nothing_proposes_nothing(tmp_path: Path) -> None:
    """An order that only scores, and one that a model apart is trained by, leave variates as they were."""
    federation = Federation(tmp_path, strategy(tmp_path))
    steps = {"a": 9, "b": 9, "c": 9}
    federation.round(steps)
    silo, file = federation.silos["a"], tmp_path / "a" / VARIATE
    before = file.read_bytes()
    score = WorkOrder("a/2", 1, 2, 4, 1, 0.0, seed=2)
    silo.train(score, federation.aggregator.outgoing("a"))
    assert file.read_bytes() == before
    federation.serials["a"] = 2
    federation.round(steps)
    assert file.read_bytes() != before


def test_a_server_that_leaves_variates_out_is_refused(tmp_path: Path) -> None:
    federation = Federation(tmp_path, strategy(tmp_path))
    with pytest.raises(ProtocolError, match="no control variates came"):
        federation.silos["a"].train(federation.order("a", 3), federation.aggregator.model)


def test_a_variate_is_the_mean_of_clipped_gradients(tmp_path: Path) -> None:
    """What a step is corrected by is not clipped with its gradient."""
    federation = Federation(tmp_path, strategy(tmp_path, "local.clip_norm=0.5"))
    for _ in range(4):
        federation.round({"a": 3, "b": 3, "c": 3})
        for silo in federation.silos.values():
            (control,) = silo._extensions
            assert isinstance(control, StepControl) and control._variate.proposed is not None
            assert np.linalg.norm(control._variate.proposed[:4]) <= 1.0001 * ETA * 0.5
