"""How a silo trains, apart from what each order says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.named import NOTHING, Wanted
from fedsync.train.optimizers import keywords_of, make_optimizer
from fedsync.train.precision import PrecisionName
from fedsync.train.schedule import Schedule, TorchSchedule


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of the local loop.

    Args:
        optimizer: PyTorch's name of one, in small letters, or ``{"kind": name, keyword: value}`` with keywords of its
            own; keeps no memory from one order to the next.
        momentum: of an optimizer that is only named, ``0 <= momentum < 1``; 0 leaves it to PyTorch.
        weight_decay: likewise, at least 0.
        schedule: how the learning rate goes within an order; None leaves it as it is.
        clip_norm: longest gradient, above 0, in the norm over all parameters; None does not look.
        accumulate: pieces, at least 1, in which the gradient of a step's batch is computed.
        workers: processes, at least 0, that fetch samples which are no tensors yet; without them, the process that
            trains does.
        proximal: mu of FedProx's ``mu / 2 * |w - base|^2``, at least 0; 0 costs nothing.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:i``.
        processes: that train together, at least 1, each on a GPU of its own where there are GPUs.
        threads: processor threads that torch may use in each process, or None to leave torch's own choice; of several
            processes on one processor, each then takes its part.
        resources: tell the server how much of the machine is left to the trainer; without it, it is not measured.
        precision: ``fp32``, or ``bf16`` or ``fp16`` by automatic mixed precision; updates are float32 always.
        channels_last: keep the weights of convolutions over images in the layout that tensor cores like.
        compile: backend of `torch.compile` for the model while it trains; "" leaves it as it is.
        deterministic: take algorithms that give the same bits each time, though they be slower.
        measured: metrics whose sums an evaluation brings.

    Raises:
        ConfigError: an option is out of range, or means nothing to the optimizer.
    """

    optimizer: str | Mapping[str, Any] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule | TorchSchedule | None = None
    clip_norm: float | None = None
    accumulate: int = 1
    workers: int = 0
    proximal: float = 0.0
    device: str = "auto"
    processes: int = 1
    threads: int | None = None
    resources: bool = True
    precision: PrecisionName = "fp32"
    channels_last: bool = False
    compile: str = ""
    deterministic: bool = False
    measured: Wanted = NOTHING

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1:
            raise ConfigError("local.momentum", f"{self.momentum} is not in 0..1", "Write, for example, 0.9")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError("local.weight_decay", f"{self.weight_decay} is not at least 0", "Write 0 or more")
        if not (math.isfinite(self.proximal) and self.proximal >= 0):
            raise ConfigError("local.proximal", f"{self.proximal} is not at least 0", "Write 0 or more")
        if self.clip_norm is not None and not (math.isfinite(self.clip_norm) and self.clip_norm > 0):
            raise ConfigError("local.clip_norm", f"{self.clip_norm} is not above 0", "Write 1.0, or leave it out")
        if self.precision not in ("fp32", "bf16", "fp16"):
            raise ConfigError("local.precision", f"{self.precision!r} is unknown", "Write fp32, bf16 or fp16")
        if self.processes < 1:
            raise ConfigError("local.processes", f"{self.processes} is below 1", "Write 1 or more, or leave it out")
        if self.threads is not None and self.threads < 1:
            raise ConfigError("local.threads", f"{self.threads} is below 1", "Write 1 or more, or leave it out")
        self.make_optimizer([nn.Parameter(torch.zeros(1, 1))])

    def make_optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float = 1.0) -> torch.optim.Optimizer:
        """A fresh optimizer; orders set its learning rate.

        Raises:
            ConfigError: it is not PyTorch's, or it refuses a keyword or the parameters.
        """
        kind, own = _split(self.optimizer)
        short = {name: value for name in ("momentum", "weight_decay") if (value := getattr(self, name))}
        for name in short:
            if not isinstance(self.optimizer, str):
                raise ConfigError(f"local.{name}", "local.optimizer has keywords", f"Write {name} among them")
            if name not in keywords_of(kind):
                raise ConfigError(f"local.{name}", f"it means nothing to {kind}", "Leave it out, or use sgd")
        return make_optimizer(kind, {**short, **own}, parameters, learning_rate)


def _split(optimizer: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Its name and its keywords."""
    if isinstance(optimizer, str):
        return optimizer, {}
    return optimizer["kind"], {name: value for name, value in optimizer.items() if name != "kind"}
