"""`steps`: the batches of one order, for the training loop of a Flower ClientApp; `untimed`: what is none of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import BatchSampler, DataLoader

from fedsync.common.errors import ConfigError

T = TypeVar("T")


class CountsSteps(Protocol):
    """The order that a message brings; see `fedsync.train.guests.guest_clientapp`."""

    max_steps: int
    batch_size: int
    sized: bool
    """Whether its batches are known to be of that size; set here."""

    def counted(self, loader: object, batches: Iterator[T]) -> Iterator[T]:
        """The batches of ``loader``, without end, up to where the order ends."""

    def untimed(self) -> AbstractContextManager[None]:
        """Around what is no training."""


def steps(msg: Any, loader: Iterable[T]) -> Iterable[T]:
    """The loader's batches, as large as the order that ``msg`` brings says, and as many as it has steps.

    A `DataLoader` gets ``batch-size`` in the place of its own, where the batches are PyTorch's `BatchSampler`'s. Other
    iterables, and loaders whose batch sampler has a rule of its own, have to give batches of that size by themselves.
    The loop ends after ``max-steps``, at the deadline, or when the server says so; a loader that is shorter begins
    again. What goes through here is counted and timed step by step. Where no order is behind the message, as under
    other strategies than FedSync, it is the loader as it is.

    Args:
        msg: the ``flwr.app.Message`` that the app's training function got.
        loader: batches, usually a `torch.utils.data.DataLoader`; its attributes can still be had from what is returned,
            and its length is that of the order: the most steps, and once it has ended those that were done.

    Raises:
        ConfigError: at the second loop over one order, or where the loader has no batch.
    """
    order = _order_of(msg)
    if order is None:
        return loader
    sized = _of_size(loader, order.batch_size)
    order.sized = sized is not None
    return _OrderBatches(order, loader if sized is None else sized)


def untimed(msg: Any) -> AbstractContextManager[None]:
    """Around what is done between two of the `steps` and is no training, such as a validation.

    As `fedsync.client.Work.untimed`; where no order is behind the message, it does nothing.
    """
    order = _order_of(msg)
    return nullcontext() if order is None else order.untimed()


def _order_of(msg: Any) -> CountsSteps | None:
    order: CountsSteps | None = getattr(msg.content.get("config"), "order", None)
    return order


def _of_size(loader: Iterable[T], size: int) -> Iterable[T] | None:
    """The loader with batches of this size; None where nobody knows how it makes them."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return None
    own = loader.batch_sampler
    if not isinstance(own, BatchSampler) or type(own).__iter__ is not BatchSampler.__iter__:
        return None
    if own.batch_size == size:
        return loader
    sized = copy(loader)
    # A loader that is made lets nobody set these; its workers, if they stay, are those of the other size.
    made = BatchSampler(own.sampler, size, own.drop_last)
    vars(sized).update(batch_size=size, batch_sampler=made, _iterator=None)
    return sized


class _OrderBatches(Generic[T]):
    """A loader that ends where the order does."""

    def __init__(self, order: CountsSteps, loader: Iterable[T]) -> None:
        self._order = order
        self._loader = loader
        self._done: int | None = None

    def __iter__(self) -> Iterator[T]:
        done = 0
        try:
            for done, batch in enumerate(self._order.counted(self._loader, _again(self._loader)), start=1):  # noqa: B007
                yield batch
        finally:
            self._done = done

    def __len__(self) -> int:
        return self._order.max_steps if self._done is None else self._done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _again(loader: Iterable[T]) -> Iterator[T]:
    """The batches of one pass after another; of one pass where the loader cannot begin again."""
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
            raise ConfigError("fedsync.client.steps", problem, "Give it one; drop_last leaves none of few samples")
