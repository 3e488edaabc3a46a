"""Calls into user code, with separate random seeds and with errors that name the user's file and line."""

from __future__ import annotations

import random
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint
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

_FRAME = re.compile(r'^  File "(.+)", line (\d+).*\n(?:    .*\n)*', re.MULTILINE)
"""Frame in the text of an error that PyTorch passes on from a worker process."""


@contextmanager
def own_code(device: torch.device, seed: int) -> Iterator[None]:
    """Run user code inside: seeds torch, NumPy and Python's ``random``, and restores the caller's state afterwards."""
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
    """Turn errors in user code and its libraries into `UserCodeError` with file and line; `RunError` without memory."""
    try:
        yield
    except FedSyncError:
        raise
    except (Exception, SystemExit) as error:  # an exit would end a thread, whose order then waits for ever
        if devices.is_out_of_memory(error):
            raise RunError(f"memory ran out: {_first_line(error)}") from error
        stack = traceback.extract_tb(error.__traceback__)
        own, installed = _lines(stack)
        if not own and not (installed and _is_installed(Path(stack[-1].filename))):
            raise  # an error in FedSync itself
        place, told = (own or installed)[-1], f"{type(error).__name__}: {_first_line(error)}"
        if told.startswith(f"{type(error).__name__}: Caught ") and (frames := _FRAME.findall(str(error))):
            beyond, _ = _lines([traceback.FrameSummary(file, int(line), "") for file, line in frames])
            place, told = (beyond or [place])[-1], _FRAME.split(str(error))[-1].partition("\n")[0][:_MOST_TEXT]
        raise UserCodeError(f"{place}: {told}") from error


def _is_installed(path: Path) -> bool:
    return not _INSTALLED.isdisjoint(path.parts)


def line_of(thread: int) -> str:
    """Return a thread's innermost line in the user's files, else its innermost line; log the whole stack."""
    frame = sys._current_frames().get(thread)
    stack = [] if frame is None else traceback.extract_stack(frame)
    for line in traceback.format_list(stack):
        logger.warning("%s", line)
    own, _ = _lines(stack)
    return own[-1] if own else f"{stack[-1].filename}, line {stack[-1].lineno}" if stack else "a thread that has ended"


def _lines(stack: Sequence[traceback.FrameSummary]) -> tuple[list[str], list[str]]:
    """Lines of a stack in the user's own files and in installed packages; the innermost line comes last."""
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
    """Collect (samples, batches) of each PyTorch loader that is iterated inside the block."""
    found: list[tuple[int, int]] = []
    original = DataLoader.__iter__

    def watched(loader: DataLoader[Any]) -> Any:
        if samples := length_hint(getattr(loader.batch_sampler, "sampler", loader.sampler)):
            found.append((samples, length_hint(loader)))
        return original(loader)

    DataLoader.__iter__ = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        DataLoader.__iter__ = original  # type: ignore[method-assign]


def _first_line(error: BaseException) -> str:
    try:
        lines = [line.strip() for line in str(error).splitlines()]
    except Exception:  # the error's own text fails
        lines = []
    return next(filter(None, lines), "")[:_MOST_TEXT]
