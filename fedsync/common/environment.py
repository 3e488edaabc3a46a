"""Environment variable with Flower's run id and node id of a trainer."""

from __future__ import annotations

import os

FLOWER_IDS = "FEDSYNC_FLOWER_IDS"


def flower_ids(index: int) -> tuple[int, int]:
    """Return Flower's run id and node id of this process; without Flower, 1 and index + 1."""
    run, _, node = os.environ.get(FLOWER_IDS, "").partition(" ")
    return (int(run), int(node)) if node else (1, index + 1)
