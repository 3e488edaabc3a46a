"""Arithmetic of a DP-SGD step: clipped sums, Gaussian noise, sampling, and checks of gradients of single rows.

A *unit* is what a budget protects: a row, or all rows of a person. Gradients of single rows need suitable options and
layers, and a loss that is a mean over independent rows.

The server knows the seed of a run. So a real silo draws noise and units from a ChaCha20 stream for each order, whose
key is 32 bytes of the operating system's generator. A simulation in virtual time may use the order's seed, because no
result leaves the machine.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from fedsync.common.errors import ConfigError
from fedsync.privacy.release import PrivateSettings
from fedsync.tasks.task_protocol import Task
from fedsync.train.batches import Batches
from fedsync.train.loop import check_loss
from fedsync.train.options import LocalOptions

_KEY, _NONCE = 32, 16
_PAIRS = 2**13
"""Pairs of normal numbers at once: few calls for small tensors, and arrays that stay in the cache."""

_PART = 2.0**-53


class SystemRandom:
    """Random numbers from the operating system, for one order: `add_noise` adds normal numbers of the ``deviation``;
    `chosen` draws each of ``units`` indices with probability ``rate``.
    """

    def __init__(self) -> None:
        secret = os.urandom(_KEY)
        self._stream = Cipher(ChaCha20(secret, bytes(_NONCE)), mode=None).encryptor()
        self._block, self._used = torch.empty(2 * _PAIRS), 2 * _PAIRS

    def add_noise(self, total: Tensor, deviation: float) -> None:
        if self._block.dtype != total.dtype:
            self._block, self._used = self._block.to(total.dtype), 2 * _PAIRS
        flat, at = total.view(-1), 0
        while at < len(flat):
            if self._used == len(self._block):
                self._fill(self._block.view(2, _PAIRS))
                self._used = 0
            part = flat[at : at + len(self._block) - self._used]
            part.add_(self._block[self._used : self._used + len(part)].to(part.device), alpha=deviation)
            at, self._used = at + len(part), self._used + len(part)

    def chosen(self, units: int, rate: float) -> NDArray[np.int64]:
        return np.flatnonzero(self._uniform(units).numpy() < rate)

    def _fill(self, block: Tensor) -> None:
        """Write standard normal numbers, computed in float64, to a block [2, _PAIRS]."""
        # Box and Muller 1958: two independent normal numbers of two uniform ones. 1 - u is exact, and never 0.
        radius, angle = self._uniform(2 * _PAIRS).view(2, _PAIRS)
        radius.neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
        angle.mul_(2.0 * math.pi)
        block[0] = angle.cos().mul_(radius)
        block[1] = angle.sin_().mul_(radius)

    def _uniform(self, count: int) -> Tensor:
        """Uniform numbers in [0, 1), float64 [count], of 53 bits each."""
        words = np.frombuffer(self._stream.update(bytes(8 * count)), np.uint64)
        return torch.from_numpy((words >> np.uint64(11)) * _PART)


class SeededRandom:
    """Random numbers from an order's seed, in virtual time alone."""

    def __init__(self, seed: int) -> None:
        self._noise = torch.Generator().manual_seed(seed)
        self._choice = np.random.default_rng([seed, 1])

    def add_noise(self, total: Tensor, deviation: float) -> None:
        noise = torch.randn(total.shape, generator=self._noise, dtype=total.dtype)
        total.add_(noise.to(total.device), alpha=deviation)

    def chosen(self, units: int, rate: float) -> NDArray[np.int64]:
        return np.flatnonzero(self._choice.random(units) < rate)


CLIPPING: dict[str, Any] = {"noise_multiplier": 0.0, "expected_batch_size": 1, "loss_reduction": "sum"}
"""Arguments of Opacus' optimizers, which here only clip."""

PrivateRandom = SystemRandom | SeededRandom


def random_of(seed: int, *, seeded: bool) -> PrivateRandom:
    return SeededRandom(seed) if seeded else SystemRandom()


def gradients_of(parameter: nn.Parameter, rows: int) -> Tensor:
    """Return the gradients of a batch's rows, [rows, ...]; zeros if the loss does not depend on the parameter."""
    single: Tensor | None = getattr(parameter, "grad_sample", None)
    return parameter.new_zeros((rows, *parameter.shape)) if single is None else single


def finite(single: Tensor) -> Tensor:
    """Return gradients with zeros for values that are not finite: else one row decides whether an order fails."""
    return single.nan_to_num(0.0, 0.0, 0.0)


