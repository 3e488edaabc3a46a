"""FedProx's term, by hand, on a model whose loss is w: its gradient is 1 whatever w is."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.core.orders import Cursor
from fedsync.policies.aggregate.aggregate_kinds import progress
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot, Task
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions
from tests.train.make import order, slot


class Slope(Task):
    """loss(w) = w."""

    def model(self) -> nn.Module:
        return nn.Linear(1, 1, bias=False)

    def data(self, slot: SiloSlot) -> SiloData:
        ones = TensorDataset(torch.ones(20, 1), torch.zeros(20, dtype=torch.long))
        return SiloData(ones, ones)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss: Tensor = model(batch[0]).mean()
        return loss


def update(steps: int, momentum: float = 0.0, proximal: float = 0.0, base: float = 3.0) -> tuple[float, float]:
    """Update and reported loss of an order at learning rate 1/2."""
    subject = Trainer(Slope(), slot(), LocalOptions(device="cpu", momentum=momentum, proximal=proximal))
    outcome = subject.run(
        order(batch_size=4, max_steps=steps, learning_rate=0.5), np.array([base], np.float32), Cursor()
    )
    return float(outcome.update[0]), outcome.report.loss


def test_by_hand() -> None:
    """mu = 1/2, eta = 1/2. Step 1: -1/2. Step 2: the term's gradient is -1/4: -1/2 - 1/2 (1 - 1/4) = -7/8."""
    assert update(1, proximal=0.5)[0] == -0.5
    assert update(2, proximal=0.5) == (-0.875, 2.75), "w is 3 and then 2.5; the reported loss is without the term"
    assert update(2)[0] == -1.0


def test_the_term_pulls_to_the_base_of_this_order_wherever_that_is() -> None:
    assert update(2, proximal=0.5, base=0.0)[0] == update(2, proximal=0.5, base=-64.0)[0] == -0.875
    subject = Trainer(Slope(), slot(), LocalOptions(device="cpu", proximal=0.5))
    work = order(batch_size=4, max_steps=2, learning_rate=0.5)
    updates = [subject.run(work, np.array([base], np.float32), Cursor()).update[0] for base in (0.0, 8.0)]
    assert updates == [-0.875, -0.875], "not the last order's"


def test_the_gradients_of_an_embedding_may_be_sparse() -> None:
    class Sparse(Slope):
        def model(self) -> nn.Module:
            return nn.EmbeddingBag(2, 1, sparse=True)

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return super().loss(model, [batch[0].long()])

    subject, base = (
        Trainer(Sparse(), slot(), LocalOptions(device="cpu", proximal=0.5)),
        np.array([8.0, 3.0], np.float32),
    )
    work, correction = order(batch_size=4, max_steps=2, learning_rate=0.5), np.array([1.0, 0.0], np.float32)
    assert subject.run(work, base, Cursor()).update.tolist() == [0.0, -0.875]
    assert subject.run(work, base, Cursor(), correction=correction).update.tolist() == [-0.875, -0.875]


@pytest.mark.parametrize("proximal", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("steps", [1, 5, 40])
def test_fednova_s_norm_is_what_the_loop_does(steps: int, momentum: float, proximal: float) -> None:
    """Along a constant gradient of 1 a silo gets eta |a| far."""
    expected = -0.5 * progress(steps, momentum, 0.5 * proximal)
    assert update(steps, momentum, proximal)[0] == pytest.approx(expected, rel=1e-5)


def test_a_parameter_that_the_loss_does_not_use_stays() -> None:
    class Half(Slope):
        def model(self) -> nn.Module:
            return nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "unused": nn.Linear(1, 1, bias=False)})

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            return super().loss(model["used"], batch)  # type: ignore[index]

    subject = Trainer(Half(), slot(), LocalOptions(device="cpu", proximal=0.5))
    outcome = subject.run(order(batch_size=4, max_steps=2, learning_rate=0.5), np.zeros(2, np.float32), Cursor())
    assert sorted(outcome.update) == [-0.875, 0.0]
