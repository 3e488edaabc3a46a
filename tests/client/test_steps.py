"""`steps` hands out batches of the order's size, all else as the app's own loader has it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from fedsync.client import steps, untimed
from fedsync.common.errors import ConfigError

DATA = TensorDataset(torch.arange(12))


class Order:
    """Hands out all batches of one pass."""

    max_steps, sized = 3, False

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size

    def counted(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        return (next(batches) for _ in range(self.max_steps))


def message(size: int) -> Any:
    config = ConfigRecord({"batch-size": size})
    config.order = Order(size)  # type: ignore[attr-defined]
    return SimpleNamespace(content={"config": config})


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12))


def doubled(samples: list[Any]) -> torch.Tensor:
    return 2 * torch.stack([row for (row,) in samples])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_plain_loader_has_the_orders_size_and_its_own_order_of_samples(shuffle: bool) -> None:
    torch.manual_seed(5)
    one = torch.cat([rows for (rows,) in DataLoader(DATA, batch_size=1, shuffle=shuffle)])
    torch.manual_seed(5)
    loader = DataLoader(DATA, batch_size=5, shuffle=shuffle, drop_last=True)
    batches = [rows for (rows,) in steps(message(4), loader)]
    assert [len(batch) for batch in batches] == [4, 4, 4]
    assert torch.equal(torch.cat(batches), one)


@pytest.mark.parametrize(("own", "drop_last"), [(5, False), (5, True)])
def test_a_batch_at_the_end_of_a_pass_is_filled_from_the_next(own: int, drop_last: bool) -> None:
    """The order's samples count as steps times size: smaller batches would make a silo look faster than it is."""
    loader = DataLoader(DATA, batch_size=own, drop_last=drop_last)
    batches = [rows.tolist() for (rows,) in steps(message(8), loader)]
    assert batches == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_at_the_end_of_a_stream_is_filled_from_its_next_pass(workers: int, drop_last: bool) -> None:
    loader = DataLoader(Stream(), batch_size=5, drop_last=drop_last, num_workers=workers)
    wrapped: Any = steps(message(8), loader)
    assert [rows.tolist() for rows in wrapped] == [[*range(8)], [*range(8, 12), *range(4)], [*range(4, 12)]]
    assert isinstance(loader.dataset, Stream), "the app's own is as it was"
    assert wrapped.dataset is loader.dataset


class Shard(Stream):
    """A stream whose workers are told their share of it, as PyTorch's documentation has it."""

    start = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(self.start, 12))


def begin_at_six(_: int) -> None:
    torch.utils.data.get_worker_info().dataset.start = 6  # type: ignore[union-attr]


def test_a_stream_whose_workers_are_set_up_by_the_app_stays_as_it_is() -> None:
    loader = DataLoader(Shard(), batch_size=5, num_workers=1, worker_init_fn=begin_at_six)
    assert [rows.tolist() for rows in steps(message(4), loader)] == [[6, 7, 8, 9], [10, 11], [6, 7, 8, 9]]


def test_a_loader_that_has_the_orders_size_is_that_of_flower() -> None:
    batches = [rows.tolist() for (rows,) in steps(message(8), DataLoader(DATA, batch_size=8))]
    assert batches[:2] == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_loader_without_samples_is_refused() -> None:
    empty = DataLoader(DATA, batch_size=5, sampler=[])
    with pytest.raises(ConfigError, match="the loader has no batch"):
        list(steps(message(4), empty))


def test_what_else_a_loader_does_stays() -> None:
    loader = DataLoader(DATA, batch_size=5, collate_fn=doubled, num_workers=1, prefetch_factor=3)
    wrapped: Any = steps(message(4), loader)
    assert (wrapped.num_workers, wrapped.prefetch_factor, wrapped.dataset) == (1, 3, DATA)
    assert [batch.tolist() for batch in wrapped] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18, 20, 22]]
    assert [len(batch) for batch in steps(message(4), DataLoader(Stream(), batch_size=5))] == [4, 4, 4]


class Mine(BatchSampler):
    """Batches by a rule of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()


def test_batches_that_somebody_else_makes_are_left_as_they_are() -> None:
    own = DataLoader(DATA, batch_sampler=Mine(SequentialSampler(DATA), 5, False))
    assert [len(rows) for (rows,) in steps(message(4), own)] == [5, 5, 2]
    assert list(steps(message(4), [1, 2, 3])) == [1, 2, 3]
    loader = DataLoader(DATA, batch_size=5)
    of_another_strategy: Any = SimpleNamespace(content={"config": ConfigRecord({"batch-size": 4})})
    assert steps(of_another_strategy, loader) is loader
    with untimed(of_another_strategy):
        pass


class Padded(DataLoader[Any]):
    """A loader of another library: it has options of its own, and PyTorch makes its batches."""

    def __init__(self, data: Any, pad: int, batch_sampler: Any) -> None:
        super().__init__(data, batch_sampler=batch_sampler)
        self.pad = pad


def test_a_batch_sampler_of_pytorch_keeps_its_order_of_samples_in_any_kind_of_loader() -> None:
    backwards = list(range(11, -1, -1))
    for sampler in (BatchSampler(backwards, 5, True), type("Named", (BatchSampler,), {})(backwards, 5, True)):
        loader = Padded(DATA, 7, sampler)
        wrapped: Any = steps(message(8), loader)
        assert next(iter(wrapped))[0].tolist() == backwards[:8] and wrapped.pad == 7
        assert [len(rows) for (rows,) in loader] == [5, 5], "the app's own is as it was"
