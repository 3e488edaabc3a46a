"""PyTorch's optimizers by name, with their own keywords, and learning-rate schedules within an order."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import lr_scheduler

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss

PLACE = "local.optimizer"

_UNFIT = {"Optimizer", "LBFGS", "SparseAdam"}
"""The base class, an optimizer that needs a closure, and one that needs sparse gradients."""

_OURS = {"self", "params", "lr", "differentiable", "capturable"}
"""Keywords that the loop sets."""


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Optimizers that fit the local loop, by lower-case name."""
    found = {name: each for name, each in vars(torch.optim).items() if isinstance(each, type)}
    return {name.lower(): each for name, each in found.items() if name not in _UNFIT}


def keywords_of(kind: str) -> list[str]:
    """Keywords of an optimizer, except those that the loop sets; `ConfigError` if PyTorch has no such optimizer."""
    known = optimizers()
    if kind not in known:
        raise ConfigError(PLACE, f"{kind!r} is unknown", near_miss(kind, known))
    return [name for name in inspect.signature(known[kind]).parameters if name not in _OURS]


def make_optimizer(
    kind: str, keywords: Mapping[str, Any], parameters: Iterable[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer:
    """Make an optimizer; keywords not given have PyTorch's defaults.

    Raises `ConfigError` for an unknown optimizer or keyword, or if PyTorch refuses a value or the parameters.
    """
    allowed = keywords_of(kind)
    for name in keywords:
        if name not in allowed:
            raise ConfigError(PLACE, f"{kind} takes no {name!r}", near_miss(name, allowed))
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in keywords.items()
    }
    make: Callable[..., torch.optim.Optimizer] = _uncompiled(optimizers()[kind])
    try:
        return make(parameters, lr=learning_rate, **values)
    except (TypeError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split()).replace(";", ",")
        raise ConfigError(PLACE, f"{kind} refuses {_told(keywords)}: {text}", "Mend the value") from error


def _uncompiled(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the optimizer class without PyTorch's wrappers for compiled code: a second of imports, and 70 MB."""
    methods = {
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
    }
    return type(kind.__name__, (kind,), methods)


def _told(keywords: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in keywords.items()) or "the model"


SCHEDULE_PLACE = "local.schedule"

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

_SCHEDULER_OURS = {"self", "optimizer", "last_epoch", "verbose"}

Shape = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning-rate schedule that restarts at each order and spans the order's maximum steps.

    Without a warm-up the rates equal `torch.optim.lr_scheduler.CosineAnnealingLR` and ``LinearLR`` over these steps.
    The rate rises linearly in ``warmup`` steps, and ends at the share ``end``, 0..1, of the order's rate.
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
    """PyTorch scheduler that restarts at each order; raises `ConfigError` for an unknown kind, keyword or value.

    No state outlives an order: a repeated order must give the same update, silos with different numbers of steps would
    reach different states, and a silo continues from a new model. The default of the keywords ``T_max`` and
    ``total_iters`` is the order's maximum steps.
    """

    kind: str
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in _FIT:
            raise ConfigError(SCHEDULE_PLACE, f"{self.kind!r} is none that fits an order", near_miss(self.kind, _FIT))
        allowed = self._allowed()
        for name in self.keywords:
            if name not in allowed:
                raise ConfigError(SCHEDULE_PLACE, f"{self.kind} takes no {name!r}", near_miss(name, allowed))
        try:
            tried = list(self.rates(1.0, 2))
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise ConfigError(SCHEDULE_PLACE, f"{self.kind} refuses its keywords: {error}", "Mend them") from error
        if not all(isinstance(rate, float | int) and 0 <= rate < math.inf for rate in tried):
            problem = f"{self.kind} comes to rates of {tried[0]} and {tried[1]}"
            raise ConfigError(SCHEDULE_PLACE, problem, "Mend its keywords")

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
        return [name for name in taken if name not in _SCHEDULER_OURS]
