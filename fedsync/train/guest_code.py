"""Calling code that is not FedSync's: with seeds of its own, and with errors that name its file and line."""

from __future__ import annotations

import random
import sysconfig
import traceback
from collections.abc import Iterator, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

import fedsync
from fedsync.core.errors import FedSyncError, RunError
from fedsync.train import device as devices

_OURS, _PYTHON = Path(fedsync.__file__).parent, Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


@contextmanager
def own_code(device: torch.device, seed: int) -> Iterator[None]:
    """A user's code runs inside: torch, NumPy and Python's ``random`` are seeded, and the caller's are untouched.

    Raises:
        RunError: the code raised; says its file, its line, the error's type and message.
    """
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with devices.seeded(device, seed), _told():
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def named() -> Iterator[None]:
    """A task may run inside: what a file of the user's own raises becomes an error that names its line.

    Raises:
        RunError: such a file raised; memory that ran out is told as it is.
    """
    try:
        yield
    except FedSyncError:
        raise
    except Exception as error:
        own, _ = _lines(traceback.extract_tb(error.__traceback__))
        if not own or devices.is_out_of_memory(error):
            raise
        raise _told_of(error, own[-1]) from error


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except FedSyncError:
        raise
    except Exception as error:
        own, installed = _lines(traceback.extract_tb(error.__traceback__))
        raise _told_of(error, (own or installed or ["the app"])[-1]) from error


def innermost(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line of a stack, or of a file of the user's own if there is one."""
    own, _ = _lines(stack)
    return own[-1] if own else f"{stack[-1].filename}, line {stack[-1].lineno}" if stack else "a thread that has ended"


def _lines(stack: Sequence[traceback.FrameSummary]) -> tuple[list[str], list[str]]:
    """Lines of the user's own files in a stack, the innermost last, and those of installed packages."""
    own: list[str] = []
    installed: list[str] = []
    for frame in stack:
        path = Path(frame.filename)
        if path.is_relative_to(_OURS) or frame.filename.startswith("<"):
            continue
        if not _INSTALLED.isdisjoint(path.parts):
            installed.append(f"{path}, line {frame.lineno}")
        elif not path.is_relative_to(_PYTHON):
            own.append(f"{path}, line {frame.lineno}")
    return own, installed


def _told_of(error: Exception, place: str) -> RunError:
    return RunError(f"{place}: {type(error).__name__}: {error}")


@contextmanager
def watched_loaders() -> Iterator[list[int]]:
    """How many samples each loader of PyTorch has that is looped over inside."""
    found: list[int] = []
    original = DataLoader.__iter__

    def watched(loader: DataLoader[Any]) -> Any:
        if isinstance(loader.sampler, Sized):
            found.append(len(loader.sampler))
        return original(loader)

    DataLoader.__iter__ = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DataLoader.__iter__ = original  # type: ignore[method-assign]
