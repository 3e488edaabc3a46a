"""Checks for common errors in a task before training; each error says in one line what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedsync.common.errors import ConfigError
from fedsync.tasks.task_protocol import SiloData, Task
from fedsync.train.batches import Batches
from fedsync.train.machine.device import is_out_of_memory

FEW = 2


def check_data(data: object) -> SiloData:
    """Raise `ConfigError` unless ``data`` is `SiloData` of map-style data sets."""
    place = "task, data(slot)"
    if not isinstance(data, SiloData):
        raise ConfigError(place, f"it returned {type(data).__name__}", "Return SiloData(train=..., test=...)")
    splits = {"train": data.train, "test": data.test, "validation": data.validation}
    for name, dataset in splits.items():
        if name == "validation" and dataset is None:
            continue
        if isinstance(dataset, DataLoader):
            problem = f"{name} is a DataLoader, and batches are the order's"
            remedy = f"Return SiloData({name}=loader.dataset, ...); local.workers and collate do the rest"
            raise ConfigError(place, problem, remedy)
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            problem = f"{name} is a {type(dataset).__name__}, which has no length or no samples by number"
            raise ConfigError(place, problem, "Return a map-style data set: len(dataset) and dataset[i]")
    return data


def check_task(task: Task, model: nn.Module, samples: Batches, held_out: Batches) -> None:
    """Try a task's functions on a few samples; the caller seeds torch.

    Raises `ConfigError` if a default function cannot read the batches, or if the score is not a pair of sums.
    """
    _check_batch(task, samples.take(samples.place(np.arange(1))))
    few = np.arange(min(FEW, len(held_out)))
    if len(few) and (type(task).score is not Task.score or type(task).assess is not Task.assess):
        model.eval()
        try:
            with torch.no_grad():
                _check_score(task, model, *(held_out.take(held_out.place(rows)) for rows in (few, np.tile(few, 2))))
        except (RuntimeError, MemoryError) as error:
            # Not an error: evaluation falls back to smaller pieces.
            if not is_out_of_memory(error):
                raise


def _check_batch(task: Task, batch: Any) -> None:
    if isinstance(batch, Sequence) and len(batch) == 2 and all(isinstance(part, Tensor) for part in batch):
        return
    kind = type(task)
    reads = {"loss": kind.loss is Task.loss, "score": kind.score is Task.score and kind.predict is Task.predict}
    defaults = [name for name, is_default in reads.items() if is_default]
    if defaults:
        found = f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else _shape(batch)
        problem = f"a batch is {found}, and the default {defaults[0]} wants inputs and labels"
        remedy = f"Write {' and '.join(defaults)}, which get a batch as it is, or a collate(samples)"
        raise ConfigError(f"task, {defaults[0]}", problem, remedy)


def _check_score(task: Task, model: nn.Module, batch: Any, twice: Any) -> None:
    """Raise `ConfigError` if a score is no pair of sums; ``twice`` has the samples of ``batch`` twice."""
    place = "task, score"
    pair = task.score(model, batch)
    if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
        problem = f"it returned {_shape(pair)}"
        raise ConfigError(place, problem, "Return two scalar tensors, the summed loss and the number correct")
    for name, once, more in zip(("loss", "number correct"), pair, task.score(model, twice), strict=True):
        if once.numel() != 1:
            problem = f"the {name} has the shape {tuple(once.shape)}"
            raise ConfigError(place, problem, "Return a scalar: sum it over the batch")
        if once.item() and torch.isclose(once.double(), more.double(), rtol=1e-4, atol=0.0):
            problem = f"the {name} of a batch is that of half the batch, so it is a mean"
            raise ConfigError(place, problem, 'Return sums over the batch, as with reduction="sum"')


def _shape(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}: {', '.join(type(part).__name__ for part in value)}"
    return f"a {type(value).__name__}"
