"""Checks that gradients of single rows exist: options, layers, and a loss that is a mean over independent rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from fedsync.common.errors import ConfigError
from fedsync.tasks.task_protocol import Task
from fedsync.train.batches import Batches
from fedsync.train.dp_sgd.noise import gradients_of
from fedsync.train.options import LocalOptions

# Inputs of the first layer need no gradients, which is right here.
warnings.filterwarnings("ignore", message="Full backward hook is firing")

ROWS = 3
"""Rows on which a loss is tried."""

_NEAR = 1e-3


def check_options(options: LocalOptions) -> None:
    """Raise `ConfigError` for an option of local training that DP-SGD does not support."""
    wrong = {
        "processes": options.processes != 1,
        "workers": options.workers != 0,
        "compile": bool(options.compile),
        "precision": options.precision == "fp16",
    }
    for name, found in wrong.items():
        if found:
            problem = f"{name} {getattr(options, name)!r} does not go with gradients of single rows"
            raise ConfigError(f"local.{name}", problem, f"Leave {name} out, or leave privacy out")


def check_layers(model: nn.Module) -> None:
    """Raise `ConfigError` for a layer that mixes examples, such as BatchNorm, or whose rows have no gradients."""
    for error in (*ModuleValidator.validate(model, strict=False), *GradSampleModule.validate(model, strict=False)):
        problem = f"a layer of the model mixes the rows of a batch or hides their gradients: {error}"
        remedy = "Replace BatchNorm by GroupNorm, LSTM by opacus.layers.DPLSTM, MultiheadAttention by "
        raise ConfigError("privacy, model", problem, f"{remedy}opacus.layers.DPMultiheadAttention")


def check_rows(task: Task, model: nn.Module, samples: Batches, parameters: Sequence[nn.Parameter]) -> None:
    """Raise `ConfigError` unless a batch's single gradients are those of its rows, each taken alone."""
    rows = samples.place(np.arange(min(ROWS, len(samples))))
    if len(rows) < 2:
        return
    with steady(model):
        single = (samples.take(rows[row : row + 1]) for row in range(len(rows)))
        alone = [_gradients(task.loss(model, each), parameters) for each in single]
        wrapped = GradSampleModule(model, strict=True)
        try:
            task.loss(wrapped, samples.take(rows)).backward()  # type: ignore[no-untyped-call]
            together = [gradients_of(each, len(rows)) for each in parameters]
        finally:
            wrapped.to_standard_module()
    check_alone(together, alone)
    model.zero_grad(set_to_none=True)


def check_alone(together: Sequence[Tensor], alone: Sequence[Sequence[Tensor]]) -> None:
    """Raise `ConfigError` unless gradients of rows in a batch, [rows, ...] a parameter, are those of each row alone."""
    for number, single in enumerate(together):
        for found, own in zip(single, (each[number] for each in alone), strict=True):
            if not torch.allclose(found.to(own.dtype), own, rtol=_NEAR, atol=_NEAR * float(own.norm())):
                problem = "the loss of a batch is not the mean of the losses of its rows, each by itself"
                remedy = "Return the mean over rows, and compare no rows with each other"
                raise ConfigError("privacy, loss", problem, remedy)


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(parameters), allow_unused=True)
    return [torch.zeros_like(each) if one is None else one for each, one in zip(parameters, found, strict=True)]


@contextmanager
def steady(model: nn.Module) -> Iterator[None]:
    """Train without dropout, which would draw other neurons for a row alone than in its batch."""
    quiet = [each for each in model.modules() if isinstance(each, nn.modules.dropout._DropoutNd)]
    shares = [each.p for each in quiet]
    functional: Callable[..., Any] = nn.functional.dropout
    model.train()
    for each in quiet:
        each.p = 0.0
    nn.functional.dropout = lambda given, *_, **__: given
    try:
        yield
    finally:
        nn.functional.dropout = functional
        for each, share in zip(quiet, shares, strict=True):
            each.p = share
