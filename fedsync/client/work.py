"""One order, as a silo's own training code sees it: what is asked for, and the batches to do it with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sized
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from fedsync.client.silo_facts import Scalar
from fedsync.common.errors import ConfigError
from fedsync.core.orders import WorkOrder

T = TypeVar("T")
Rows = NDArray[np.int64]

_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
"""Of a `DataLoader`: the order decides these."""


class Steps(Protocol):
    """Counts local steps; see `fedsync.train.pace.Pace`."""

    missized: int
    """Batches so far that have not the order's size."""

    def step(self) -> bool:
        """A step was done; returns whether another may begin."""

    def finish(self) -> None:
        """It was the last."""

    def untimed(self) -> AbstractContextManager[None]:
        """Around what is no training."""


def counted(batches: Iterable[T], steps: Steps, most: int, size: int | None = None) -> Iterator[T]:
    """Batches, each of which is a local step, up to ``most`` or to where ``steps`` says so.

    Args:
        batches: in the loop's order.
        steps: counts them.
        most: steps.
        size: samples that each should have; None where that is known to be so.
    """
    try:
        for done, batch in enumerate(batches, start=1):
            steps.missized += size is not None and not _may_have(batch, size)
            try:
                yield batch
            except GeneratorExit:
                steps.step()  # the loop was left after it had trained on this one
                return
            if not steps.step() or done == most:
                return
    finally:
        steps.finish()


def _may_have(batch: object, samples: int) -> bool:
    """Whether a batch may have so many samples, as far as it, its parts or their first two dimensions tell a length."""
    parts: Iterable[object] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    lengths = {length for part in (batch, *parts) for length in tuple(getattr(part, "shape", ()))[:2]}
    lengths |= {len(part) for part in (batch, *parts) if isinstance(part, list | tuple)}
    return not lengths or samples in lengths


