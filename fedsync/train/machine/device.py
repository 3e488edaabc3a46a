"""Where training runs: the only file that tells a GPU from a processor."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.train.machine.resources import own_memory_bytes


def resolve(name: str, place: str = "local.device") -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:i`` means on this machine.

    Args:
        name: one of these.
        place: where it is written, for the error.

    Raises:
        ConfigError: the name is none of these, or there is no such GPU.
    """
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


def several(name: str, processes: int) -> list[str]:
    """Where so many processes train: all on the processor, or each on a GPU of its own from ``name`` on.

    Raises:
        ConfigError: as `resolve`, or there are not so many GPUs.
    """
    first = resolve(name)
    if first.type == "cpu":
        return ["cpu"] * processes
    there = torch.cuda.device_count() - first.index
    if there < processes:
        problem = f"{processes}, and from {first} on torch sees {there} GPUs"
        raise ConfigError("local.processes", problem, f"Write {there}, or an earlier device")
    return [f"cuda:{first.index + number}" for number in range(processes)]


def compiled(model: nn.Module, backend: str, device: torch.device) -> nn.Module:
    """The same model, with the same tensors, called by way of `torch.compile`; ``model`` itself stays as it is.

    The first size of a batch is compiled for itself, the second for all sizes.

    Raises:
        ConfigError: what the compiler itself needs is not there.
    """
    if backend == "inductor" and device.type == "cpu" and not shutil.which(os.environ.get("CXX", "g++")):
        problem = "torch.compile for a processor calls a C++ compiler, and there is none by the name of g++"
        raise ConfigError("local.compile", problem, "Install g++, name another in CXX, or write false")
    if backend == "inductor" and device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("local.compile", "torch.compile for a GPU needs triton", "Install triton, or write false")
    return cast(nn.Module, torch.compile(model, backend=backend))


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all it was given, so that a clock read means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seeded torch generators inside, of the processor and of the device; the caller's untouched outside."""
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


def channels_last(model: nn.Module) -> None:
    """Lay out the weights of convolutions over images channel by channel within a pixel.

    Their inputs follow: a convolution takes the layout of its weights.

    Raises:
        ConfigError: the model has no such weights.
    """
    if not any(parameter.dim() == 4 for parameter in model.parameters()):
        raise ConfigError("local.channels_last", "the model has no convolution over images", "Write false")
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's types know no such keyword


_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


def allow_determinism(device: torch.device) -> None:
    """Give cuBLAS the fixed workspace without which its sums depend on chance; before the first CUDA call.

    Raises:
        ConfigError: cuBLAS has begun without.
    """
    if device.type != "cuda" or _WORKSPACE in os.environ:
        return
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
        raise ConfigError(
            "local.deterministic", "CUDA runs already", f"Set {_WORKSPACE}=:4096:8 in the silo's environment"
        )
    os.environ[_WORKSPACE] = ":4096:8"


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Inside, torch takes algorithms that give the same bits each time; outside, what it took before.

    Raises:
        ConfigError: the model needs an operation that has none on this device.
    """
    if not enabled:
        yield
        return
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        problem = str(error).partition(". ")[0]
        raise ConfigError("local.deterministic", problem, "Write false, or change the model") from error
    finally:
        torch.set_deterministic_debug_mode(before[0])
        cudnn.deterministic, cudnn.benchmark = before[1:]


def held_bytes(device: torch.device) -> int:
    """Bytes held: on a GPU the most since `gpu_memory_share` was last asked, else what this process has resident."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else own_memory_bytes()


def gpu_memory_share(device: torch.device) -> float:
    """Share of the GPU's memory that others hold, or that training needed at its peak since the last call, 0..1.

    Memory that torch keeps for later is free for training, so it does not count.
    """
    free, total = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats_as_nested_dict(device)
    reserved, peak = statistics["reserved_bytes"]["all"]["current"], statistics["allocated_bytes"]["all"]["peak"]
    torch.cuda.reset_peak_memory_stats(device)
    return float(min(max((total - free - reserved + peak) / total, 0.0), 1.0))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or in torch's processor allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def free_heap() -> None:
    """Give back what this process has freed: of arrays below 32 MiB the C library keeps the memory for later ones."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_cache(device: torch.device) -> None:
    """Give back memory that torch keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
