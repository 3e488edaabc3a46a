"""Entry points of forked trainers for `fedsync.common.nursery`, where one machine emulates several silos."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedsync.silo.session.resident_trainer import main


def prepare(*libraries: str) -> Callable[[], bool]:
    """Import the modules of trainers and the task's libraries; return the test whether a fork is safe."""
    from fedsync.train.library_preload import preload, sound

    preload(["fedsync.silo.session.service", "fedsync.silo.session.silo_setup", *libraries])
    return sound


def forked(arguments: list[str]) -> None:
    """Run the trainer of the folder that the first argument names."""
    main(Path(arguments[0]))
