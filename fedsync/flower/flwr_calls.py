"""Several calls of Flower's command line in one process, because its imports take a second or two.

Usage: ``python -m fedsync.flower.flwr_calls``, with a JSON list of argument lists on standard input. Each finished call
writes one line of JSON: exit code and output.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any


def call(command: Any, arguments: Sequence[str]) -> tuple[int, str]:
    """Run one call; return its exit code and all its output, including output that bypasses Python's streams."""
    code = 0
    with tempfile.TemporaryFile() as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
        try:
            command(list(arguments), prog_name="flwr")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                print(end.code)
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        said.seek(0)
        return code, said.read().decode(errors="replace")


def main() -> None:
    (found,) = entry_points(group="console_scripts", name="flwr")
    command, told = found.load(), os.fdopen(os.dup(1), "w", encoding="utf-8")
    for arguments in json.load(sys.stdin):
        print(json.dumps(call(command, arguments)), file=told, flush=True)


if __name__ == "__main__":
    main()
