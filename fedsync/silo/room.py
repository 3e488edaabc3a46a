"""The room of a silo's ClientApps: what a run brings along runs there, and reaches neither keys nor data.

Flower starts the ClientApp that the server's bundle names, in a process of the silo's user. It may do one thing: put a
join into the agent's inbox. See `fedsync.common.confinement` for what keeps it from all else.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import fedsync
from fedsync.common.confinement import Room, confine, emptied, program_folders
from fedsync.common.fence import ALLOWED
from fedsync.silo.joins import INBOX

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
    package = Path(fedsync.__file__).resolve().parent
    # Where a package is imported from its sources, their folder is looked through, too.
    sources = tuple(Path(each) for each in sys.path if each and package.parent == Path(each).resolve())
    return Room((*program_folders([package]), secret), (home,), inbox, (port,), sources)


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
    for limit, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 2**30), (resource.RLIMIT_AS, 2**35)):
        resource.setrlimit(limit, (most, most))
    os.environ.update({"HOME": str(home), "FLWR_HOME": str(home), "TMPDIR": str(home / "tmp")})
    os.chdir(home)
    confine(room_of(home, inbox, port, secret))
