"""The room of a silo's ClientApps: what a run brings along runs there, and reaches neither keys nor data.

Flower starts the ClientApp that the server's bundle names, in a process of the silo's user. It may do one thing: put a
join into the agent's inbox. See `fedsync.common.sandbox.confinement` for what keeps it from all else.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from fedsync.common.sandbox.confinement import Room, confine, emptied, own_sources, settle_in
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.silo.agent.joins import INBOX

_KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONSAFEPATH", "PYTHONUNBUFFERED", "PYTHONPATH", ALLOWED, INBOX)
_KEPT_PREFIXES = ("FLWR_", "RAY_")


def room_of(home: Path, inbox: Path, port: int, secret: Path) -> Room:
    """What is allowed there.

    Args:
        home: its own folder, for what Flower unpacks.
        inbox: of the silo's agent.
        port: of the SuperNode.
        secret: file by which the SuperNode knows who starts ClientApps.
    """
    programs, sources = own_sources()
    return Room((*programs, secret), (home,), inbox, (port,), sources)


def enter(home: Path, inbox: Path, port: int, secret: Path) -> None:
    """Go into the room, for good: this thread, and what it executes or starts. Arguments as of `room_of`.

    What others have left there goes: it may be anything.

    Raises:
        ConfigError: this system cannot confine a process.
    """
    for name in list(os.environ):
        if name not in _KEPT and not name.startswith(_KEPT_PREFIXES):
            del os.environ[name]
    emptied(home)
    for limit, most in ((resource.RLIMIT_FSIZE, 2**30), (resource.RLIMIT_AS, 2**35)):
        resource.setrlimit(limit, (most, most))
    settle_in(home)
    confine(room_of(home, inbox, port, secret))
