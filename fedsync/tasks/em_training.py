"""Expectation maximisation as training: the model is the vector of sufficient statistics.

EM alternates an E-step, in which every sample x says statistics t(x; theta) in the light of the parameters, and an
M-step, theta = M(s), which needs only their mean s over all samples. Silos can add what they cannot show each other,
so the thing to share is s, not theta: the M-step is then done by everybody, where parameters are used, and the server
does nothing but add, under encryption too.

A local step on a batch B with learning rate rho moves the statistics towards those of the batch:

    s <- (1 - rho) s + rho mean_B t(x; M(s))

which is a step of plain SGD down ``|s - mean_B t|^2 / 2`` with t held fixed; so the loop that trains networks
trains these as well. An update is "local minus base statistics"; and as means of means weighted by samples are
means, one step with rho = 1 on all of a silo's data, averaged by ``weight: examples``, is one iteration of EM on
everybody's data: exactly, up to the rounding of float32 and, if updates are encrypted, of their integers. With
smaller batches and rho < 1 it is stepwise EM.

Source: FSP, section 2.2 (statistics as sums, M-step from sums). On smaller batches FSP remembers what every sample
said last and sends the change; here old statistics fade instead, as in the online EM of Cappe and Moulines,
arXiv:0712.4273, so that an order depends on nothing but its base.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.tasks.neural import SourceTask
from fedsync.tasks.samples import Samples
from fedsync.tasks.task_protocol import Batch

SMALLEST = 1e-9
"""Floor of what statistics are divided by: smaller counts, and those below 0, come of rounding."""
EMPTY = 1e-8
"""Count with which a group that no sample of a batch belongs to stays where it is."""


class Statistics(nn.Module):
    """Named statistics: the parameters of this module, in the order in which they are given.

    Args:
        tensors: by name.
    """

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.detach().clone()))


@dataclass(frozen=True, slots=True)
class StatisticsTask(SourceTask):
    """A task that learns statistics. Wants plain SGD: no momentum, no weight decay, a learning rate up to 1.

    The loss is that of the samples under the parameters before the step, so it can be compared between steps.
    Accuracy is minus the test loss; it has no natural range.
    """

    def dataset(self, samples: Samples) -> TensorDataset:
        """Inputs only, flattened, float32 [n, features]."""
        return TensorDataset(samples.dense().flatten(1))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean loss, with the gradient "statistics minus those of the batch"."""
        # Sums of many samples want all digits, whatever precision networks are trained with.
        with torch.autocast(batch[0].device.type, enabled=False):
            losses, wanted = self.expect(values_of(model), batch[0])
        way = torch.stack(
            [(parameter - wanted[name]).square().sum() / 2 for name, parameter in model.named_parameters()]
        ).sum()
        # The value of one, the gradient of the other.
        return losses.mean() + (way - way.detach())

    def score(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed loss, and minus the same."""
        loss = self.unseen(values_of(model), batch[0]).sum()
        return loss, -loss

    @abstractmethod
    def expect(self, statistics: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The E-step.

        Args:
            statistics: by name.
            inputs: float32 [n, features].

        Returns:
            The loss of each sample under the parameters that follow from ``statistics``, [n], and the mean
            statistics of the samples, by name.
        """

    def unseen(self, statistics: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """The loss of each sample that nothing is learnt from, [n]; by default that of `expect`."""
        return self.expect(statistics, inputs)[0]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """The statistics that a module holds, by name, without a link to gradients."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def centres_of(statistics: dict[str, Tensor]) -> Tensor:
    """``sums / counts``, [groups, features], of statistics with these two names."""
    return statistics["sums"] / statistics["counts"].clamp(min=SMALLEST)[:, None]


def keep_empty(counts: Tensor, sums: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Let groups without samples vote, with next to no weight, for staying where they are.

    Their sums and counts would both be 0, and 0 / 0 is nowhere. A group that has samples at other silos is moved by
    this less than float32 can tell.
    """
    empty = counts < EMPTY
    counts = torch.where(empty, EMPTY, counts)
    return counts, torch.where(empty[:, None], EMPTY * centres, sums)


def random_centres(groups: int, features: int, spread: float) -> Tensor:
    """Where groups begin: normal around 0 with deviation ``spread``, [groups, features]."""
    return spread * torch.randn(groups, features)
