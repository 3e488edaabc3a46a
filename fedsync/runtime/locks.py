"""Locks that end with the process that holds them, however it went."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def taken(path: Path) -> Iterator[bool]:
    """Take the lock that a file stands for; False where somebody has it. The file stays."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def held(path: Path) -> bool:
    """Whether some process has the lock."""
    if not path.exists():
        return False
    with taken(path) as free:
        return not free
