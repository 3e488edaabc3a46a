"""Entry points for trainers that the fork server `fedsync.common.nursery` starts, for several silos on one machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from fedsync.silo.session.resident_trainer import main


def prepare(*libraries: str) -> Callable[[], bool]:
    """Import the modules of trainers and the task's installed libraries; return the test whether a fork is safe."""
    for name in ("fedsync.silo.session.service", "fedsync.silo.session.silo_setup", *libraries):
        with suppress(ImportError):
            import_module(name)
    from fedsync.train.machine.device import usable_after_fork

    return usable_after_fork


def forked(arguments: list[str]) -> None:
    main(Path(arguments[0]))
