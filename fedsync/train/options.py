"""Options of local training that stay the same for all orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.named import NOTHING, Wanted
from fedsync.train.optimizers import Schedule, TorchSchedule, keywords_of, make_optimizer
from fedsync.train.precision import PrecisionName


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Options of the local loop.

    Args:
        optimizer: lower-case name of a PyTorch optimizer, or ``{"kind": name, keyword: value}``. Its state is reset
            at each order.
        momentum: for an optimizer given by name, ``0 <= momentum < 1``; 0 means PyTorch's default.
        weight_decay: for an optimizer given by name, at least 0; 0 means PyTorch's default.
        schedule: learning rate within an order; None keeps the rate constant.
        clip_norm: largest gradient norm over all parameters, above 0; None does not clip.
        accumulate: least number of pieces, at least 1, in which a batch's gradient is computed.
        workers: loader processes, at least 0, for data that are not tensors; with 0 the training process reads.
        proximal: mu of FedProx's ``mu / 2 * |w - base|^2``, at least 0; 0 costs nothing.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:i``.
        processes: processes that train together, at least 1, each on its own GPU if there are GPUs.
        threads: CPU threads of torch per process. None keeps torch's default; several CPU processes share the CPUs.
        resources: whether to measure the machine's free share and send it to the server.
        precision: ``fp32``, or ``bf16`` or ``fp16`` by automatic mixed precision; updates are always float32.
        channels_last: store weights of 2-D convolutions in the layout that tensor cores prefer.
        compile: backend of `torch.compile` for training; "" does not compile.
        deterministic: use bit-reproducible algorithms, even if slower.
        measured: metrics whose sums an evaluation returns.
        private: train by DP-SGD (`fedsync.train.dp_sgd`).

    Raises `ConfigError` if the optimizer does not accept an option; `fedsync.config.training` checks ranges.
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
    private: bool = False

    def __post_init__(self) -> None:
        if self.processes < 1:  # of a node's configuration, which no schema checks
            raise ConfigError("local.processes", f"{self.processes} is below 1", "Write 1 or more, or leave it out")
        self.make_optimizer([nn.Parameter(torch.zeros(1, 1))])

    def make_optimizer(self, parameters: Iterable[nn.Parameter], learning_rate: float = 1.0) -> torch.optim.Optimizer:
        """Make a new optimizer, with a learning rate that orders replace; raises `ConfigError` as `make_optimizer`."""
        kind, own = _split(self.optimizer)
        short = {name: value for name in ("momentum", "weight_decay") if (value := getattr(self, name))}
        for name in short:
            if not isinstance(self.optimizer, str):
                raise ConfigError(f"local.{name}", "local.optimizer has keywords", f"Write {name} among them")
            if name not in keywords_of(kind):
                raise ConfigError(f"local.{name}", f"it means nothing to {kind}", "Leave it out, or use sgd")
        return make_optimizer(kind, {**short, **own}, parameters, learning_rate)


def _split(optimizer: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    if isinstance(optimizer, str):
        return optimizer, {}
    return optimizer["kind"], {name: value for name, value in optimizer.items() if name != "kind"}
