"""Locks that end with the process that holds them, however it went."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

PATIENCE_S = 0.2
"""How long a lock is tried for [s]: whoever only looks whether somebody has it, has it for an instant."""

_PAUSE_S = 0.02


@contextmanager
def taken(path: Path, wait_s: float = PATIENCE_S) -> Iterator[bool]:
    """Take the lock that a file stands for; False where somebody has it. The file stays.

    Args:
        path: the file.
        wait_s: how long to wait for it [s].
    """
    with path.open("a") as file:
        end_s = time.monotonic() + wait_s
        got = _try(file)
        while not got and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
            got = _try(file)
        yield got


def held(path: Path) -> bool:
    if not path.exists():
        return False
    with taken(path, 0.0) as free:
        return not free


def _try(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.fstat(file.fileno()).st_nlink > 0  # one that was removed meanwhile locks nothing
