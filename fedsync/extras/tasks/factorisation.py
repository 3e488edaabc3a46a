"""Matrix factorisation, optionally non-negative, by alternating least squares on additive statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.common.errors import ConfigError
from fedsync.extras.tasks.em_training import Statistics, StatisticsTask
from fedsync.policies.schema import Positive, PositiveInt
from fedsync.tasks.samples import Pairs, Samples

_SWEEPS, _SMALL = 100, 1e-6
"""Limit of coordinate descent sweeps, and the relative change at which the descent has converged."""


@dataclass(frozen=True, slots=True)
class FactorisationTask(StatisticsTask):
    """Factorisation of ratings r_uj into products of user and item vectors; a sample is a user's row, NaN if unknown.

    User vectors stay at their silo. The loss of a user is ``sum_j (r_uj - x_u y_j)^2 + ridge |x_u|^2`` over the known
    ratings. The E-step solves for user vectors, given the item vectors. Statistics are ``grams``
    [items, factors, factors], the mean of x_u x_u' over users who know item j (other users count as 0), and
    ``products`` [items, factors], the mean of r_uj x_u. The M-step solves ``(gram_j + ridge I) y_j = product_j``. Both
    steps lower the mean loss plus ``ridge |y|^2``.

    The test loss uses ratings that the user's vector has not seen. The vector is solved for from every other known
    rating, and the loss is the mean squared error of the rest; a user with one known rating has none.

    With ``non_negative`` all vector values are at least 0, so ratings are sums of parts without cancellation. The
    statistics are the same; both steps solve their least squares under this constraint, and lower the same loss.

    Source: A-BSP, Table 1 (MF by EM: alternating least squares). NMF is a workload of FSP, section 6.1, trained there
    by gradient descent. Here it is trained by alternating non-negative least squares (Kim and Park, SIAM J. Matrix
    Anal. Appl. 30(2), 2008), which needs sums only.
    """

    factors: PositiveInt = 4
    ridge: Positive = 0.01
    spread: float = 1.0
    non_negative: bool = False

    def model(self) -> nn.Module:
        items = self.source.shape().features
        vectors = self.spread * torch.randn(items, self.factors)
        if self.non_negative:
            vectors = vectors.abs()
        grams = torch.eye(self.factors).repeat(items, 1, 1)
        return Statistics(grams=grams, products=(1 + self.ridge) * vectors)

    def dataset(self, samples: Samples) -> TensorDataset:
        """Rows of users, float32 [users, items]; raises `ConfigError` for sparse rows, or ratings out of range."""
        if isinstance(samples.inputs, Pairs):
            raise ConfigError("task.data", "sparse rows do not say what is unknown", "Choose ratings or npz")
        ratings = samples.dense().flatten(1)
        if self.non_negative and (ratings < 0).any():
            problem = "some ratings are below 0, and non-negative vectors have no such products"
            raise ConfigError("task.data", problem, "Shift the ratings, or leave non_negative out")
        return TensorDataset(ratings)

    def expect(self, statistics: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        items = self.items(statistics)
        ratings, known = _known(inputs)
        users = self._users(items, ratings, known)
        losses = ((ratings - users @ items.T).square() * known).sum(dim=1) + self.ridge * users.square().sum(dim=1)
        grams = torch.einsum("uj,ua,ub->jab", known, users, users) / len(inputs)
        products = ratings.T @ users / len(inputs)
        return losses, {"grams": grams, "products": products}

    def unseen(self, statistics: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """Mean squared error per user over every other known rating, which the user's vector has not seen."""
        items = self.items(statistics)
        ratings, known = _known(inputs)
        asked = known * (torch.cumsum(known, dim=1) % 2 == 0)
        users = self._users(items, ratings * (known - asked), known - asked)
        errors = (ratings - users @ items.T).square() * asked
        return errors.sum(dim=1) / asked.sum(dim=1).clamp(min=1)

    def items(self, statistics: dict[str, Tensor]) -> Tensor:
        """Item vectors, [items, factors], by the M-step."""
        return self._solve(statistics["grams"], statistics["products"])

    def _users(self, items: Tensor, ratings: Tensor, known: Tensor) -> Tensor:
        """User vectors for given item vectors, [users, factors]."""
        grams = torch.einsum("uj,ja,jb->uab", known, items, items)
        return self._solve(grams, ratings @ items)

    def _solve(self, grams: Tensor, products: Tensor) -> Tensor:
        """Vectors x, [n, factors], that minimise ``x' (gram + ridge I) x - 2 product' x``, constrained if required.

        Shapes: grams [n, factors, factors], products [n, factors].
        """
        grams = grams + self.ridge * torch.eye(self.factors, device=grams.device)
        vectors: Tensor = torch.linalg.solve(grams, products)
        if not self.non_negative:
            return vectors
        # Exact for rows without clipping; other rows need coordinate descent, one value at a time.
        vectors = vectors.clamp(min=0)
        for _ in range(_SWEEPS):
            before = vectors.clone()
            for factor in range(self.factors):
                slope = products[:, factor] - (grams[:, factor] * vectors).sum(dim=1)
                # Rounding under encryption may make a diagonal value smaller than the ridge.
                step = slope / grams[:, factor, factor].clamp(min=self.ridge)
                vectors[:, factor] = (vectors[:, factor] + step).clamp(min=0)
            if (vectors - before).abs().max() <= _SMALL * vectors.max():
                break
        return vectors


def _known(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Ratings with 0 where unknown, and a mask with 1 where known, both [users, items]."""
    known = ~torch.isnan(inputs)
    return torch.where(known, inputs, 0.0), known.to(inputs.dtype)
