"""A deployed federation as its people start it: ``fedsync server start``, and ``fedsync silo start`` for each silo."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 120.0

SMALL = "task={kind: mlp, data: {kind: blobs, samples: 200}}"
"""A task whose trainers import no library of data: for tests of processes, which learn nothing from what is trained."""


def fedsync(*arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
    with (cwd / f"{arguments[0]}.out").open("ab") as out:
        command = [sys.executable, "-m", "fedsync", *arguments]
        return subprocess.Popen(command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def wait_for(holds: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.1)
