"""Arithmetic of a private step: clipped sums, Gaussian noise, and the choice of units.

The server knows the seed of a run, so a real silo takes both from the operating system's generator: 32 bytes of it are
the key of a ChaCha20 stream for one order. Virtual time may use the order's seed, because nothing leaves.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from numpy.typing import NDArray
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from fedsync.privacy.release import PrivateSettings

_KEY, _NONCE = 32, 16
_AT_ONCE = 2**20
_PART = 2.0**-53


class SystemRandom:
    """Random numbers from the operating system, for one order.

    `normal` returns standard normal numbers in the shape, type and device of a tensor. `chosen` returns the numbers,
    below ``units``, of those that take part, each with probability ``rate``.
    """

    def __init__(self) -> None:
        secret = os.urandom(_KEY)
        self._stream = Cipher(ChaCha20(secret, bytes(_NONCE)), mode=None).encryptor()

    def normal(self, like: Tensor) -> Tensor:
        count = like.numel()
        found = torch.empty(count, dtype=torch.float64)
        for start in range(0, count, _AT_ONCE):
            stop = min(start + _AT_ONCE, count)
            pairs = (stop - start + 1) // 2
            # Box and Muller 1958: two independent normal numbers of two uniform ones. 1 - u is never 0.
            radius = torch.sqrt(-2.0 * torch.log(1.0 - self._uniform(pairs)))
            angle = 2.0 * math.pi * self._uniform(pairs)
            both = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)])
            found[start:stop] = both[: stop - start]
        return found.view(like.shape).to(like)

    def chosen(self, units: int, rate: float) -> NDArray[np.int64]:
        return np.flatnonzero(self._uniform(units).numpy() < rate)

    def _uniform(self, count: int) -> Tensor:
        """Uniform numbers in 0..1 without 1, float64 [count], of 53 bits each."""
        words = np.frombuffer(self._stream.update(bytes(8 * count)), np.uint64)
        return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * _PART)


class SeededRandom:
    """Random numbers from an order's seed, in virtual time alone."""

    def __init__(self, seed: int) -> None:
        self._noise = torch.Generator().manual_seed(seed)
        self._choice = np.random.default_rng([seed, 1])

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._noise, dtype=like.dtype).to(like.device)

    def chosen(self, units: int, rate: float) -> NDArray[np.int64]:
        return np.flatnonzero(self._choice.random(units) < rate)


PrivateRandom = SystemRandom | SeededRandom


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
    """Return sums of gradients that ``optimizer`` clips, one a parameter, of ``single`` gradients [units, ...]."""
    for parameter, each in zip(optimizer.params, single, strict=True):
        parameter.grad_sample, parameter.summed_grad = finite(each.to(parameter.dtype)), None
    optimizer.clip_and_accumulate()
    sums = [parameter.summed_grad.view_as(parameter) for parameter in optimizer.params]
    for parameter in optimizer.params:
        parameter.grad_sample = parameter.summed_grad = None
    return sums


def noisy_mean(total: Tensor, random: PrivateRandom, settings: PrivateSettings, ordered: int) -> Tensor:
    """Return a step's gradient: a clipped sum, which is changed, with noise, over the ``ordered`` batch size."""
    assert settings.noise is not None
    return total.add_(random.normal(total), alpha=settings.noise * settings.clip).div_(ordered)
