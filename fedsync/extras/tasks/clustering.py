"""Clustering by additive statistics: k-means and fuzzy c-means."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from fedsync.extras.tasks.em_training import StatisticsTask, centres_of, keep_empty, random_centres, statistics_model
from fedsync.policies.schema import PositiveInt, register

if TYPE_CHECKING:
    from torch import Tensor, nn

_NEAREST = 1e-12


@dataclass(frozen=True, slots=True)
class _Clusters(StatisticsTask):
    """Base of clustering tasks.

    Statistics: ``counts`` [clusters], the mean membership, and ``sums`` [clusters, features], the mean of membership
    times x.
    """

    clusters: PositiveInt = 8
    """Number of clusters."""

    def model(self) -> nn.Module:
        import torch

        centres = random_centres(self.clusters, self.source.shape().features, self.spread)
        counts = torch.full((self.clusters,), 1 / self.clusters)
        return statistics_model(counts=counts, sums=counts[:, None] * centres)

    def expect(self, statistics: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        centres = centres_of(statistics)
        # Not by |x|^2 - 2 x c + |c|^2, which loses digits by cancellation.
        distances = torch.cdist(inputs, centres, compute_mode="donot_use_mm_for_euclid_dist").square()
        losses, members = self.members(distances)
        counts, sums = members.mean(dim=0), members.T @ inputs / len(inputs)
        counts, sums = keep_empty(counts, sums, centres)
        return losses, {"counts": counts, "sums": sums}

    @abstractmethod
    def members(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of each sample, [n], and its memberships, [n, clusters], from squared distances [n, clusters]."""


@register("k-means")
@dataclass(frozen=True, slots=True)
class KMeansTask(_Clusters):
    """K-means clustering. The loss is the mean squared distance to the nearest centre (inertia per sample).

    Source: FSP, section 2.2.
    """

    def members(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        """Assign each sample fully to the nearest centre; ties go to the first."""
        from torch.nn.functional import one_hot

        losses, nearest = distances.min(dim=1)
        return losses, one_hot(nearest, self.clusters).to(distances.dtype)


@register("fuzzy-c-means")
@dataclass(frozen=True, slots=True)
class FuzzyTask(_Clusters):
    """Fuzzy c-means clustering: each sample belongs to all clusters, more to nearer clusters.

    A membership is ``u_k = 1 / sum_j (d_k / d_j)^(2 / (m - 1))`` with distances d. Statistics and loss use memberships
    to the power of m, ``fuzziness``: the loss is ``sum_k u_k^m d_k^2``.

    Source: FSP, section 6.1 (FCM); the memberships are Bezdek's.
    """

    fuzziness: Annotated[float, Gt(1)] = 2.0
    """Exponent m, above 1: larger values make clusters share samples more. Values close to 1 give k-means."""

    def members(self, distances: Tensor) -> tuple[Tensor, Tensor]:
        near = distances.clamp(min=_NEAREST).log() / (1 - self.fuzziness)
        members = near.softmax(dim=1) ** self.fuzziness
        return (members * distances).sum(dim=1), members
