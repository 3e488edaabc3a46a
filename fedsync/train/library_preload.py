"""Imports that the trainers of one machine share, done once before trainers are forked."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module

import torch


def preload(libraries: Iterable[str]) -> None:
    """Import libraries; starts no thread and opens no device. Skips modules that are not installed."""
    for name in libraries:
        with suppress(ImportError):
            import_module(name)


def sound() -> bool:
    """Return whether this forked process can use a GPU; it cannot if CUDA was opened before the fork."""
    return not torch.cuda._is_in_bad_fork()
