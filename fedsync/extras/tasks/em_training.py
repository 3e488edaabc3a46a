"""Expectation maximisation (EM) as training: the model is the vector of sufficient statistics.

EM alternates an E-step, in which every sample x gives statistics t(x; theta) under the parameters theta, and an M-step,
theta = M(s), which needs only the mean s of the statistics over all samples. Statistics can be added up over silos,
parameters cannot, so silos share s and not theta. Each party does the M-step where it uses the parameters, and the
server only adds, also under encryption.

A local step on a batch B with learning rate rho moves the statistics towards those of the batch:

    s <- (1 - rho) s + rho mean_B t(x; M(s))

This is a step of plain SGD on ``|s - mean_B t|^2 / 2`` with t held fixed, so the loop for networks also trains
statistics. An update is "local minus base statistics", and the mean of means, weighted by samples, is the overall mean.
One step with rho = 1 on all of a silo's data, averaged by ``weight: examples``, is therefore one EM iteration on the
joint data. The result is exact up to the rounding of float32 and, for encrypted updates, of their integers. Smaller
batches and rho < 1 give stepwise EM.

Source: FSP, section 2.2 (statistics as sums, M-step from sums). For smaller batches FSP stores the last statistics of
every sample and sends the change. Here old statistics fade instead, as in the online EM of Cappe and Moulines,
arXiv:0712.4273, so that an order depends only on its base.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedsync.extras.readers.samples import Samples
from fedsync.extras.tasks.neural import SourceTask
from fedsync.policies.schema import Positive
from fedsync.tasks.task_protocol import Batch
from fedsync.tasks.task_section import Scores

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

SMALLEST = 1e-9
"""Lower bound of divisors: smaller or negative counts result from rounding."""
EMPTY = 1e-8
"""Count for a group without samples in a batch, which keeps the group's centre in place."""


def statistics_model(**tensors: Tensor) -> nn.Module:
    """Named statistics as parameters of a module, in the order of the arguments."""
    from torch import nn

    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_parameter(name, nn.Parameter(tensor.detach().clone()))
    return model


@dataclass(frozen=True, slots=True)
class StatisticsTask(SourceTask):
    """Task that learns statistics; needs plain SGD: no momentum, no weight decay, a learning rate of at most 1.

    The loss is that of the samples under the parameters before the step, so losses of different steps are comparable.
    ``learning_rate`` is the share of the statistics that a batch renews; 1 renews all. Accuracy is minus the test loss.
    """

    additive: ClassVar[bool] = True
    scores: ClassVar[Scores] = "error"

    spread: Positive = 1.0
    """Standard deviation of the random initial groups around 0."""

    def dataset(self, samples: Samples) -> TensorDataset:
        """Inputs only, flattened, float32 [n, features]."""
        from torch.utils.data import TensorDataset

        return TensorDataset(samples.dense().flatten(1))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss, with the gradient "statistics minus those of the batch"."""
        import torch

        # Sums over many samples need full precision, independent of local.precision.
        with torch.autocast(batch[0].device.type, enabled=False):
            losses, wanted = self.expect(values_of(model), batch[0])
        way = torch.stack(
            [(parameter - wanted[name]).square().sum() / 2 for name, parameter in model.named_parameters()]
        ).sum()
        # The value of the loss, with the gradient of `way`.
        return losses.mean() + (way - way.detach())

    def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss = self.unseen(values_of(model), batch[0]).sum()
        return loss, -loss

    @abstractmethod
    def expect(self, statistics: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """E-step on inputs, float32 [n, features].

        Returns the loss of each sample under the parameters of ``statistics``, [n], and the samples' mean statistics.
        """

    def unseen(self, statistics: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """Loss of each evaluated sample, [n]; by default that of `expect`."""
        return self.expect(statistics, inputs)[0]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Statistics of a module by name, detached from gradients."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def centres_of(statistics: dict[str, Tensor]) -> Tensor:
    """Centres ``sums / counts``, [groups, features]."""
    return statistics["sums"] / statistics["counts"].clamp(min=SMALLEST)[:, None]


def keep_empty(counts: Tensor, sums: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Give groups without samples a tiny weight at their current centre.

    Otherwise sums and counts would be 0, and 0 / 0 is undefined. If the group has samples at other silos, the effect is
    below float32 precision.
    """
    empty = counts < EMPTY
    return counts.masked_fill(empty, EMPTY), sums.where(~empty[:, None], EMPTY * centres)


def random_centres(groups: int, features: int, spread: float) -> Tensor:
    """Random first centres, normal around 0 with deviation ``spread``, [groups, features]."""
    import torch

    return spread * torch.randn(groups, features)