def clipped_sums(optimizer: DPOptimizer, single: Sequence[Tensor]) -> list[Tensor]:
    """Sums of clipped gradients, one a parameter, of ``single`` gradients [units, ...]; NaN and infinity count as 0."""
    sums = _clipped(optimizer, single)
    # A value that is not finite makes the sum so. To look for it in the sums saves a copy of all gradients. Finite sums
    # that overflow here are only clipped again, with the same result.
    if not all(math.isfinite(total.sum()) for total in sums):
        sums = _clipped(optimizer, [finite(each) for each in single])
    return sums


def _clipped(optimizer: DPOptimizer, single: Sequence[Tensor]) -> list[Tensor]:
    for parameter, each in zip(optimizer.params, single, strict=True):
        parameter.grad_sample, parameter.summed_grad = each.to(parameter.dtype), None
    optimizer.clip_and_accumulate()
    sums = [parameter.summed_grad.view_as(parameter) for parameter in optimizer.params]
    for parameter in optimizer.params:
        parameter.grad_sample = parameter.summed_grad = None
    return sums


def noisy_mean(total: Tensor, random: PrivateRandom, settings: PrivateSettings, ordered: int) -> Tensor:
    """Return a step's gradient: a clipped sum, which is changed, with noise, over the ``ordered`` batch size."""
    assert settings.noise is not None
    total = total.contiguous()
    random.add_noise(total, settings.noise * settings.clip)
    return total.div_(ordered)


# Inputs of the first layer need no gradients, which is right here.
warnings.filterwarnings("ignore", message="Full backward hook is firing")

ROWS = 3

_NEAR, _ROUNDING = 1e-3, 1e-6
"""Tolerated differences, as shares of a parameter's and of the whole gradient of a row; the second covers rounding."""


def check_options(options: LocalOptions) -> None:
    """Raise `ConfigError` for an option of local training that DP-SGD does not support."""
    for name, wrong in (("workers", options.workers != 0), ("precision", options.precision == "fp16")):
        if wrong:
            problem = f"{name} {getattr(options, name)!r} is not compatible with gradients of single rows"
            raise ConfigError(f"local.{name}", problem, f"Leave {name} out, or leave privacy out")


def penalty_of(task: Task, model: nn.Module) -> Tensor | None:
    """Return the terms of a loss that depend on no row. Users' tasks have none: what has this name there is theirs."""
    return task.penalty(model) if _is_shipped(task) else None


def check_penalty(task: Task) -> None:
    """Raise `ConfigError` for a penalty that is not FedSync's own: it may depend on data, and it gets no noise."""
    penalty: object = task.penalty
    if callable(penalty) and getattr(penalty, "__func__", None) is not Task.penalty and not _is_shipped(task):
        problem = "it would be added after the noise, and may depend on data"
        raise ConfigError("task.penalty", problem, "Leave the method out; local.weight_decay also keeps weights small")


def _is_shipped(task: Task) -> bool:
    return type(task).__module__.startswith("fedsync.")


def check_layers(model: nn.Module) -> None:
    """Raise `ConfigError` for a layer that mixes examples, such as BatchNorm, or hides gradients, and for parameters of
    few bits: rounding would make clipped gradients longer than the clip, and noise coarse.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and torch.finfo(parameter.dtype).bits < 32:
            remedy = "Keep trained parameters in float32; local.precision: bf16 computes in bfloat16 all the same"
            raise ConfigError("privacy, model", f"{name} is {parameter.dtype}, too coarse for noise", remedy)
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
            loss = task.loss(wrapped, samples.take(rows))
            check_loss(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            together = [gradients_of(each, len(rows)) for each in parameters]
        finally:
            wrapped.to_standard_module()
    check_alone(together, alone)
    model.zero_grad(set_to_none=True)


def check_alone(together: Sequence[Tensor], alone: Sequence[Sequence[Tensor]]) -> None:
    """Raise `ConfigError` unless gradients of rows in a batch, [rows, ...] a parameter, are those of each row alone."""
    norms = [math.hypot(*(float(each.norm()) for each in row)) for row in alone]
    for number, single in enumerate(together):
        for found, own, norm in zip(single, (row[number] for row in alone), norms, strict=True):
            near = _NEAR * float(own.norm()) + (_ROUNDING * norm if math.isfinite(norm) else 0.0)
            if not torch.allclose(found.to(own.dtype), own, rtol=_NEAR, atol=near):
                problem = "the loss of a batch is not the mean of the losses of its rows, each by itself"
                remedy = "Return the mean over rows, compare no rows with each other, and use no autocast"
                raise ConfigError("privacy, loss", problem, remedy)


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    check_loss(loss)
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
