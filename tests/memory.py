"""How much memory something takes, as far as Python and NumPy allocate it."""

import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Taken:
    """Bytes beyond those before: the most at once, and what is left."""

    peak: int = 0
    left: int = 0


@contextmanager
def traced() -> Iterator[Taken]:
    """Counts until the end of the block; maps of files and torch's tensors are not counted."""
    taken = Taken()
    gc.collect()
    tracemalloc.start()
    try:
        yield taken
        gc.collect()
        taken.left, taken.peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def resident() -> int:
    """Bytes of files that this process holds in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))
