"""A `DataLoader` whose workers stay from order to order.

One that is made anew for each order starts its workers each time, and nothing is fetched while the silo waits for the
next order. This one has a batch sampler without an end, fed order by order. Workers begin with the samples that come
next if the next order is as large as the last two, which under a balancer that has settled it is. What was fetched in
vain is dropped, and what is not begun yet is not begun.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_int64
from itertools import chain, islice
from multiprocessing.sharedctypes import RawValue
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, default_collate

T = TypeVar("T")

Collate = Callable[[list[Any]], Any]


class Piece(NamedTuple):
    """Samples that are fetched together.

    Args:
        seed: of torch, NumPy and Python's ``random`` meanwhile; it goes by where the silo is in its data.
        rows: their numbers.
    """

    seed: int
    rows: list[int]


class _Request(NamedTuple):
    """A piece, or nothing to do; void once there is a later generation."""

    generation: int
    piece: Piece | None


def fetch(dataset: Any, rows: list[int], collate: Collate) -> Any:
    """The batch of some samples, read in one go where the data set can do that, as a `DataLoader` does it."""
    many = getattr(dataset, "__getitems__", None)
    return collate(many(rows) if many else [dataset[row] for row in rows])


class LastingLoader(Generic[T]):
    """Batches of a map-style data set, fetched by worker processes that stay.

    Workers work on a copy of the data set as it is at the first order.

    Args:
        dataset: map-style.
        options: of `torch.utils.data.DataLoader`, with one worker at least; without those that say what a batch is.
    """

    def __init__(self, dataset: Dataset[Any], options: Mapping[str, Any]) -> None:
        own = dict(options)
        collate = own.pop("collate_fn", None) or default_collate
        # Results have to come in the order of requests, and workers that failed must not be asked again.
        for name in ("in_order", "persistent_workers"):
            own.pop(name, None)
        own.setdefault("generator", torch.Generator())  # else the first order would draw from torch's
        self._spare = int(own["num_workers"])
        self._feed = _Feed()
        asked = cast(Dataset[Any], _Asked(dataset, collate, self._feed.current))
        self._loader = DataLoader(asked, batch_sampler=cast(Any, self._feed), collate_fn=_as_it_is, **own)
        self._results: Iterator[Any] | None = None
        self._size = 0

    def order(self, walk: Iterator[Piece], count: int) -> Iterator[T]:
        """The batches of the next ``count`` pieces; workers begin now.

        Args:
            walk: the order's pieces, and all that would follow.
            count: pieces of the order.
        """
        pieces = islice(walk, count + self._spare)
        first = next(pieces, None)
        if first is None:
            return iter(())
        size, self._size = self._size, len(first.rows)
        steady = size in (0, self._size)
        if self._results is None:
            self._feed.forget()
        self._feed.turn_to(chain([first], pieces if steady else islice(pieces, count - 1)))
        if self._results is None:
            self._results = iter(self._loader)
        return (self._next() for _ in range(count))

    def _next(self) -> T:
        assert self._results is not None, "an order makes it"
        while True:
            wanted = self._feed.answered()
            try:
                found = next(self._results)
            except BaseException:
                # A worker is gone, and what the others have fetched with it; the next order starts new ones.
                self._results = None
                raise
            if wanted:
                if isinstance(found, _Failure):
                    found.error.reraise()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return cast(T, found)


class KeptLoader:
    """The `LastingLoader` of the last order, for as long as orders read the same data set in the same way.

    The same is the same object, whose attributes are what they were, and those of data sets in it. What happens inside
    a list or an array cannot be seen at a glance.
    """

    def __init__(self) -> None:
        self._made: tuple[list[Any], Mapping[str, Any], LastingLoader[Any]] | None = None

    def of(self, dataset: Dataset[Any], options: Mapping[str, Any]) -> LastingLoader[Any]:
        """The loader of a data set, see `LastingLoader`; another than the last one's ends the last one's workers."""
        parts = _parts(dataset)
        if self._made is None or not _alike(self._made[0], parts) or self._made[1] != options:
            self._made = None  # its workers go before others come
            self._made = parts, dict(options), LastingLoader(dataset, options)
        return self._made[2]


def _parts(dataset: Dataset[Any]) -> list[Any]:
    """A data set, its attributes, the data sets among these, and their attributes."""
    found: list[Any] = [dataset]
    looked_into: set[int] = set()  # some have one another
    for part in found:
        if isinstance(part, Dataset) and id(part) not in looked_into:
            looked_into.add(id(part))
            found += vars(part).values()
    return found


def _alike(before: list[Any], now: list[Any]) -> bool:
    """Whether all parts are the same objects, or equal where they are numbers or text."""
    plain = (int, float, str, bytes)
    return len(before) == len(now) and all(
        one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)
        for one, other in zip(before, now, strict=True)
    )


class _Feed(Iterator[_Request]):
    """A batch sampler without an end: hands out what is to be fetched, and no work where nobody knows what."""

    def __init__(self) -> None:
        self.current = RawValue(c_int64, 0)
        self._coming: Iterator[Piece] = iter(())
        self._asked: deque[_Request] = deque()

    def __next__(self) -> _Request:
        request = _Request(self.current.value, next(self._coming, None))
        self._asked.append(request)
        return request

    def turn_to(self, pieces: Iterator[Piece]) -> None:
        """Go on with these, of which the first may have been asked for; if others have been, these are void."""
        waiting = [request.piece for request in self._asked if self._wanted(request)]
        first = list(islice(pieces, len(waiting)))
        if waiting[: len(first)] == first:
            self._coming = pieces
        else:
            self.current.value += 1
            self._coming = chain(first, pieces)

    def answered(self) -> bool:
        """Strike out the oldest request; returns whether its answer is wanted."""
        return self._wanted(self._asked.popleft())

    def forget(self) -> None:
        """Nothing that was asked for will come."""
        self._asked.clear()

    def _wanted(self, request: _Request) -> bool:
        return request.piece is not None and request.generation == self.current.value


class _Failure:
    """A piece that could not be fetched; torch would raise an error that is not packed, wanted or not."""

    def __init__(self, error: ExceptionWrapper) -> None:
        self.error = error


class _Asked:
    """The data set in a worker: answers requests, unless they are void by now."""

    def __init__(self, dataset: Dataset[Any], collate: Collate, current: Any) -> None:
        self._dataset = dataset
        self._collate = collate
        self._current = current

    def __getitems__(self, request: _Request) -> Any:
        if request.piece is None or request.generation != self._current.value:
            return None
        seed, rows = request.piece
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            return fetch(self._dataset, rows, self._collate)
        except Exception:  # told where it matters: nobody may want this piece any more
            where = "in a worker that fetches samples"
            return _Failure(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]


def _as_it_is(batch: Any) -> Any:
    return batch
