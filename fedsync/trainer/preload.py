"""Trainers that are forked: for `fedsync.common.nursery`, where several silos are emulated on one machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedsync.trainer.server import main


def prepare(*libraries: str) -> Callable[[], bool]:
    """Import what trainers need, and these libraries of their task; returns whether a fork is sound."""
    from fedsync.train.preload import preload, sound

    preload(["fedsync.trainer.service", "fedsync.trainer.place", *libraries])
    return sound


def forked(arguments: list[str]) -> None:
    """Be the trainer of the folder that the argument names."""
    main(Path(arguments[0]))
