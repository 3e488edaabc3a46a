"""Files that were cut off or overwritten: a reader may read or complain, and nothing else."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedsync.common.errors import ConfigError


def survives(path: Path, read: Callable[[], object], trials: int = 60) -> int:
    """Read ``path`` cut off at many places and with bytes overwritten; returns how often the reader complained.

    Anything but `ConfigError` comes through.
    """
    whole, rng, complaints = path.read_bytes(), np.random.default_rng(3), 0
    for trial in range(trials):
        if trial % 2:
            content = whole[: rng.integers(len(whole))]
        else:
            damaged = bytearray(whole)
            # Mostly in the head, where the numbers are that a reader believes.
            for place in rng.integers(min(len(whole), 80 if trial % 4 else len(whole)), size=4):
                damaged[place] = rng.integers(256)
            content = bytes(damaged)
        path.write_bytes(content)
        try:
            read()
        except ConfigError as error:
            assert error.place
            assert error.remedy
            complaints += 1
    path.write_bytes(whole)
    return complaints
