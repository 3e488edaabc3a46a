"""Error handling for a standard output or standard error that is closed, full, or without a reader.

A command ends with an error when its output is lost. A run continues: its results are files.
"""

from __future__ import annotations

import io
import os
import sys


class _Output(io.FileIO):
    """Descriptor that accepts further writes without an error after its first failure."""

    must_arrive = False

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            # Buffered data and the output of child processes must not fail again.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.must_arrive:
                raise OSError(error.errno, error.strerror, "standard output") from None
            return len(memoryview(data).cast("B"))  # type: ignore[arg-type]


def guard_output() -> None:
    """Make standard error raise no errors, and standard output only its first. Call this at process start."""
    for descriptor in (0, 1, 2):  # otherwise the next opened file would take the place of a closed descriptor
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        found = getattr(sys, name)
        if found is not getattr(sys, f"__{name}__"):
            continue  # replaced by a test or a notebook
        encoding, errors = ("utf-8", "backslashreplace") if found is None else (found.encoding, found.errors)
        raw = _Output(descriptor, "w", closefd=False)
        raw.must_arrive = name == "stdout"
        lines = name == "stderr" or raw.isatty()
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=lines))


def output_may_be_lost() -> None:
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Output):
        raw.must_arrive = False
