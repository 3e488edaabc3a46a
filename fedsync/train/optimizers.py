"""PyTorch's optimizers by name, with their own keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

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
    """Return the optimizer class without PyTorch's wrappers for compiled code, which the loop never uses.

    The wrappers cost a second of imports (`torch._dynamo`), and 70 MB in each trainer.
    """
    methods = {
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
    }
    return type(kind.__name__, (kind,), methods)


def _told(keywords: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in keywords.items()) or "the model"
