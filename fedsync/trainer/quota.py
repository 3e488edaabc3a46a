"""Keeps a silo's disk from filling up: old trainers' folders go, and so does the beginning of a long log."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedsync.trainer.folder import tenant

logger = logging.getLogger(__name__)

_RECENT_S = 3600.0
"""A folder that was used so recently [s] stays: its trainer may be about to start, or its run may pause."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """A trainer's folder.

    Args:
        path: of the folder.
        nbytes: of all files in it.
        used_s: when one of them was last written [s since the epoch].
    """

    path: Path
    nbytes: int
    used_s: float


def superfluous(found: list[Leftover], quota_bytes: int, busy: Callable[[Path], bool]) -> list[Path]:
    """Which folders have to go so that the rest fits, oldest first; never the newest, nor one that is busy."""
    total = sum(each.nbytes for each in found)
    doomed = []
    for each in sorted(found, key=lambda each: (each.used_s, each.path))[:-1]:
        if total <= quota_bytes:
            break
        if not busy(each.path):
            doomed.append(each.path)
            total -= each.nbytes
    return doomed


def tidy(root: Path, quota_bytes: int) -> list[Path]:
    """Remove trainers' folders in ``root`` until at most ``quota_bytes`` are left; returns those removed.

    One that is wanted again after all is made anew, and its silo goes on as one whose disk was lost.
    """
    found = [_measure(folder) for folder in root.iterdir() if folder.is_dir()] if root.is_dir() else []
    recent = {each.path for each in found if time.time() - each.used_s < _RECENT_S}
    doomed = superfluous(found, quota_bytes, lambda folder: folder in recent or tenant(folder) is not None)
    for folder in doomed:
        logger.warning("removed %s: the state folder has more than %d bytes", folder, quota_bytes)
        shutil.rmtree(folder, ignore_errors=True)
    return doomed


def bound_log(log: Path, most_bytes: int) -> None:
    """Put a log that has grown longer aside as ``<name>.1``, its last ``most_bytes``, and empty it.

    For one that processes hold open to append to, and would go on writing to under any name.
    """
    older = log.with_name(f"{log.name}.1")
    try:
        if log.stat().st_size <= most_bytes:
            return
        with log.open("rb") as file:
            file.seek(-most_bytes, os.SEEK_END)
            older.write_bytes(file.read(most_bytes))
    except FileNotFoundError:
        return
    except OSError:  # A full disk: to have room matters more than what was said.
        older.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.truncate(log, 0)


def _measure(folder: Path) -> Leftover:
    nbytes, used_s = 0, 0.0
    for file in folder.rglob("*"):
        try:
            status = file.lstat()
        except FileNotFoundError:  # it went while we looked
            continue
        nbytes += status.st_size
        used_s = max(used_s, status.st_mtime)
    return Leftover(folder, nbytes, used_s)
