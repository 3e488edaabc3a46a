"""Matrix factorisation by alternating least squares, of any or of non-negative vectors, by additive statistics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from fedsync.common.errors import ConfigError
from fedsync.tasks.em_training import Statistics, StatisticsTask
from fedsync.tasks.limits import above, at_least
from fedsync.tasks.samples import Pairs, Samples

_SWEEPS, _SMALL = 100, 1e-6
"""Of coordinate descent, at most; and the change, as a share of the largest value, at which it has come to rest."""


@dataclass(frozen=True, slots=True)
class FactorisationTask(StatisticsTask):
    """Ratings r_uj as products of vectors of users and items: a sample is one user's row, NaN where unknown.

    Silos keep their users' vectors to themselves. The loss of a user is
    ``sum_j (r_uj - x_u y_j)^2 + ridge |x_u|^2`` over the ratings known. In the E-step users' vectors are solved for
    given the items'; statistics are ``grams`` [items, factors, factors], the mean of x_u x_u' over users who know
    item j (others count as 0), and ``products`` [items, factors], of r_uj x_u. The M-step solves
    ``(gram_j + ridge I) y_j = product_j``. Both steps lower the mean loss plus ``ridge |y|^2``.

    The test loss is fair: a user's vector is solved for from every other known rating, and the loss is the mean
    squared error over the rest; a user with one known rating has none.

    With ``non_negative`` no vector has a value below 0, so that ratings are sums of parts and nothing cancels. The
    statistics are the same; both steps solve their least squares under that constraint, and lower the same loss.

    Args:
        factors: length of the vectors.
        ridge: strength of the penalties, above 0.
        spread: items' vectors begin normal around 0 with this deviation; with ``non_negative``, at the absolute values.
        non_negative: keep vectors from being negative; ratings must not be either.

    Source: A-BSP, Table 1 (MF by EM: alternating least squares). NMF is a workload of FSP, section 6.1, where it is
    trained by gradient descent; here by alternating non-negative least squares (Kim and Park, SIAM J. Matrix Anal.
    Appl. 30(2), 2008), which needs sums only.
    """

    factors: int = 4
    ridge: float = 0.01
    spread: float = 1.0
    non_negative: bool = False

    def __post_init__(self) -> None:
        StatisticsTask.__post_init__(self)
        at_least("task.factors", self.factors, 1)
        above("task.ridge", self.ridge, 0)

    def model(self) -> nn.Module:
        """Statistics from which random vectors of items follow."""
        items = self.source.shape().features
        vectors = self.spread * torch.randn(items, self.factors)
        if self.non_negative:
            vectors = vectors.abs()
        grams = torch.eye(self.factors).repeat(items, 1, 1)
        return Statistics(grams=grams, products=(1 + self.ridge) * vectors)

    def dataset(self, samples: Samples) -> TensorDataset:
        """Rows of users, float32 [users, items]. Raises `ConfigError` for sparse rows, or for ratings out of range."""
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
        """Mean squared error of each user over every other known rating, which the user's vector has not seen."""
        items = self.items(statistics)
        ratings, known = _known(inputs)
        asked = known * (torch.cumsum(known, dim=1) % 2 == 0)
        users = self._users(items, ratings * (known - asked), known - asked)
        errors = (ratings - users @ items.T).square() * asked
        return errors.sum(dim=1) / asked.sum(dim=1).clamp(min=1)

    def items(self, statistics: dict[str, Tensor]) -> Tensor:
        """The M-step: items' vectors, [items, factors]."""
        return self._solve(statistics["grams"], statistics["products"])

    def _users(self, items: Tensor, ratings: Tensor, known: Tensor) -> Tensor:
        """Users' vectors given the items', [users, factors]."""
        grams = torch.einsum("uj,ja,jb->uab", known, items, items)
        return self._solve(grams, ratings @ items)

    def _solve(self, grams: Tensor, products: Tensor) -> Tensor:
        """Vectors x that minimise ``x' (gram + ridge I) x - 2 product' x``, under the constraint if there is one.

        Args:
            grams: [n, factors, factors].
            products: [n, factors].

        Returns:
            [n, factors].
        """
        grams = grams + self.ridge * torch.eye(self.factors, device=grams.device)
        vectors: Tensor = torch.linalg.solve(grams, products)
        if not self.non_negative:
            return vectors
        # Where nothing is clipped, that is the solution; elsewhere one value after the other, given all others.
        vectors = vectors.clamp(min=0)
        for _ in range(_SWEEPS):
            before = vectors.clone()
            for factor in range(self.factors):
                slope = products[:, factor] - (grams[:, factor] * vectors).sum(dim=1)
                # Rounding under encryption may leave less on a diagonal than the ridge.
                step = slope / grams[:, factor, factor].clamp(min=self.ridge)
                vectors[:, factor] = (vectors[:, factor] + step).clamp(min=0)
            if (vectors - before).abs().max() <= _SMALL * vectors.max():
                break
        return vectors


def _known(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Ratings with 0 where unknown, and 1 where known, both [users, items]."""
    known = ~torch.isnan(inputs)
    return torch.where(known, inputs, 0.0), known.to(inputs.dtype)
