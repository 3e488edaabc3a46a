"""What trainers of one machine can share: libraries, imported once before trainers are forked."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module

import torch


def preload(libraries: Iterable[str]) -> None:
    """Import libraries; starts no thread and opens no device.

    Args:
        libraries: modules; those that are not installed are left out, and whoever needs them says so.
    """
    for name in libraries:
        with suppress(ImportError):
            import_module(name)


def sound() -> bool:
    """Whether this process, which was forked, can use a device: not if one was opened before."""
    return not torch.cuda._is_in_bad_fork()
