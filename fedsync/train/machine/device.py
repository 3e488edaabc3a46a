"""Devices for training, and the floating-point precision of steps; parameters and updates are always float32."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import psutil
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from fedsync.common.errors import ConfigError


def resolve(name: str, place: str = "local.device") -> torch.device:
    """Resolve ``auto``, ``cpu``, ``cuda`` or ``cuda:i``; raises `ConfigError` at ``place`` without such a device."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and not present):
        return torch.device("cpu")
    if name == "auto":
        return torch.device("cuda", 0)
    kind, _, index = name.partition(":")
    if kind != "cuda" or not (index.isdecimal() or name == "cuda"):
        raise ConfigError(place, f"{name!r} is unknown", "Write auto, cpu, cuda or cuda:0")
    number = int(index or 0)
    if number >= present:
        found = f"torch sees {present} GPUs" if present else "torch sees no GPU"
        raise ConfigError(place, f"{name!r} is not there: {found}", "Write auto or cpu, or install a CUDA torch")
    return torch.device("cuda", number)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's generators of CPU and device inside the block; restore the caller's state afterwards."""
    # Not torch.manual_seed, which seeds every GPU and takes 0.2 ms even where there is none, nor fork_rng.
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    before = [each.get_state() for each in generators]
    for each in generators:
        each.manual_seed(seed)
    try:
        yield
    finally:
        for each, state in zip(generators, before, strict=True):
            each.set_state(state)


def held_bytes(device: torch.device) -> int:
    """Bytes in use: on a GPU the peak since the last `gpu_memory_share`, on a CPU the process's resident memory."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else psutil.Process().memory_info().rss


def gpu_memory_share(device: torch.device) -> float:
    """Share of GPU memory, 0..1: that of other processes plus the peak of training since the last call."""
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    reserved, peak = statistics["reserved_bytes"]["all"]["current"], statistics["allocated_bytes"]["all"]["peak"]
    torch.cuda.reset_peak_memory_stats(device)
    return float(min(max((total - free - reserved + peak) / total, 0.0), 1.0))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that memory ran out, on a GPU or in torch's CPU allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def free_heap() -> None:
    """Return freed memory to the system; the C library otherwise keeps the memory of arrays below 32 MiB for reuse."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


PrecisionName = Literal["fp32", "bf16", "fp16"]

_DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_FIRST_WITH_BF16 = 8
"""Major compute capability of Ampere."""

_FIRST_SCALE, _LEAST_SCALE = 2.0**12, 2.0**-12


class Precision:
    """PyTorch's automatic mixed precision around one optimizer; `ConfigError` if the GPU has no bf16 arithmetic.

    Under ``fp16`` the loss is scaled, so that small gradients do not vanish. A step whose gradients overflow is
    repeated with a smaller scale and not skipped, because the report counts steps that were done. The scale restarts at
    each order, so that an order's result does not depend on earlier orders.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self._dtype = _DTYPES[name]
        self._name, self._device = name, device
        self._scaler: GradScaler | None = None
        on_gpu = device.type == "cuda"
        if name == "bf16" and on_gpu and torch.cuda.get_device_capability(device)[0] < _FIRST_WITH_BF16:
            # The GPU would emulate bf16, slower than float32.
            gpu = torch.cuda.get_device_name(device)
            raise ConfigError("local.precision", f"{device}, {gpu}, does not support bf16", "Write fp16 or fp32")

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
            problem = f"{self._name} is not supported by an operation of this model on a processor: {told}"
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
            problem = "the gradients overflow fp16"
            raise ConfigError("local.precision", problem, "Write bf16 or fp32, or lower local.learning_rate")
        return False
