"""Matrix factorisation, optionally non-negative, by alternating least squares on additive statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.npz import NpzSource, RatingsNpz
from fedsync.extras.readers.samples import Pairs, Samples, Source
from fedsync.extras.tasks.em_training import StatisticsTask, statistics_model
from fedsync.policies.schema import Chosen, Positive, PositiveInt, register

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.data import TensorDataset

_SWEEPS, _SMALL = 100, 1e-6
"""Limit of coordinate descent sweeps, and the relative change at which the descent has converged."""


@register("factorisation")
@dataclass(frozen=True, slots=True)
class FactorisationTask(StatisticsTask):
    """Matrix factorisation by alternating least squares; a sample is a user, and NaN is an unknown rating.
    The test loss is the mean squared error of ratings that are held out when the users' vectors are computed.

    Ratings r_uj are products of user and item vectors. User vectors stay at their silo. The loss of a user is
    ``sum_j (r_uj - x_u y_j)^2 + ridge |x_u|^2`` over the known ratings. The E-step solves for user vectors, given the
    item vectors. Statistics are ``grams`` [items, factors, factors], the mean of x_u x_u' over users who know item j
    (other users count as 0), and ``products`` [items, factors], the mean of r_uj x_u. The M-step solves
    ``(gram_j + ridge I) y_j = product_j``. Both steps lower the mean loss plus ``ridge |y|^2``.

    The test loss holds out every second known rating of a user, and solves for the user's vector from the others. It is
    0 for a user with one known rating.

    With ``non_negative`` all vector values are at least 0, so ratings are sums of parts without cancellation. The
    statistics are the same; both steps solve their least squares under this constraint, and lower the same loss.

    Source: A-BSP, Table 1 (MF by EM: alternating least squares). NMF is a workload of FSP, section 6.1, trained there
    by gradient descent. Here it is trained by alternating non-negative least squares (Kim and Park, SIAM J. Matrix
    Anal. Appl. 30(2), 2008), which needs sums only.
    """

    source: Annotated[Source, Chosen("data", among=("ratings", "npz"))]
    """Source of the ratings."""

    factors: PositiveInt = 4
    """Length of the vectors of users and items."""

    ridge: Positive = 0.01
    """Strength of the penalty on the vectors."""

    non_negative: bool = False
    """Whether vectors are kept non-negative, for ratings that are not negative."""

    def samples(self) -> Source:
        """Return the source, with missing inputs allowed."""
        npz = self.source
        return RatingsNpz(npz.file, npz.classes) if isinstance(npz, NpzSource) else npz

    def model(self) -> nn.Module:
        import torch

        items = self.source.shape().features
        vectors = self.spread * torch.randn(items, self.factors)
        if self.non_negative:
            vectors = vectors.abs()
        grams = torch.eye(self.factors).repeat(items, 1, 1)
        return statistics_model(grams=grams, products=(1 + self.ridge) * vectors)

    def dataset(self, samples: Samples) -> TensorDataset:
        """Rows of users, float32 [users, items]; raises `ConfigError` for sparse rows, or ratings out of range."""
        from torch.utils.data import TensorDataset

        if isinstance(samples.inputs, Pairs):
            raise ConfigError("task.data", "sparse rows do not say what is unknown", "Choose ratings or npz")
        ratings = samples.dense().flatten(1)
        if self.non_negative and (ratings < 0).any():
            problem = "some ratings are below 0, and non-negative vectors have no such products"
            raise ConfigError("task.data", problem, "Shift the ratings, or leave non_negative out")
        return TensorDataset(ratings)

    def expect(self, statistics: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

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
        asked = known * (known.cumsum(dim=1) % 2 == 0)
        users = self._users(items, ratings * (known - asked), known - asked)
        errors = (ratings - users @ items.T).square() * asked
        return errors.sum(dim=1) / asked.sum(dim=1).clamp(min=1)

    def items(self, statistics: dict[str, Tensor]) -> Tensor:
        """Item vectors, [items, factors], by the M-step."""
        return self._solve(statistics["grams"], statistics["products"])

    def _users(self, items: Tensor, ratings: Tensor, known: Tensor) -> Tensor:
        """User vectors for given item vectors, [users, factors]."""
        import torch

        grams = torch.einsum("uj,ja,jb->uab", known, items, items)
        return self._solve(grams, ratings @ items)

    def _solve(self, grams: Tensor, products: Tensor) -> Tensor:
        """Vectors x, [n, factors], that minimise ``x' (gram + ridge I) x - 2 product' x``, constrained if required.

        Shapes: grams [n, factors, factors], products [n, factors].
        """
        import torch

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
    known = ~inputs.isnan()
    return inputs.where(known, 0.0), known.to(inputs.dtype)
