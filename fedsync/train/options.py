"""Options of local training that are the same in the whole run, with PyTorch's optimizers by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss
from fedsync.evaluation.metrics.named import NOTHING, Wanted
from fedsync.train.machine.device import PrecisionName


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of the local loop.

    Args:
        optimizer: lower-case name of a PyTorch optimizer, or ``{"kind": name, keyword: value}``. Its state is reset
            at each order.
        momentum: for an optimizer given by name, ``0 <= momentum < 1``; 0 means PyTorch's default.
        weight_decay: for an optimizer given by name, at least 0; 0 means PyTorch's default.
        clip_norm: largest gradient norm over all parameters, above 0; None does not clip.
        workers: loader processes, at least 0, for data that are not tensors; with 0 the training process reads.
        proximal: mu of FedProx's ``mu / 2 * |w - base|^2``, at least 0; 0 costs nothing.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:i``.
        threads: CPU threads of torch. None keeps torch's default.
        resources: whether to measure the machine's free share and send it to the server.
        precision: ``fp32``, or ``bf16`` or ``fp16`` by automatic mixed precision; updates are always float32.
        measured: metrics whose sums an evaluation returns.
        private: train by DP-SGD (`fedsync.train.dp_sgd`).

    Raises `ConfigError` if the optimizer does not accept an option; `fedsync.config.training` checks ranges.
    """

    optimizer: str | Mapping[str, Any] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    workers: int = 0
    proximal: float = 0.0
    device: str = "auto"
    threads: int | None = None
    resources: bool = True
    precision: PrecisionName = "fp32"
    measured: Wanted = NOTHING
    private: bool = False

    def __post_init__(self) -> None:
        trial = nn.Parameter(torch.zeros(1, 1))
        trial.grad = torch.zeros(1, 1)
        self.make_optimizer([trial], tried=True)

    def make_optimizer(
        self, parameters: Iterable[nn.Parameter], learning_rate: float = 1.0, *, tried: bool = False
    ) -> torch.optim.Optimizer:
        """Make a new optimizer, with a learning rate that orders replace; with ``tried``, it also makes a step, since
        PyTorch checks some values only there. Raises `ConfigError` for an unknown kind or keyword, or a refused value.
        """
        given = {"kind": self.optimizer} if isinstance(self.optimizer, str) else self.optimizer
        kind, own = given["kind"], {name: value for name, value in given.items() if name != "kind"}
        short = {name: value for name in ("momentum", "weight_decay") if (value := getattr(self, name))}
        allowed, keywords = keywords_of(kind), {**short, **own}
        for name in short:
            if not isinstance(self.optimizer, str):
                raise ConfigError(f"local.{name}", "local.optimizer has keywords", f"Write {name} among them")
            if name not in allowed:
                raise ConfigError(f"local.{name}", f"it has no effect on {kind}", "Leave it out, or use sgd")
        for name in keywords:
            if name not in allowed:
                raise ConfigError(PLACE, f"{kind} takes no {name!r}", near_miss(name, allowed))
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in keywords.items()}
        make: Callable[..., torch.optim.Optimizer] = _uncompiled(optimizers()[kind])
        try:
            made = make(parameters, lr=learning_rate, **values)
            if tried:
                made.step()
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            told = ", ".join(f"{name} {value}" for name, value in keywords.items()) or "the model"
            text = " ".join(str(error).split()).replace(";", ",")
            raise ConfigError(PLACE, f"{kind} refuses {told}: {text}", "Correct the value") from error
        return made


PLACE = "local.optimizer"

_UNFIT = {"Optimizer", "LBFGS", "SparseAdam"}
"""The base class, an optimizer that needs a closure, and one that needs sparse gradients."""

_OURS = {"self", "params", "lr", "differentiable", "capturable"}


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    found = {name: each for name, each in vars(torch.optim).items() if isinstance(each, type)}
    return {name.lower(): each for name, each in found.items() if name not in _UNFIT}


def keywords_of(kind: str) -> list[str]:
    """Keywords of an optimizer, except those that the loop sets; `ConfigError` if PyTorch has no such optimizer."""
    known = optimizers()
    if kind not in known:
        raise ConfigError(PLACE, f"{kind!r} is unknown", near_miss(kind, known))
    return [name for name in inspect.signature(known[kind]).parameters if name not in _OURS]


def _uncompiled(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return the optimizer class without PyTorch's wrappers for compiled code: a second of imports, and 70 MB."""
    methods = {
        "add_param_group": inspect.unwrap(kind.add_param_group),
        "step": torch.no_grad()(inspect.unwrap(kind.step)),
    }
    return type(kind.__name__, (kind,), methods)
