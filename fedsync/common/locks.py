"""File locks that last until their process ends in any way, and a wait with a timeout."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

PATIENCE_S = 0.2
"""Default time for attempts to take a lock [s]; `held` takes a lock for an instant only to test it."""

_PAUSE_S = 0.02


@contextmanager
def taken(path: Path, wait_s: float = PATIENCE_S) -> Iterator[bool]:
    """Take the lock of a file, waiting up to ``wait_s`` [s]; False if another process holds it. The file stays."""
    with path.open("a") as file:
        yield wait_until(lambda: _try(file), wait_s, _PAUSE_S)


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
    return os.fstat(file.fileno()).st_nlink > 0  # a file that was removed meanwhile locks nothing


def wait_until(done: Callable[[], object], most_s: float, pause_s: float) -> bool:
    """Call ``done`` every ``pause_s`` [s] until its result is true; return False after ``most_s`` [s]."""
    end_s = time.monotonic() + most_s
    while not done():
        if time.monotonic() >= end_s:
            return False
        time.sleep(pause_s)
    return True
