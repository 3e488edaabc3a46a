"""Calling code that is not FedSync's: with seeds of its own, and with errors that name its file and line."""

from __future__ import annotations

import random
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

import fedsync
from fedsync.core.errors import FedSyncError, RunError
from fedsync.train import device as devices

_OURS = str(Path(fedsync.__file__).parent)


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
def _told() -> Iterator[None]:
    try:
        yield
    except FedSyncError:
        raise
    except Exception as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_OURS)]
        own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
        place = f"{own[-1].filename}, line {own[-1].lineno}" if own else "the app"
        raise RunError(f"{place}: {type(error).__name__}: {error}") from error
