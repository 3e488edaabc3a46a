"""File access and error messages that all readers share.

An error names file, row and column, but never the cell's content: the error's reader may have no right to the data.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import open_data

MAX_CELLS = 2**31
"""Limit of values in one data set; a header with a larger number is rejected."""

_PIECE = 1 << 24


def find(folder: str, *patterns: str) -> Path:
    """Find the single file in ``folder`` for the first pattern with a match; `ConfigError` if none or several match."""
    if not Path(folder).is_dir():
        raise ConfigError(folder, "there is no such folder", "Fix task.data.folder; it is relative to the YAML file")
    for pattern in patterns:
        found = sorted(path for path in Path(folder).glob(pattern) if path.is_file())
        if len(found) > 1:
            raise ConfigError(folder, f"{len(found)} files match {pattern}", "Move all but one elsewhere")
        if found:
            return found[0]
    raise ConfigError(folder, f"no file matches {' or '.join(patterns)}", "Put it there under its usual name")


def optional(folder: str, *patterns: str) -> Path | None:
    """Find a file as `find` does; None if no file matches."""
    fits = any(path.is_file() for pattern in patterns for path in Path(folder).glob(pattern))
    return find(folder, *patterns) if fits else None


def read_at_most(path: Path, size: int) -> bytes:
    """Read at most ``size`` bytes of a file, unpacked if its name ends in .gz; `ConfigError` for a damaged file."""
    parts: list[bytes] = []
    with reading(path), open_data(path) as file, gzip.open(file) if path.suffix == ".gz" else file as stream:
        while size > 0 and (part := stream.read(min(size, _PIECE))):
            parts.append(part)
            size -= len(part)
    return b"".join(parts)


@contextmanager
def reading(path: Path | str, key: str = "task.data") -> Iterator[None]:
    """Convert system errors about a file, which ``key`` names, to `ConfigError`."""
    try:
        yield
    except EOFError as error:
        raise ConfigError(str(path), "the file ends too early", "Copy it again") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise ConfigError(str(path), "the file is damaged", "Copy it again") from error
    except OSError as error:
        problem = f"cannot read the file: {error.strerror or type(error).__name__}"
        raise ConfigError(str(path), problem, f"Correct the path in {key}") from error


def check_classes(path: Path | str, labels: NDArray[np.int64], classes: int) -> None:
    """Raise `ConfigError` at the first sample whose label is not in ``0 .. classes - 1``."""
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if len(wrong):
        problem = f"the label is not one of the classes 0 to {classes - 1}"
        raise ConfigError(f"{path}, sample {wrong[0] + 1}", problem, "Correct the file, or task.data.classes")


def check_finite(path: Path | str, values: NDArray[np.float32]) -> None:
    """Raise `ConfigError` at the first sample (first axis) with a value that is not finite."""
    fine = np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if not fine.all():
        problem = "a value is missing or not finite"
        raise ConfigError(f"{path}, sample {int(np.argmin(fine)) + 1}", problem, "Correct or remove the sample")


def check_cells(place: str, cells: int) -> None:
    if cells > MAX_CELLS:
        problem = f"the header promises more than {MAX_CELLS} values"
        raise ConfigError(place, problem, "Copy the file again, or split it")
