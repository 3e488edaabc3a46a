"""Processes that have a trainer's folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HOLD = """
import pathlib, sys
from fedsync.silo.session.trainer_folder import FolderLock
folder = pathlib.Path(sys.argv[1])
tenure = FolderLock.take(folder)
if "listens" in sys.argv:
    from fedsync.silo.session.trainer_socket import listen
    listener = listen(folder / "trainer.sock")
print(tenure is not None, flush=True)
input()
"""


@contextmanager
def holder(folder: Path, *more: str) -> Iterator[int]:
    """Number of a process that has the folder until the block ends. With ``listens`` it listens, and lets nobody in."""
    command = [sys.executable, "-c", _HOLD, str(folder), *more]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"True\n"
        try:
            yield process.pid
        finally:
            process.kill()
