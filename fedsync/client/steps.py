"""Helpers for a ClientApp's training loop: `steps` yields the order's batches, `untimed` excludes code from timing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from fedsync.common.errors import ConfigError

T = TypeVar("T")


class CountsSteps(Protocol):
    """Step counter of the order that a message brings; see `fedsync.train.guests.guest_clientapp`."""

    max_steps: int
    batch_size: int
    sized: bool  # whether batches are known to have this size; set here

    def counted(self, loader: object, batches: Iterator[T]) -> Iterator[T]: ...

    def untimed(self) -> AbstractContextManager[None]: ...


def steps(msg: Any, loader: Iterable[T]) -> Iterable[T]:
    """Return the loader's batches with the batch size and the number of steps of the order in ``msg``.

    A `DataLoader` gets the order's ``batch-size`` if its batches come from PyTorch's `BatchSampler`: a batch at the end
    of a pass is then filled with samples of the next pass, except from a stream with a ``worker_init_fn``. A loader
    that has this size already stays as it is, so an order of one pass is a pass of Flower's; its shorter last batch
    counts in full. Other iterables, and loaders with their own batch sampler, must yield batches of this size
    themselves. The loop ends after ``max-steps``, at the deadline, or when the server halts the order; a shorter loader
    starts again. Steps are timed. Without an order in the message, as under other strategies, the loader is returned
    unchanged.

    Args:
        msg: the ``flwr.app.Message`` of the app's training function.
        loader: batches, usually a `torch.utils.data.DataLoader`. The result has the loader's attributes; its length is
            the order's maximum steps, and after the order the number of steps done.

    Raises:
        ConfigError: this is the second loop over one order, or the loader has no batch.
    """
    order = _order_of(msg)
    if order is None:
        return loader
    sized = _of_size(loader, order.batch_size)
    order.sized = sized is not None
    return _OrderBatches(order, loader, loader if sized is None else sized)


def untimed(msg: Any) -> AbstractContextManager[None]:
    """Context for work between two of the `steps` that is no training, such as a validation. See
    `fedsync.client.Work.untimed`; it does nothing without an order in the message.
    """
    order = _order_of(msg)
    return nullcontext() if order is None else order.untimed()


def _order_of(msg: Any) -> CountsSteps | None:
    order: CountsSteps | None = getattr(msg.content.get("config"), "order", None)
    return order


def _of_size(loader: Iterable[T], size: int) -> Iterable[T] | None:
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    own = loader.batch_sampler
    if not isinstance(own, BatchSampler) or type(own).__iter__ is not BatchSampler.__iter__:
        return None
    if own.batch_size == size:
        return loader
    sized = copy(loader)
    # A DataLoader forbids setting these. Its persistent workers, which belong to the old size, are not reused.
    made = BatchSampler(_Passes(own.sampler), size, own.drop_last)
    vars(sized).update(batch_size=size, batch_sampler=made, _iterator=None)
    if isinstance(loader.dataset, IterableDataset) and not loader.worker_init_fn:
        vars(sized)["dataset"] = _Passes(loader.dataset)
    return sized


class _Passes(Sampler[int]):
    """Samples of pass after pass over a loader's sampler or stream, so that a pass ends without a smaller batch."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[int]:
        empty = False
        while not empty:
            empty = True
            for row in self._sampler:
                empty = False
                yield row

    def __len__(self) -> int:
        return len(self._sampler)


class _OrderBatches(Generic[T]):
    """Loader that ends with the order."""

    def __init__(self, order: CountsSteps, own: Iterable[T], loader: Iterable[T]) -> None:
        self._order, self._own, self._loader = order, own, loader
        self._done: int | None = None

    def __iter__(self) -> Iterator[T]:
        done = 0
        try:
            for done, batch in enumerate(self._order.counted(self._own, _again(self._loader)), start=1):  # noqa: B007
                yield batch
        finally:
            self._done = done

    def __len__(self) -> int:
        return self._order.max_steps if self._done is None else self._done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if name == "dataset" else self._loader, name)


def _again(loader: Iterable[T]) -> Iterator[T]:
    once = False
    while not once:
        empty = True
        batches = iter(loader)
        once = batches is loader
        for batch in batches:
            empty = False
            yield batch
        if empty:
            problem = "the loader has no batch"
            raise ConfigError("fedsync.client.steps", problem, "Give it more samples, or remove drop_last")
