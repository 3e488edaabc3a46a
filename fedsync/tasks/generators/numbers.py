"""Tables of numbers with a known truth: blobs, sparse rows with a linear rule, and ratings of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedsync.common.rng import Stream, generator
from fedsync.tasks.samples import DataShape, Pairs, Samples


@dataclass(frozen=True, slots=True)
class BlobsSource:
    """Points around centres, float32 [n, features]; which centre is the class.

    Centres are drawn from a normal distribution of deviation ``apart``, points around them with deviation 1.

    Args:
        samples: how many; blobs take turns.
        blobs: number of centres.
        features: dimensions.
        apart: deviation of the centres; at 1 blobs overlap, at 5 they hardly do.
    """

    samples: int = 2000
    blobs: int = 5
    features: int = 4
    apart: float = 4.0

    def shape(self) -> DataShape:
        return DataShape((self.features,), self.blobs)

    def read(self) -> tuple[Samples, Samples | None]:
        rng = generator(0, Stream.DATA, "blobs")
        centres = rng.normal(0, self.apart, (self.blobs, self.features))
        labels = np.arange(self.samples, dtype=np.int64) % self.blobs
        points = centres[labels] + rng.normal(0, 1, (self.samples, self.features))
        return Samples(points.astype(np.float32), labels), None


@dataclass(frozen=True, slots=True)
class SparseSource:
    """Rows of many features of which few are not zero, like the words of an address, with a linear truth.

    Feature j is drawn with a frequency in proportion to 1 / (j + 1), so that some are common and most are rare; its
    value is 1 / sqrt(nonzeros). The truth is a vector in which ``informative`` of the more common features count.
    Targets are 1 where ``truth * row + noise`` is above its median, or that number itself.

    Args:
        samples: how many.
        features: number of columns.
        nonzeros: values a row that are not zero; a feature drawn twice counts twice.
        informative: features that count.
        noise: standard deviation, in units of the truth's own deviation over the rows.
        target: ``class`` or ``number``.
    """

    samples: int = 2000
    features: int = 10_000
    nonzeros: int = 20
    informative: int = 100
    noise: float = 0.1
    target: Literal["class", "number"] = "class"

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


@dataclass(frozen=True, slots=True)
class RatingsSource:
    """Users' ratings of items, float32 [users, items], NaN where a user has not rated; targets are 0.

    A rating is the product of a user's and an item's vector of ``rank`` values, plus noise; each is known with
    probability ``known``, and every user has rated one item at least.

    Args:
        users: rows.
        items: columns.
        rank: of the truth.
        known: share of ratings that are known.
        noise: standard deviation; that of the truth is 1, with ``non_negative`` 0.77.
        non_negative: vectors have the absolute values, and ratings that noise takes below 0 are 0.
    """

    users: int = 500
    items: int = 40
    rank: int = 3
    known: float = 0.5
    noise: float = 0.1
    non_negative: bool = False

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
