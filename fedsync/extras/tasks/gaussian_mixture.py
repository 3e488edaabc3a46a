"""Gaussian mixtures with diagonal covariances, by additive statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedsync.extras.tasks.em_training import (
    SMALLEST,
    StatisticsTask,
    centres_of,
    keep_empty,
    random_centres,
    statistics_model,
)
from fedsync.policies.schema import Positive, PositiveInt, register
from fedsync.tasks.task_section import Scores

if TYPE_CHECKING:
    from torch import Tensor, nn


@register("gaussian-mixture")
@dataclass(frozen=True, slots=True)
class MixtureTask(StatisticsTask):
    """Mixture of Gaussians with diagonal covariances. The loss is minus the mean log-likelihood.

    Statistics, with r_k the probability that a sample belongs to component k: ``counts`` [components], the mean of r_k;
    ``sums`` [components, features], the mean of r_k x; ``squares``, the mean of r_k x^2. Weights are the counts, means
    are sums / counts, and variances are squares / counts - means^2 plus ``floor``. Averaged statistics are the
    statistics of the joint data, so variances stay positive. The first variances are 1. A mean far from 0 costs digits:
    centre the data first.

    Source: FSP, sections 2.2 and 6.1 (GMM).
    """

    scores: ClassVar[Scores] = "any"
    """Mean log-likelihood; as it is of densities, it may be above 0."""

    components: PositiveInt = 8
    """Number of Gaussians."""

    floor: Positive = 1e-3
    """Constant that is added to every variance."""

    def model(self) -> nn.Module:
        import torch

        means = random_centres(self.components, self.source.shape().features, self.spread)
        counts = torch.full((self.components,), 1 / self.components)
        share = counts[:, None]
        return statistics_model(counts=counts, sums=share * means, squares=share * (1 - self.floor + means.square()))

    def expect(self, statistics: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights, means, variances = self.parameters(statistics)
        apart = (inputs[:, None] - means).square() / variances
        logs = weights.log() - (apart + (2 * math.pi * variances).log()).sum(dim=2) / 2
        likelihood = logs.logsumexp(dim=1)
        members = (logs - likelihood[:, None]).exp()
        counts, sums = members.mean(dim=0), members.T @ inputs / len(inputs)
        squares = members.T @ inputs.square() / len(inputs)
        kept, squares = keep_empty(counts, squares, variances - self.floor + means.square())
        counts, sums = keep_empty(counts, sums, means)
        return -likelihood, {"counts": kept, "sums": sums, "squares": squares}

    def parameters(self, statistics: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Weights [components], means and variances [components, features], by the M-step."""
        counts = statistics["counts"].clamp(min=SMALLEST)
        means = centres_of(statistics)
        variances = statistics["squares"] / counts[:, None] - means.square()
        return counts / counts.sum(), means, variances.clamp(min=0) + self.floor
