"""How the learning rate goes within an order."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import lr_scheduler

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss
from fedsync.train.optimizers import make_optimizer

PLACE = "local.schedule"

_FIT = (
    "ConstantLR",
    "CosineAnnealingLR",
    "CosineAnnealingWarmRestarts",
    "ExponentialLR",
    "LinearLR",
    "MultiStepLR",
    "PolynomialLR",
    "StepLR",
)
"""PyTorch's that go by steps alone, from the order's rate on. Others want functions, losses, or rates of their own."""

_LENGTHS = ("T_max", "total_iters")
"""Keywords that say how many steps the schedule has: an order's, where they are left out."""

_OURS = {"self", "optimizer", "last_epoch", "verbose"}

Shape = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Begins anew with each order, and goes by the most steps that the order may have.

    Without a warm-up the rates are those of `torch.optim.lr_scheduler.CosineAnnealingLR` and ``LinearLR`` over that
    many steps.

    Args:
        shape: ``constant``, ``cosine`` or ``linear``.
        warmup: steps in which the rate climbs, by equal amounts, to the order's; at least 0.
        end: share of the order's rate to which it falls after the last step, 0..1.
    """

    shape: Shape
    warmup: int = 0
    end: float = 0.0

    def factor(self, step: int, steps: int) -> float:
        """Share of the order's rate in step number ``step``, from 0, of ``steps``; above 0, and at most 1."""
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        gone = (step - self.warmup) / max(1, steps - self.warmup)
        match self.shape:
            case "cosine":
                return self.end + (1 - self.end) * (1 + math.cos(math.pi * gone)) / 2
            case "linear":
                return 1 - (1 - self.end) * gone
            case "constant":
                return 1.0

    def rates(self, rate: float, steps: int) -> Iterator[float]:
        """The learning rate of each of an order's ``steps``, of which the order's is ``rate``."""
        return (rate * self.factor(step, steps) for step in range(steps))


@dataclass(frozen=True, slots=True)
class TorchSchedule:
    """A scheduler of PyTorch's, which begins anew with each order.

    Nothing of it outlives an order: one that is repeated has to give the same update, silos that do unequal numbers of
    steps would come to be at different places, and the model that a silo goes on from is not the one that it came to.

    Args:
        kind: PyTorch's name of it.
        keywords: its own; ``T_max`` and ``total_iters`` are the order's most steps where they are left out.

    Raises:
        ConfigError: there is none such, or it takes no such keyword or value.
    """

    kind: str
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in _FIT:
            raise ConfigError(PLACE, f"{self.kind!r} is none that fits an order", near_miss(self.kind, _FIT))
        allowed = self._allowed()
        for name in self.keywords:
            if name not in allowed:
                raise ConfigError(PLACE, f"{self.kind} takes no {name!r}", near_miss(name, allowed))
        try:
            tried = list(self.rates(1.0, 2))
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise ConfigError(PLACE, f"{self.kind} refuses its keywords: {error}", "Mend them") from error
        if not all(isinstance(rate, float | int) and 0 <= rate < math.inf for rate in tried):
            raise ConfigError(PLACE, f"{self.kind} comes to rates of {tried[0]} and {tried[1]}", "Mend its keywords")

    def rates(self, rate: float, steps: int) -> Iterator[float]:
        """See `Schedule.rates`."""
        # On an optimizer that moves nothing: a scheduler changes the one it is on for good.
        optimizer = make_optimizer("sgd", {}, [nn.Parameter(torch.zeros(1))], rate)
        lengths = dict.fromkeys((name for name in _LENGTHS if name in self._allowed()), steps)
        scheduler = getattr(lr_scheduler, self.kind)(optimizer, **{**lengths, **self.keywords})
        for _ in range(steps):
            yield optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()

    def _allowed(self) -> list[str]:
        taken = inspect.signature(getattr(lr_scheduler, self.kind)).parameters
        return [name for name in taken if name not in _OURS]
