"""Synthetic tables with a known truth: blobs, sparse rows with a linear rule, and low-rank ratings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedsync.common.rng import Stream, generator
from fedsync.extras.readers.samples import DataShape, Pairs, Samples, Source
from fedsync.policies.schema import NonNegative, PositiveInt, Share, register


@register("blobs")
@dataclass(frozen=True, slots=True)
class BlobsSource(Source):
    """Points around random centres.

    Points are float32 [n, features], and normal around their centre; the class is the index of the centre. Blobs
    overlap if ``apart`` is 1, and hardly if it is 5.
    """

    samples: PositiveInt = 2000
    """Number of points, over all silos; the blobs alternate."""

    blobs: PositiveInt = 5
    """Number of centres."""

    features: PositiveInt = 4
    """Number of dimensions of a point."""

    apart: NonNegative = 4.0
    """Standard deviation of the centres; the standard deviation of points around a centre is 1."""

    def shape(self) -> DataShape:
        return DataShape((self.features,), self.blobs)

    def read(self) -> tuple[Samples, Samples | None]:
        rng = generator(0, Stream.DATA, "blobs")
        centres = rng.normal(0, self.apart, (self.blobs, self.features))
        labels = np.arange(self.samples, dtype=np.int64) % self.blobs
        points = centres[labels] + rng.normal(0, 1, (self.samples, self.features))
        return Samples(points.astype(np.float32), labels), None


@register("sparse")
@dataclass(frozen=True, slots=True)
class SparseSource(Source):
    """Sparse rows of many features, with a linear target of ``informative`` features.

    The frequency of feature j is proportional to 1 / (j + 1): some features are common and most are rare. A value is
    1 / sqrt(nonzeros). In the truth vector, ``informative`` of the more common features are not zero. Targets are
    ``truth * row + noise``, or classes: 1 where this number is above its median. A feature drawn twice counts twice.
    """

    samples: PositiveInt = 2000
    """Number of rows, over all silos."""

    features: PositiveInt = 10_000
    """Number of columns."""

    nonzeros: PositiveInt = 20
    """Number of non-zero values in a row."""

    informative: PositiveInt = 100
    """Number of features that determine the target."""

    noise: NonNegative = 0.1
    """Standard deviation of the noise, relative to the standard deviation of the noiseless target."""

    target: Literal["class", "number"] = "class"
    """Kind of target: two classes, or a number."""

    def shape(self) -> DataShape:
        return DataShape((self.features,), 2 if self.target == "class" else 0, sparse=True)

    def read(self) -> tuple[Samples, Samples | None]:
        rng = generator(0, Stream.DATA, "sparse")
        frequency = 1 / np.arange(1, self.features + 1)
        shape = (self.samples, self.nonzeros)
        columns = rng.choice(self.features, size=shape, p=frequency / frequency.sum()).astype(np.int64)
        values = np.full(shape, 1 / np.sqrt(self.nonzeros), dtype=np.float32)
        truth = np.zeros(self.features)
        counting = min(self.informative, self.features)
        truth[rng.permutation(min(2 * counting, self.features))[:counting]] = rng.normal(0, 1, counting)
        said = (truth[columns] * values).sum(axis=1)
        said = (said - said.mean()) / max(said.std(), 1e-12) + rng.normal(0, self.noise, self.samples)
        targets = said.astype(np.float32) if self.target == "number" else (said > np.median(said)).astype(np.int64)
        return Samples(Pairs(columns, values, self.features), targets), None


@register("ratings")
@dataclass(frozen=True, slots=True)
class RatingsSource(Source):
    """Users' ratings of items; the share ``known`` of them is known, and the true ratings have a low ``rank``.

    Ratings are float32 [users, items], NaN if unknown; targets are 0. A rating is the product of a user vector and an
    item vector of ``rank`` values, plus noise. Every user has at least one known rating. With ``non_negative``, vectors
    have absolute values, whose products have a deviation of 0.77, and ratings below 0 become 0.
    """

    users: PositiveInt = 500
    """Number of users; a user is a row and a sample."""

    items: PositiveInt = 40
    """Number of items, which are the columns."""

    rank: PositiveInt = 3
    """Rank of the matrix of true ratings."""

    known: Share = 0.5
    """Share of ratings that are known."""

    noise: NonNegative = 0.1
    """Standard deviation of the noise; the standard deviation of the true ratings is 1."""

    non_negative: bool = False
    """Whether the true vectors have no negative values, so that no rating is below 0."""

    def shape(self) -> DataShape:
        return DataShape((self.items,), 1)

    def read(self) -> tuple[Samples, Samples | None]:
        rng = generator(0, Stream.DATA, "ratings")
        users, items = rng.normal(0, 1, (self.users, self.rank)), rng.normal(0, 1, (self.items, self.rank))
        if self.non_negative:
            users, items = np.abs(users), np.abs(items)
        ratings = users @ items.T / np.sqrt(self.rank) + rng.normal(0, self.noise, (self.users, self.items))
        if self.non_negative:
            ratings = np.maximum(ratings, 0)
        known = rng.random(ratings.shape) < self.known
        known[np.arange(self.users), rng.integers(self.items, size=self.users)] = True
        cells = np.where(known, ratings, np.nan).astype(np.float32)
        return Samples(cells, np.zeros(self.users, dtype=np.int64)), None
