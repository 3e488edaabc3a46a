"""Standard output and standard error, which may be closed, full, or read by somebody who has left.

A command whose result is what it prints ends with an error when that is lost. A run goes on: its results are files.
"""

from __future__ import annotations

import io
import os
import sys


class _Output(io.FileIO):
    """A descriptor that is written to without an error once it has failed."""

    must_arrive = False

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            # What is still buffered, and what child processes print, must not fail again.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            if self.must_arrive:
                raise OSError(error.errno, error.strerror, "standard output") from None
            return len(memoryview(data).cast("B"))  # type: ignore[arg-type]


def guard_output() -> None:
    """Let standard error raise no errors, and standard output its first alone. Call it as the process begins."""
    for descriptor in (0, 1, 2):  # else the next file that is opened would take the place of a closed one
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        found = getattr(sys, name)
        if found is not getattr(sys, f"__{name}__"):
            continue  # a test's, or a notebook's
        encoding, errors = ("utf-8", "backslashreplace") if found is None else (found.encoding, found.errors)
        raw = _Output(descriptor, "w", closefd=False)
        raw.must_arrive = name == "stdout"
        lines = name == "stderr" or raw.isatty()
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=lines))


def output_may_be_lost() -> None:
    """From now on this command goes on although nobody can read what it prints."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, _Output):
        raw.must_arrive = False
