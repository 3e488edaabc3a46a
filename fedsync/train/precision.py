"""Floating-point precision of local steps; parameters and updates are always float32."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from fedsync.common.errors import ConfigError
from fedsync.train.machine.device import is_out_of_memory

PrecisionName = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_WITH_BF16 = 8
"""Major compute capability of Ampere."""

_FIRST_SCALE, _LEAST_SCALE = 2.0**12, 2.0**-12


class Precision:
    """PyTorch's automatic mixed precision around one optimizer; raises `ConfigError` if the GPU has no bf16 arithmetic.

    Under ``fp16`` the loss is scaled, so that small gradients do not vanish. A step whose gradients overflow is
    repeated with a smaller scale and not skipped, because the report counts steps that were done. The scale restarts
    at each order, so that an order's result does not depend on earlier orders.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self._dtype = _DTYPES[name]
        self._name, self._device = name, device
        self._scaler: GradScaler | None = None
        on_gpu = device.type == "cuda"
        if name == "bf16" and on_gpu and torch.cuda.get_device_capability(device)[0] < _FIRST_WITH_BF16:
            # The GPU would emulate bf16, slower than float32.
            gpu = torch.cuda.get_device_name(device)
            raise ConfigError("local.precision", f"bf16 is beyond {device}, {gpu}", "Write fp16 or fp32")

    def check(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        """Try one loss and its gradients on a CPU; raises `ConfigError` if an operation lacks this precision."""
        if self._dtype is None or self._device.type != "cpu":
            return
        before = [buffer.clone() for buffer in model.buffers()]
        try:
            with self.forward():
                tried = loss()
            tried.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        except RuntimeError as error:
            if is_out_of_memory(error):
                return  # training handles memory errors itself
            loss()  # an error that also occurs in float32 is raised as it is
            told = str(error).partition(". ")[0]
            problem = f"{self._name} is beyond an operation of this model on a processor: {told}"
            other = "bf16 or fp32" if self._name == "fp16" else "fp32"
            raise ConfigError("local.precision", problem, f"Write {other}, or train on a GPU") from error
        finally:
            for parameter in model.parameters():
                parameter.grad = None
            for buffer, values in zip(model.buffers(), before, strict=True):
                buffer.copy_(values)

    def renew(self) -> None:
        if self._dtype is torch.float16:
            self._scaler = GradScaler(self._device.type, init_scale=_FIRST_SCALE)

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext() if self._dtype is None else torch.autocast(self._device.type, self._dtype)

    def backward(self, loss: Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, after all pieces of a batch."""
        if self._scaler is not None:
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Do the optimizer's step; False if gradients overflowed: nothing changed, and the caller repeats the step.

        Raises `ConfigError` if the gradients overflow at every scale.
        """
        if self._scaler is None:
            optimizer.step()
            return True
        scale = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        if self._scaler.get_scale() >= scale:
            return True
        if scale <= _LEAST_SCALE:
            raise ConfigError(
                "local.precision", "the gradients overflow fp16", "Write bf16 or fp32, or lower local.learning_rate"
            )
        return False
