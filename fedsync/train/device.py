"""Where training runs: the only file that tells a GPU from a processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch

from fedsync.core.errors import ConfigError


def resolve(name: str) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:i`` means on this machine.

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
        raise ConfigError("local.device", f"{name!r} is unknown", "Write auto, cpu, cuda or cuda:0")
    number = int(index or 0)
    if number >= present:
        found = f"torch sees {present} GPUs" if present else "torch sees no GPU"
        raise ConfigError(
            "local.device", f"{name!r} is not there: {found}", "Write auto or cpu, or install a CUDA torch"
        )
    return torch.device("cuda", number)


def synchronise(device: torch.device) -> None:
    """Wait until the device has done all it was given, so that a clock read means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seeded torch generators inside, of the processor and of the device; the caller's untouched outside."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        # Not torch.manual_seed: it seeds every GPU, and takes 0.2 ms even where there is none.
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield


def held_bytes(device: torch.device, process: psutil.Process) -> int:
    """Bytes held: on a GPU the most there ever were, else resident memory of ``process`` now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(process.memory_info().rss)


def memory_share(device: torch.device) -> float:
    """Share of the memory that training competes for, the GPU's or the machine's, that is in use, 0..1."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return 1.0 - free / total
    return float(psutil.virtual_memory().percent) / 100.0


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or in torch's processor allocator."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


def free_cache(device: torch.device) -> None:
    """Give back memory that torch keeps for later."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
