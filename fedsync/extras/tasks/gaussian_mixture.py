"""Gaussian mixtures with diagonal covariances, by additive statistics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedsync.extras.tasks.em_training import (
    SMALLEST,
    Statistics,
    StatisticsTask,
    centres_of,
    keep_empty,
    random_centres,
)
from fedsync.policies.schema import Positive, PositiveInt


@dataclass(frozen=True, slots=True)
class MixtureTask(StatisticsTask):
    """Gaussian mixture. The loss is the negative log-likelihood of a sample.

    Statistics, with r_k the probability that a sample belongs to component k: ``counts`` [components], the mean of r_k;
    ``sums`` [components, features], the mean of r_k x; ``squares``, the mean of r_k x^2. Weights are the counts, means
    are sums / counts, and variances are squares / counts - means^2 plus ``floor``. Averaged statistics are the
    statistics of the joint data, so variances stay positive. The first variances are 1. A mean far from 0 costs digits:
    centre the data first.

    Source: FSP, sections 2.2 and 6.1 (GMM).
    """

    components: PositiveInt = 8
    spread: float = 1.0
    floor: Positive = 1e-3

    def model(self) -> nn.Module:
        means = random_centres(self.components, self.source.shape().features, self.spread)
        counts = torch.full((self.components,), 1 / self.components)
        share = counts[:, None]
        return Statistics(counts=counts, sums=share * means, squares=share * (1 - self.floor + means.square()))

    def expect(self, statistics: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        weights, means, variances = self.parameters(statistics)
        apart = (inputs[:, None] - means).square() / variances
        logs = torch.log(weights) - (apart + torch.log(2 * math.pi * variances)).sum(dim=2) / 2
        likelihood = torch.logsumexp(logs, dim=1)
        members = torch.exp(logs - likelihood[:, None])
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
