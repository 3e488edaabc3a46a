"""Temporary environment variables, and the variable that gives a trainer Flower's run id and node id."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

FLOWER_IDS = "FEDSYNC_FLOWER_IDS"
"""Environment variable of a trainer: Flower's run id and node id when it was started."""


def flower_ids(index: int) -> tuple[int, int]:
    """Return Flower's run id and node id of this process; without Flower, 1 and index + 1."""
    run, _, node = os.environ.get(FLOWER_IDS, "").partition(" ")
    return (int(run), int(node)) if node else (1, index + 1)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
