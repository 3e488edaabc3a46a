"""Loops of one's own that count their steps: each batch of the private loader is one private step."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedsync.client import Work
from fedsync.common.errors import ConfigError
from tests.client.test_private_loops import OWN_BATCH, Loop, private, settings, slope, trainer_of, update_of


def test_batches_without_a_step_and_loaders_of_ones_own_are_refused() -> None:
    def skipping(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        _, optimizer, loader = work.private(model, torch.optim.SGD(model.parameters(), lr=0.1), work.loader(train))
        for number, batch in enumerate(loader):
            slope(model, batch)
            if number != skipped:
                optimizer.step()

    skipped = 1
    with pytest.raises(ConfigError, match="step 2 comes after 3 batches"):
        update_of(trainer_of(skipping), settings(), steps=3)
    skipped = 2
    with pytest.raises(ConfigError, match="took 3 batches of the private loader and did 2 private steps"):
        update_of(trainer_of(skipping), settings(), steps=3)

    def own_batches(work: Work, model: nn.Module, train: Any) -> None:
        _, optimizer, _ = work.private(model, torch.optim.SGD(model.parameters(), lr=0.1), work.loader(train))
        for batch in work.batches(DataLoader(train, batch_size=3)):
            slope(model, batch)
            optimizer.step()

    with pytest.raises(ConfigError, match=OWN_BATCH):
        trainer_of(own_batches).make_private(settings(None))

    def own_loader(work: Work, model: nn.Module, train: Any) -> None:
        work.private(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(train, batch_size=3))

    with pytest.raises(ConfigError, match=r"Give work\.loader"):
        trainer_of(own_loader).make_private(settings(None))


def test_a_loop_that_never_asks_for_privacy_is_refused_with_the_call() -> None:
    def plain(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in work.loader(train):
            slope(model, batch)
            optimizer.step()

    with pytest.raises(
        ConfigError, match=r"never calls work\.private\. Write model, optimizer, loader = work\.private"
    ):
        trainer_of(plain).make_private(settings(None))


def counted_elsewhere(private_first: bool = True, passes: int = 1, ahead: int = 0) -> Loop:
    """A loop that counts its steps itself, over ``passes`` of the loader, and fetches ``ahead`` batches too early."""

    def loop(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        steps, loader = work.counter(), work.loader(train)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
        if private_first:
            _, optimizer, _ = work.private(model, optimizer, loader)
        next(steps)
        for _ in range(passes):
            batches = iter(loader)
            fetched = [batch for _, batch in zip(range(ahead), batches, strict=False)]
            for number in range(work.max_steps):
                fetched.extend(batch for _, batch in zip(range(1), batches, strict=False))
                optimizer.zero_grad()
                slope(model, fetched[number])
                optimizer.step()
                next(steps, None)

    return loop


def test_a_loop_that_counts_its_steps_itself_is_private_in_each_of_them() -> None:
    told = settings(1.0, seeded=True)
    ours, theirs = (update_of(trainer_of(each), told, 2, steps=3) for each in (private, counted_elsewhere()))
    assert theirs.update == pytest.approx(ours.update, abs=1e-7)
    assert (theirs.report.steps, theirs.cursor) == (3, ours.cursor)
    with pytest.raises(ConfigError, match="read before the loop is private"):
        trainer_of(counted_elsewhere(private_first=False)).make_private(settings(None))
    with pytest.raises(ConfigError, match=r"step 1 comes after 2 batches.*fetch no batch ahead"):
        update_of(trainer_of(counted_elsewhere(ahead=1)), told, 2, steps=3)
    with pytest.raises(ConfigError, match="read a second time"):
        update_of(trainer_of(counted_elsewhere(passes=2)), told, 2, steps=3)

    def only_counting(work: Work, model: nn.Module, train: Dataset[Any]) -> None:
        next(work.counter())

    with pytest.raises(ConfigError, match=r"never calls work\.private"):
        trainer_of(only_counting).make_private(settings(None))
