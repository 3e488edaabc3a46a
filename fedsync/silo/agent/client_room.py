"""Room of a silo's ClientApps: code of a run's bundle runs there, without access to keys or data.

Flower starts the ClientApp that the server's bundle names, in a process of the silo's user. This process may do one
thing: put a join into the agent's inbox. `fedsync.common.sandbox.confinement` prevents all else.
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
    """Return the room: private folder ``home``, the SuperNode's ``port``, and the ``secret`` by which it knows us."""
    programs, sources = own_sources()
    return Room((*programs, secret), (home,), inbox, (port,), sources)


def enter(home: Path, inbox: Path, port: int, secret: Path) -> None:
    """Enter the room irreversibly; ``home`` is emptied first. Raises `ConfigError` if this system cannot confine."""
    for name in list(os.environ):
        if name not in _KEPT and not name.startswith(_KEPT_PREFIXES):
            del os.environ[name]
    emptied(home)
    for limit, most in ((resource.RLIMIT_FSIZE, 2**30), (resource.RLIMIT_AS, 2**35)):
        resource.setrlimit(limit, (most, most))
    settle_in(home)
    confine(room_of(home, inbox, port, secret))
