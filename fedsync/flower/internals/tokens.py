"""Gives an app the token of its task by a file that only its user can open.

Flower gives it on the command line, where every user of the machine can read it: with it, one speaks for the app. This
takes Flower's executor apart, so it serves only the versions in `fedsync.flower.internals.versions.TESTED`.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

_OPTION = "--token"


def start_without_token(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start an app; the token on its command line becomes a file in memory, which it inherits."""
    place = list(command).index(_OPTION)
    file = os.memfd_create("token")
    try:
        os.write(file, command[place + 1].encode())
        hidden = [*command[:place], "--token-file", f"/proc/self/fd/{file}", *command[place + 2 :]]
        return subprocess.Popen(hidden, pass_fds=(file,), **options)
    finally:
        os.close(file)


def hide_tokens() -> None:
    """Have the SuperExec that this process becomes start apps so."""
    from flwr.supercore.superexec.executor import subprocess_executor

    # A stand-in for the module's `subprocess`: the option is a literal in the middle of its function.
    vars(subprocess_executor)["subprocess"] = SimpleNamespace(Popen=start_without_token, DEVNULL=subprocess.DEVNULL)
