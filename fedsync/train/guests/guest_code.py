"""Calling code that is not FedSync's: with seeds of its own, and with errors that name its file and line."""

from __future__ import annotations

import random
import sys
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
from fedsync.common import foreign
from fedsync.common.errors import FedSyncError, RunError, UserCodeError
from fedsync.train.machine import device as devices

logger = foreign.logger(__name__)

_OURS, _PYTHON = Path(fedsync.__file__).parent, Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}
_MOST_TEXT = 400


@contextmanager
def own_code(device: torch.device, seed: int) -> Iterator[None]:
    """A user's code runs inside: torch, NumPy and Python's ``random`` are seeded, and the caller's are untouched."""
    before = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        with devices.seeded(device, seed), guarded():
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def guarded() -> Iterator[None]:
    """The one guard around training code, in every runtime: what it raises becomes one sentence with a file and a line.

    Raises:
        UserCodeError: a file of the user's own raised, or a library on its behalf.
        RunError: memory ran out.
    """
    try:
        yield
    except FedSyncError:
        raise
    except Exception as error:
        if devices.is_out_of_memory(error):
            raise RunError(f"memory ran out: {_first_line(error)}") from error
        stack = traceback.extract_tb(error.__traceback__)
        own, installed = _lines(stack)
        if not own and not (installed and _is_installed(Path(stack[-1].filename))):
            raise  # FedSync's own fault
        raise UserCodeError(f"{(own or installed)[-1]}: {type(error).__name__}: {_first_line(error)}") from error


def _is_installed(path: Path) -> bool:
    return not _INSTALLED.isdisjoint(path.parts)


def line_of(thread: int) -> str:
    """The innermost line at which a thread stands, or of a file of the user's own if there is one; its stack is logged.

    Args:
        thread: its number.
    """
    frame = sys._current_frames().get(thread)
    stack = [] if frame is None else traceback.extract_stack(frame)
    for line in traceback.format_list(stack):
        logger.warning("%s", line)
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
        if _is_installed(path):
            installed.append(f"{path}, line {frame.lineno}")
        elif not path.is_relative_to(_PYTHON):
            own.append(f"{path}, line {frame.lineno}")
    return own, installed


@contextmanager
def watched_loaders() -> Iterator[list[tuple[int, int]]]:
    """Numbers of samples and of batches of each loader of PyTorch that is looped over inside."""
    found: list[tuple[int, int]] = []
    original = DataLoader.__iter__

    def watched(loader: DataLoader[Any]) -> Any:
        if isinstance(loader.sampler, Sized):
            found.append((len(loader.sampler), len(loader)))
        return original(loader)

    DataLoader.__iter__ = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DataLoader.__iter__ = original  # type: ignore[method-assign]


def _first_line(error: Exception) -> str:
    """The first line of an error's message; libraries explain at length."""
    try:
        lines = [line.strip() for line in str(error).splitlines()]
    except Exception:  # it cannot say what it is
        lines = []
    return next(filter(None, lines), "")[:_MOST_TEXT]
