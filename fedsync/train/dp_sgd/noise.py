"""Arithmetic of a private step: clipped sums, Gaussian noise, and the choice of units.

The server knows the seed of a run, so a real silo takes both from the operating system's generator: 32 bytes of it are
the key of a ChaCha20 stream for one order. Virtual time may use the order's seed, because nothing leaves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from fedsync.privacy.release import PrivateSettings

_KEY, _NONCE = 32, 16
_PAIRS = 2**12
"""Pairs of normal numbers at once: few calls for small tensors, and temporary arrays that stay in the cache."""

_PART = 2.0**-53


class PrivateRandom(Protocol):
    """Source of a private order's random numbers."""

    def normal(self, like: Tensor) -> Tensor:
        """Return standard normal numbers in the shape, type and device of ``like``."""

    def chosen(self, units: int, rate: float) -> NDArray[np.int64]:
        """Return the numbers, below ``units``, of those that take part; each does with probability ``rate``."""


class SystemRandom:
    """Random numbers from the operating system, for one order."""

    def __init__(self) -> None:
        secret = os.urandom(_KEY)
        self._stream = Cipher(ChaCha20(secret, bytes(_NONCE)), mode=None).encryptor()
        self._spare = torch.empty(0, dtype=torch.float64)

    def normal(self, like: Tensor) -> Tensor:
        spare = self._spare if self._spare.dtype == like.dtype else self._spare[:0].to(like.dtype)
        if like.numel() > len(spare):
            blocks = -(-(like.numel() - len(spare)) // (2 * _PAIRS))
            spare = torch.cat([spare, *(self._block().to(like.dtype) for _ in range(blocks))])
        found, self._spare = spare[: like.numel()], spare[like.numel() :]
        return found.view(like.shape).to(like.device)

    def chosen(self, units: int, rate: float) -> NDArray[np.int64]:
        return np.flatnonzero(self._uniform(units).numpy() < rate)

    def _block(self) -> Tensor:
        """Standard normal numbers, float64 [2 * _PAIRS]."""
        # Box and Muller 1958: two independent normal numbers of two uniform ones. 1 - u is exact, and never 0.
        radius = self._uniform(_PAIRS).neg_().add_(1.0).log_().mul_(-2.0).sqrt_()
        angle = self._uniform(_PAIRS).mul_(2.0 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()])

    def _uniform(self, count: int) -> Tensor:
        """Uniform numbers in 0..1 without 1, float64 [count], of 53 bits each."""
        words = np.frombuffer(self._stream.update(bytes(8 * count)), np.uint64)
        return torch.from_numpy((words >> np.uint64(11)) * _PART)


class SeededRandom:
    """Random numbers from an order's seed, in virtual time alone."""

    def __init__(self, seed: int) -> None:
        self._noise = torch.Generator().manual_seed(seed)
        self._choice = np.random.default_rng([seed, 1])

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._noise, dtype=like.dtype).to(like.device)

    def chosen(self, units: int, rate: float) -> NDArray[np.int64]:
        return np.flatnonzero(self._choice.random(units) < rate)


def random_of(seed: int, *, seeded: bool) -> PrivateRandom:
    """Return an order's random numbers: of its seed if ``seeded``, which only virtual time may be."""
    return SeededRandom(seed) if seeded else SystemRandom()


def gradients_of(parameter: nn.Parameter, rows: int) -> Tensor:
    """Return the gradients of a batch's rows, [rows, ...]; zeros if the loss does not depend on the parameter."""
    single: Tensor | None = getattr(parameter, "grad_sample", None)
    return parameter.new_zeros((rows, *parameter.shape)) if single is None else single


def finite(single: Tensor) -> Tensor:
    """Return gradients with zeros for values that are not finite: else one row decides whether an order fails."""
    return single.nan_to_num(0.0, 0.0, 0.0)


def clipped_sums(optimizer: DPOptimizer, single: Sequence[Tensor]) -> list[Tensor]:
    """Return the sum of the clipped gradients of units for each of the optimizer's parameters.

    Args:
        optimizer: clips to its ``max_grad_norm``.
        single: for each parameter, a gradient a unit, [units, ...]; values that are not finite count as zeros.
    """
    sums = _clipped(optimizer, single)
    # A value that is not finite makes the sum so. To look for it in the sums saves a copy of all gradients.
    if not all(bool(total.isfinite().all()) for total in sums):
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
    return total.add_(random.normal(total), alpha=settings.noise * settings.clip).div_(ordered)
