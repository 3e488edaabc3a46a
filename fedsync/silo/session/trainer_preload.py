"""Trainers that are forked: for `fedsync.common.nursery`, where several silos are emulated on one machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedsync.silo.session.resident_trainer import main


def prepare(*libraries: str) -> Callable[[], bool]:
    """Import what trainers need, and these libraries of their task; returns whether a fork is sound."""
    from fedsync.train.library_preload import preload, sound

    preload(["fedsync.silo.session.service", "fedsync.silo.session.silo_setup", *libraries])
    return sound


def forked(arguments: list[str]) -> None:
    """Be the trainer of the folder that the argument names."""
    main(Path(arguments[0]))
