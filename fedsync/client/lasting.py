"""`DataLoader` whose workers persist between orders (the server's requests for local training).

A new loader per order would restart its workers each time, and prefetch nothing while the silo waits for its next
order. This loader has an endless batch sampler that gets its batches order by order. If the last two orders had the
same batch size, workers start to fetch the next samples. Wrong prefetches are dropped, and pending requests for them
are skipped.
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
    """Samples that are fetched together, with a seed for torch, NumPy and ``random`` from the data position."""

    seed: int
    rows: list[int]


class _Request(NamedTuple):
    generation: int
    piece: Piece | None


def fetch(dataset: Any, rows: list[int], collate: Collate) -> Any:
    many = getattr(dataset, "__getitems__", None)
    return collate(many(rows) if many else [dataset[row] for row in rows])


class LastingLoader(Generic[T]):
    """Loader of batches of a map-style data set. Its workers persist, and keep the data set as it was at their start.
    ``options`` are those of `torch.utils.data.DataLoader`, with at least one worker, and none that defines batches.
    """

    def __init__(self, dataset: Dataset[Any], options: Mapping[str, Any]) -> None:
        own = dict(options)
        collate = own.pop("collate_fn", None) or default_collate
        # Results must come in the order of requests, and failed workers must not be reused.
        for name in ("in_order", "persistent_workers"):
            own.pop(name, None)
        own.setdefault("generator", torch.Generator())  # else the first order would draw from torch's generator
        self._spare = int(own["num_workers"])
        self._feed = _Feed()
        asked = cast(Dataset[Any], _Asked(dataset, collate, self._feed.current))
        self._loader = DataLoader(asked, batch_sampler=cast(Any, self._feed), collate_fn=_as_it_is, **own)
        self._results: Iterator[Any] | None = None
        self._size = 0

    def order(self, walk: Iterator[Piece], count: int) -> Iterator[T]:
        """Return the batches of the next ``count`` pieces of ``walk``; workers start at once, also on later pieces."""
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
                # A worker died, and the prefetched data are lost; the next order starts new workers.
                self._results = None
                raise
            if wanted:
                if isinstance(found, _Failure):
                    found.error.reraise()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                return cast(T, found)


class KeptLoader:
    """Cache of the last order's `LastingLoader`, reused while orders read the same data set with the same options. A
    data set is the same if it is the same object with unchanged attributes, including data sets among the attributes.
    Changes inside a list or an array are not detected.
    """

    def __init__(self) -> None:
        self._made: tuple[list[Any], Mapping[str, Any], LastingLoader[Any]] | None = None

    def of(self, dataset: Dataset[Any], options: Mapping[str, Any]) -> LastingLoader[Any]:
        parts = _parts(dataset)
        if self._made is None or not _alike(self._made[0], parts) or self._made[1] != options:
            self._made = None  # ends the old workers before new workers start
            self._made = parts, dict(options), LastingLoader(dataset, options)
        return self._made[2]


def _parts(dataset: Dataset[Any]) -> list[Any]:
    found: list[Any] = [dataset]
    looked_into: set[int] = set()  # data sets may refer to each other
    for part in found:
        if isinstance(part, Dataset) and id(part) not in looked_into:
            looked_into.add(id(part))
            found += vars(part).values()
    return found


def _alike(before: list[Any], now: list[Any]) -> bool:
    plain = (int, float, str, bytes)
    return len(before) == len(now) and all(
        one is other or (type(one) is type(other) and isinstance(one, plain) and one == other)
        for one, other in zip(before, now, strict=True)
    )


class _Feed(Iterator[_Request]):
    """Endless batch sampler that yields requests; without known pieces it yields empty requests."""

    def __init__(self) -> None:
        self.current = RawValue(c_int64, 0)
        self._coming: Iterator[Piece] = iter(())
        self._asked: deque[_Request] = deque()

    def __next__(self) -> _Request:
        request = _Request(self.current.value, next(self._coming, None))
        self._asked.append(request)
        return request

    def turn_to(self, pieces: Iterator[Piece]) -> None:
        """Continue with ``pieces``; if their first ones differ from pending requests, the requests become void."""
        waiting = [request.piece for request in self._asked if self._wanted(request)]
        first = list(islice(pieces, len(waiting)))
        if waiting[: len(first)] == first:
            self._coming = pieces
        else:
            self.current.value += 1
            self._coming = chain(first, pieces)

    def answered(self) -> bool:
        return self._wanted(self._asked.popleft())

    def forget(self) -> None:
        self._asked.clear()

    def _wanted(self, request: _Request) -> bool:
        return request.piece is not None and request.generation == self.current.value


class _Failure:
    """Failure to fetch a piece; torch would raise an unwrapped error even for a void request."""

    def __init__(self, error: ExceptionWrapper) -> None:
        self.error = error


class _Asked:
    """Data set in a worker, which answers all requests that are not void."""

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
        except Exception:  # raised later by the consumer, and only if the piece is still wanted
            where = "in a worker that fetches samples"
            return _Failure(ExceptionWrapper(where=where))  # type: ignore[no-untyped-call]


def _as_it_is(batch: Any) -> Any:
    return batch