class Work:
    """One order. Its steps are counted where batches are handed out: the loop runs until there are none left.

    Args:
        order: what the server asks for.
        device: where to train.
        state: what the last order left in it.
        examples: training samples that the silo holds.
        draw: sample numbers of the order, int64 [samples].
        begin: starts the clock of the first step.
        fetch: the order's batches of a data set by workers that stay; its options are those of a `DataLoader`.
        config: what the run says to training.

    Attributes:
        batch_size: samples a step.
        max_steps: local steps to do at most.
        learning_rate: for the optimizer.
        seed: of this order, below 2^32; torch, NumPy and Python's ``random`` are seeded with it already.
        round: number of the round, from 1: that of the version that comes of it.
        state: a small dictionary, of what JSON has, that the next order finds again, also after a restart. An order
            that fails leaves it as it was.
        device: where to train.
        config: ``train_config`` of the strategy file or of the ServerApp, as in the ``config`` of Flower's messages.
    """

    def __init__(
        self,
        order: WorkOrder,
        device: torch.device,
        state: MutableMapping[str, Any],
        examples: int,
        draw: Callable[[], Rows],
        begin: Callable[[], Steps],
        fetch: Callable[[Dataset[Any], Mapping[str, Any]], Iterator[Any]],
        config: Mapping[str, Scalar] = MappingProxyType({}),
    ) -> None:
        self.batch_size = order.batch_size
        self.max_steps = order.max_steps
        self.learning_rate = order.learning_rate
        self.seed = order.seed % 2**32  # NumPy, and what builds on it, takes no larger one
        self.round = order.base_version + 1
        self.state = state
        self.device = device
        self.config = config
        self._budget_s = order.budget_s
        self._examples = examples
        self._draw = draw
        self._begin = begin
        self.fetch = fetch
        self._begun_s: float | None = None
        self._steps: Steps | None = None
        self.counts_elsewhere = False
        self.logged: dict[str, list[float | torch.Tensor]] = {}

    @property
    def rows(self) -> Rows:
        """Numbers of the samples to train on, int64 [max_steps * batch_size], in order; no sample twice in a pass."""
        return self._draw()

    @property
    def deadline(self) -> float | None:
        """Seconds that are left of the order's time, from the first batch on; None if it has no limit."""
        if self._budget_s is None:
            return None
        gone_s = 0.0 if self._begun_s is None else perf_counter() - self._begun_s
        return max(0.0, self._budget_s - gone_s)

    def loader(self, dataset: Dataset[T], **options: Any) -> DataLoader[T]:
        """The order's batches of a map-style data set.

        Its batch sampler is the order's: batch size, samples and number of batches are fixed, and the loop over it ends
        when the order does, which may be sooner. Where the silo is in its data goes by what was trained, not by what
        workers fetched ahead. Workers stay from order to order, if the next one reads the same object with the same
        options, and fetch for it while the silo waits. A data set that has got other attributes gets new ones, but what
        code changes inside a list or an array of it they do not see. With ``persistent_workers=False`` they are started
        for each order.

        Args:
            dataset: as many samples as ``setup`` said.
            options: of `torch.utils.data.DataLoader`: ``num_workers``, ``collate_fn``, ``pin_memory`` and so on.

        Raises:
            ConfigError: an option is one that the order decides.
        """
        ours = [name for name in _OURS if name in options]
        if ours:
            problem = f"{', '.join(ours)}: the order decides which samples are in a batch, and how many"
            raise ConfigError("work.loader", problem, "Leave it out")
        if not isinstance(dataset, Sized) or len(dataset) != self._examples:
            problem = f"the data set does not have the {self._examples} samples that setup said"
            raise ConfigError("work.loader", problem, "Give silo.use the same data, or examples=, their number")
        batches = np.split(self.rows, self.max_steps)
        return _OrderLoader(dataset, self, batches, options)

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Batches of one's own, as many as the order wants: each counts as a step of ``batch_size`` samples.

        Raises:
            ConfigError: the order's steps were counted elsewhere already.
        """
        size = None if isinstance(batches, _Lazily) else self.batch_size
        yield from counted(batches, self._begun(), self.max_steps, size)

    def counter(self) -> Generator[None, None, None]:
        """Counts steps where they are done, not where batches are handed out: for loops of other libraries.

        Such a loop may fetch batches long before it trains on them. From this call on `loader` hands out batches and
        counts nothing. The first ``next`` begins the order, each further one says that a step was done; there is no
        further one when the order ends. Close it where the loop ends by itself.
        """
        self.counts_elsewhere = True
        return self._count()

    def _count(self) -> Generator[None, None, None]:
        steps = self._begun()
        try:
            for _ in range(self.max_steps):
                yield
                if not steps.step():
                    return
        finally:
            steps.finish()

    def _begun(self) -> Steps:
        if self._begun_s is not None:
            problem = "there is a second loop over batches of one order"
            raise ConfigError("work.loader, work.batches", problem, "Train in one loop: it has all steps of the order")
        self._begun_s = perf_counter()
        self._steps = self._begin()
        return self._steps

    def untimed(self) -> AbstractContextManager[None]:
        """Around what is done between two batches and is no training, such as a validation.

        A balancer goes by the time of training alone. The order's time, if it has a limit, passes all the same.
        """
        return nullcontext() if self._steps is None else self._steps.untimed()

    def log(self, **figures: float | torch.Tensor) -> None:
        """Note figures of a step; ``loss`` is the training loss. What is told is their means over the order."""
        for name, value in figures.items():
            detached = value.detach() if isinstance(value, torch.Tensor) else value
            self.logged.setdefault(name, []).append(detached)


class _OrderLoader(DataLoader[T]):
    """A `DataLoader` whose batches are an order's."""

    def __init__(self, dataset: Dataset[T], work: Work, batches: list[Rows], options: dict[str, Any]) -> None:
        stay = {"persistent_workers": True} if options.get("num_workers") else {}
        super().__init__(dataset, batch_sampler=[rows.tolist() for rows in batches], **{**stay, **options})
        self._work = work
        self._options = options

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch says its own class, whose protocol this has
        begin = self._by_those_who_stay if self.persistent_workers else super().__iter__
        return begin() if self._work.counts_elsewhere else self._work.batches(_Lazily(begin))

    def _by_those_who_stay(self) -> Iterator[T]:
        return self._work.fetch(self.dataset, self._options)


class _Lazily(Iterable[T]):
    """Begins to iterate when it is iterated: workers start with the order's clock, not before."""

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[T]:
        return self._begin()
