"""Launcher of Flower's programs, by their entry points, as processes that end with their owner.

Usage: ``python -m fedsync.flower.launch superlink|supernode|superexec [--room HOME INBOX] [options of the program]``

With ``--room``, a SuperExec and all ClientApps that it starts are confined as in `fedsync.silo.agent.joins`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from fedsync.common.processes import INTERPRETER, exit_with_owner, free_ports
from fedsync.common.proxies import way_to
from fedsync.identity.certificates import what_is_between
from fedsync.silo.agent.joins import enter

_CONNECT_S = 10.0


def main(arguments: list[str]) -> None:
    log = logging.getLogger("fedsync")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("program")
    parser.add_argument("--room", nargs=2, type=Path, metavar=("HOME", "INBOX"))
    own, options = parser.parse_known_args(arguments)
    if own.program == "supernode":
        _stop_before_a_proxy(options)
        if "--port" not in options:
            # Port for the SuperNode's child processes. A restarted SuperNode must not wait for a port in use.
            options += ["--host", "127.0.0.1", "--port", str(free_ports(1)[0])]
    if own.room is not None:
        address = options[options.index("--runtime-api-address") + 1]
        secret = Path(options[options.index("--superexec-auth-secret-file") + 1])
        enter(own.room[0], own.room[1], int(address.rpartition(":")[2]), secret)
        # Existing threads are outside the room; executing the program anew ends them.
        os.execv(sys.executable, [*INTERPRETER, "fedsync.flower.launch", own.program, *options])
    sys.argv = [f"flower-{own.program}", *options]
    # The programs serve until they are stopped, and exit themselves. A SuperNode returns after a connection error that
    # it takes for permanent, such as an interrupted TLS handshake, or raises another error. Its other threads would
    # keep the process alive, and nothing would restart it.
    try:
        entry_point(own.program).load()()
    except Exception:
        log.exception("%s failed", own.program)
    os._exit(1)


def entry_point(name: str) -> EntryPoint:
    (found,) = entry_points(group="console_scripts", name=f"flower-{name}")
    return found


def _stop_before_a_proxy(options: list[str]) -> None:
    """Exit with a clear message if a proxy blocks this SuperNode; Flower reports only the name of an exception."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--superlink")
    parser.add_argument("--root-certificates", type=Path)
    told, _ = parser.parse_known_args(options)
    if told.root_certificates is not None:
        problem = what_is_between(way_to(told.superlink, os.environ), told.root_certificates, _CONNECT_S)
        if problem is not None:
            sys.exit(problem)


if __name__ == "__main__":
    exit_with_owner()
    main(sys.argv[1:])
