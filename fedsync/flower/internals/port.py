"""Become another of FedSync's programs, with a port on loopback that is free at the moment.

A SuperNode that is started again must not wait for a port that somebody else has taken meanwhile. Its executor finds
the port in a file.

Usage: ``python -m fedsync.flower.internals.port FILE MODULE [its options]``; the module is given ``--port N`` besides.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedsync.common.files import write_private
from fedsync.common.processes import free_ports


def main(arguments: list[str]) -> None:
    """Choose a port, leave it in the file, and become the program."""
    file, *command = arguments
    (port,) = free_ports(1)
    write_private(Path(file), str(port).encode())
    os.execv(sys.executable, [sys.executable, "-m", *command, "--port", str(port)])


if __name__ == "__main__":
    main(sys.argv[1:])
