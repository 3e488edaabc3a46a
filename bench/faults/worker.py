"""A process that has imported the tests' libraries and forks a child for each run of pytest, which saves three seconds.

`repository_copy.Copy` starts it. It reads one JSON object a line from standard input, the arguments of `run`, and
writes one a line to standard output: whether the time was up. It must never import FedSync, which the children import
anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
from importlib import import_module


def run(root: str, arguments: list[str], variables: dict[str, str], output: str, limit_s: float | None) -> bool:
    """Run pytest in a child, in the folder ``root``; whatever it began ends with it. True: the time was up."""
    child = os.fork()
    if child == 0:
        _be_pytest(root, arguments, variables, output)
    ended = os.pidfd_open(child)
    ready, _, _ = select.select([ended, sys.stdin], [], [], limit_s)
    os.close(ended)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if sys.stdin in ready:
        raise SystemExit("whoever asked is gone")
    return not ready


def _be_pytest(root: str, arguments: list[str], variables: dict[str, str], output: str) -> None:
    import pytest

    os.setsid()  # so that the group can be ended
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(root)
    os.environ.update(variables)
    sys.path[0] = root
    try:
        pytest.main(arguments)
    finally:
        sys.stdout.flush()
        os._exit(0)  # nothing of the parent's is to be tidied up


def main(imported: list[str]) -> None:
    """Serve, with these modules imported as far as they are installed."""
    for name in imported:
        with contextlib.suppress(ImportError):
            import_module(name)
    assert "fedsync" not in sys.modules
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)
