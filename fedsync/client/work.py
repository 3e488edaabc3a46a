"""Order (one request for local training) as a user's own training code sees it: settings and batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, MutableMapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from time import perf_counter
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedsync.client.app import Scalar
from fedsync.common.errors import ConfigError
from fedsync.core.orders import WorkOrder

T = TypeVar("T")
Rows = NDArray[np.int64]

# Options of a `DataLoader` that the order decides.
_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class Steps(Protocol):
    """Counter of local steps; see `fedsync.train.order_clock.Pace`."""

    missized: int  # number of batches whose size differs from the order's

    def step(self) -> bool: ...

    def finish(self) -> None: ...

    def untimed(self) -> AbstractContextManager[None]: ...


class PrivateSteps(Protocol):
    """Private steps of an order; see `fedsync.train.dp_sgd.private_loop.PrivateLoop`."""

    def take(self, model: nn.Module, optimizer: Optimizer) -> tuple[Optimizer, list[Rows]]: ...

    def handed(self, loader: DataLoader[T], rows: Sequence[Rows]) -> Iterator[T]: ...


def counted(batches: Iterable[T], steps: Steps, most: int, size: int | None = None) -> Generator[T, None, None]:
    """Yield batches and count each as a local step, up to ``most`` steps or until ``steps`` ends the order. ``size`` is
    the expected number of samples per batch; None if it is known to be right.
    """
    try:
        for done, batch in enumerate(batches, start=1):
            steps.missized += size is not None and not _may_have(batch, size)
            try:
                yield batch
            except GeneratorExit:
                steps.step()  # the loop was left after training on this batch
                return
            if not steps.step() or done == most:
                return
    finally:
        steps.finish()


def end_loop(loop: Generator[Any, Any, None] | None) -> None:
    """End a loop over the order's steps, whose iterator training code may keep: its last batch counts, and the clock
    stops. `ConfigError` if a thread is about to take the next batch.
    """
    try:
        if loop is not None:
            loop.close()
    except ValueError as error:
        problem = "the training function returned, and a thread still takes batches of the order"
        raise ConfigError("work.loader, steps", problem, "Wait for the end of the thread") from error


def refuse_unprivate(library: str, wrong: Mapping[str, bool]) -> None:
    """Raise `ConfigError` for the first option, by its name, that is used and has no private steps."""
    for name, used in wrong.items():
        if used:
            problem = f"{library} is used with {name}, which has no private steps"
            raise ConfigError("privacy", problem, "Leave it out, or leave privacy out of the strategy file")


def _may_have(batch: object, samples: int) -> bool:
    """Return whether a batch may have ``samples`` samples, by lengths of its parts and their first two dimensions."""
    parts = tuple(batch.values()) if isinstance(batch, Mapping) else batch
    parts = (batch, *parts) if isinstance(parts, list | tuple) else (batch,)
    lengths = {length for part in parts for length in tuple(getattr(part, "shape", ()))[:2]}
    lengths |= {len(part) for part in parts if isinstance(part, list | tuple)}
    return not lengths or samples in lengths


class Work:
    """Order for training code. Handing out a batch counts as a step; the loop runs until no batch is left.

    Attributes:
        batch_size: samples per step.
        max_steps: largest number of local steps.
        learning_rate: for the optimizer.
        seed: seed of this order, below 2^32; torch, NumPy and Python's ``random`` are already seeded with it.
        round: number of the round, from 1: the model version that it produces.
        state: small JSON dictionary that the next order receives, also after a restart; a failed order leaves it
            unchanged.
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
        fetch: Callable[[Dataset[Any], Mapping[str, Any], int], Iterator[Any]],
        config: Mapping[str, Scalar] = MappingProxyType({}),
        private: PrivateSteps | None = None,
    ) -> None:
        self.batch_size = order.batch_size
        self.max_steps = order.max_steps
        self.learning_rate = order.learning_rate
        self.seed = order.seed % 2**32  # NumPy, and libraries that use it, accept no larger seed
        self.round = order.base_version + 1
        self.state = state
        self.device = device
        self.config = config
        self._budget_s = order.budget_s
        self._examples = examples
        self._draw = draw
        self._begin = begin
        self.fetch = fetch
        self._private = private
        self._begun_s: float | None = None
        self._steps: Steps | None = None
        self.loop: Generator[Any, Any, None] | None = None  # over the order's steps
        self.counts_elsewhere = False
        self.trained = 0  # finished steps, if they are counted elsewhere: the first batch of a further pass
        self.logged: dict[str, list[torch.Tensor]] = {}

    @property
    def is_private(self) -> bool:
        """Whether each step must be private: the strategy file has ``privacy: {kind: dp-sgd}``."""
        return self._private is not None

    @property
    def rows(self) -> Rows:
        """Sample numbers to train on, int64 [max_steps * batch_size], in order; no sample repeats within a pass."""
        return self._draw()

    @property
    def deadline(self) -> float | None:
        """Seconds left of the order's time, counted from the first batch; None without a time limit."""
        if self._budget_s is None:
            return None
        gone_s = 0.0 if self._begun_s is None else perf_counter() - self._begun_s
        return max(0.0, self._budget_s - gone_s)

    def loader(self, dataset: Dataset[T], **options: Any) -> DataLoader[T]:
        """Return a loader of the order's batches of a map-style data set.

        The order fixes batch size, samples and number of batches. The loop ends with the order, possibly early. The
        silo's data position follows the samples trained, not the samples prefetched. Workers persist and prefetch while
        the silo waits, if the next order reads the same object with the same options. A data set with changed
        attributes gets new workers; workers do not see changes inside its lists or arrays. With
        ``persistent_workers=False``, workers start anew for each order.

        Args:
            dataset: must have as many samples as ``setup`` reported.
            options: of `torch.utils.data.DataLoader`: ``num_workers``, ``collate_fn``, ``pin_memory`` and so on.

        Raises:
            ConfigError: the order decides one of the options, or the data set has another number of samples.
        """
        ours = [name for name in _OURS if name in options]
        if ours:
            problem = f"{', '.join(ours)}: the order decides which samples are in a batch, and how many"
            raise ConfigError("work.loader", problem, "Leave it out")
        if isinstance(dataset, IterableDataset):
            problem = "a stream has no samples by number"
            raise ConfigError("work.loader", problem, "Loop over work.batches(DataLoader(stream, work.batch_size))")
        if not isinstance(dataset, Sized) or len(dataset) != self._examples:
            problem = f"the data set does not have the {self._examples} samples that setup said"
            raise ConfigError("work.loader", problem, "Give silo.use the same data, or examples=, their number")
        batches = np.split(self.rows, self.max_steps)
        return _OrderLoader(dataset, self, batches, options)

    def private(
        self, model: nn.Module, optimizer: Optimizer, loader: DataLoader[T]
    ) -> tuple[nn.Module, Optimizer, DataLoader[T]]:
        """Return model, optimizer and loader for a loop with differential privacy.

        Batches are drawn by Poisson sampling, so their sizes differ. A step of the optimizer clips the gradient of each
        row, adds noise, and divides by ``batch_size``. Do one step for each batch. The loss is a mean over rows that do
        not depend on each other. Without ``dp-sgd`` in the strategy file, all three are returned unchanged.

        Args:
            model: the module of ``silo.use``, or a module that holds it and trains nothing else.
            optimizer: new in each order.
            loader: from `loader`; it has the same private batches as the returned loader from now on.

        Raises:
            ConfigError: an argument is not as described.
        """
        if self._private is None:
            return model, optimizer, loader
        if not isinstance(loader, _OrderLoader):
            raise ConfigError("privacy", "the loader of work.private is not from work.loader", "Give work.loader(data)")
        stepping, rows = self._private.take(model, optimizer)
        return model, stepping, loader.drawn(rows, self._private)

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield a user's own batches, as many as the order has steps; each counts as ``batch_size`` samples. Raises
        `ConfigError` if the order already has a loop over its steps.
        """
        size = None if isinstance(batches, _Lazily) else self.batch_size
        self.loop = counted(batches, self.begun(), self.max_steps, size)
        yield from self.loop

    def counter(self) -> Generator[None, object, None]:
        """Return a step counter for loops of other libraries, which may fetch batches long before training on them.

        After this call `loader` hands out batches without counting; a second pass continues after the last finished
        step. The first ``next`` starts the order, each further ``next`` counts a finished step, and `StopIteration`
        ends the order. Close it if the loop ends earlier. In a private run, call `private` before the first batch, and
        fetch no batch before the step on the last one.
        """
        self.counts_elsewhere = True
        self.loop = self._count()
        return self.loop

    def _count(self) -> Generator[None, object, None]:
        steps = self.begun()
        try:
            for _ in range(self.max_steps):
                batch = yield  # None by ``next``, from a library that does not hand it over
                steps.missized += not (self.is_private or _may_have(batch, self.batch_size))
                self.trained += 1
                if not steps.step():
                    return
        finally:
            steps.finish()

    def begun(self) -> Steps:
        """Steps of the order, whose clock starts; `ConfigError` if it has started already."""
        if self._begun_s is not None:
            problem = "there is a second loop over batches of one order"
            remedy = "Train in one loop, which has all steps of the order, without opaque=True"
            raise ConfigError("work.loader, work.batches", problem, remedy)
        self._begun_s = perf_counter()
        self._steps = self._begin()
        return self._steps

    def untimed(self) -> AbstractContextManager[None]:
        """Context for work between two batches that is no training, such as a validation. Only training time affects a
        balancer. The order's time limit, if any, includes the untimed work.
        """
        return nullcontext() if self._steps is None else self._steps.untimed()

    def log(self, **figures: float | torch.Tensor) -> None:
        """Record metrics of a step; ``loss`` is the training loss. The report has their means over the order."""
        for name, value in figures.items():
            self.logged.setdefault(name, []).append(torch.as_tensor(value).detach().double().mean())


class _Left(list[list[int]]):
    """Batches of an order, of which an iteration yields those after the last step."""

    def __init__(self, batches: Iterable[list[int]], work: Work) -> None:
        super().__init__(batches)
        self._work = work

    def __iter__(self) -> Iterator[list[int]]:
        return islice(super().__iter__(), self._work.trained, None)


class _OrderLoader(DataLoader[T]):
    """`DataLoader` with the batches of an order."""

    def __init__(self, dataset: Dataset[T], work: Work, batches: list[Rows], options: dict[str, Any]) -> None:
        stay = {"persistent_workers": True} if options.get("num_workers") else {}
        left = _Left([rows.tolist() for rows in batches], work)
        super().__init__(dataset, batch_sampler=left, **{**stay, **options})
        self._work = work
        self._options = options
        self._private: DataLoader[T] | None = None

    def drawn(self, rows: Sequence[Rows], steps: PrivateSteps) -> DataLoader[T]:
        self._private = _PrivateLoader(self.dataset, self._work, rows, self._options, steps)
        return self._private

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # torch says its own class, whose protocol this has
        if self._work.is_private and (self._private is not None or self._work.counts_elsewhere):
            return self._privately()
        work = self._work
        kept = partial(work.fetch, self.dataset, self._options, work.trained)
        begin = kept if self.persistent_workers else super().__iter__
        return begin() if work.counts_elsewhere else work.batches(_Lazily(begin))

    def _privately(self) -> Iterator[T]:
        """Yield private batches. A library may ask for this iterator before the loop is private, but for no batch."""
        if self._private is None:
            problem = "work.loader is read before the loop is private"
            raise ConfigError("privacy", problem, "Call work.private first, and let nothing else read the loader")
        yield from self._private


class _PrivateLoader(_OrderLoader[T]):
    """`DataLoader` with the batches of private steps; a batch without rows has the first row instead."""

    def __init__(
        self, dataset: Dataset[T], work: Work, rows: Sequence[Rows], options: dict[str, Any], steps: PrivateSteps
    ) -> None:
        batches = [each if len(each) else np.zeros(1, np.int64) for each in rows]
        super().__init__(dataset, work, batches, {**options, "persistent_workers": False})
        self._rows, self._steps = rows, steps

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]  # as above
        begin = _Lazily(lambda: self._steps.handed(self, self._rows))
        return iter(begin) if self._work.counts_elsewhere else self._work.batches(begin)


class _Lazily(Iterable[T]):
    """Iterable that calls ``begin`` at iteration, so that workers start with the order's clock and not before."""

    def __init__(self, begin: Callable[[], Iterator[T]]) -> None:
        self._begin = begin

    def __iter__(self) -> Iterator[T]:
        return self._begin()
