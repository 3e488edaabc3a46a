"""Learning-rate schedules within an order."""

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
"""PyTorch schedulers that depend on the step number only and start from the order's rate."""

_LENGTHS = ("T_max", "total_iters")
"""Keywords for the number of steps; the default is the order's number of steps."""

_OURS = {"self", "optimizer", "last_epoch", "verbose"}

Shape = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning-rate schedule that restarts at each order and spans the order's maximum steps.

    Without a warm-up the rates equal `torch.optim.lr_scheduler.CosineAnnealingLR` and ``LinearLR`` over these steps.

    Args:
        shape: ``constant``, ``cosine`` or ``linear``.
        warmup: steps, at least 0, in which the rate rises linearly to the order's rate.
        end: share of the order's rate that is reached after the last step, 0..1.
    """

    shape: Shape
    warmup: int = 0
    end: float = 0.0

    def factor(self, step: int, steps: int) -> float:
        """Share of the order's rate in step ``step``, counted from 0, of ``steps``; above 0, and at most 1."""
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
        """Yield the learning rate of each of an order's ``steps``; ``rate`` is the order's rate."""
        return (rate * self.factor(step, steps) for step in range(steps))


@dataclass(frozen=True, slots=True)
class TorchSchedule:
    """PyTorch scheduler that restarts at each order.

    No scheduler state outlives an order, for three reasons. A repeated order must give the same update. Silos with
    different numbers of steps would reach different states. A silo continues from a new model, not from its own.
    The default of the keywords ``T_max`` and ``total_iters`` is the order's maximum steps.

    Raises:
        ConfigError: the scheduler is unknown, or refuses a keyword or value.
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
        # A dummy optimizer, because a scheduler changes its optimizer permanently.
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
