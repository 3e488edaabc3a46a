"""Run one of Flower's programs, as its package names them, as a child that ends with its parent.

Usage: ``python -m fedsync.flower.launch superlink|supernode|superexec [--room HOME INBOX] [options of the program]``

With ``--room`` a SuperExec, and so all ClientApps that it starts, are in the room of `fedsync.silo.agent.client_room`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedsync.common.processes import INTERPRETER, exit_with_owner, exit_with_parent, free_ports
from fedsync.common.proxies import way_to
from fedsync.identity.server_proof import what_is_between
from fedsync.silo.agent.client_room import enter

_CONNECT_S = 10.0


def main(arguments: list[str]) -> None:
    """Become the program that the first argument names."""
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
            # For the processes that it starts. One that is started again must not wait for a port that is taken.
            options += ["--host", "127.0.0.1", "--port", str(free_ports(1)[0])]
    if own.room is not None:
        address = options[options.index("--runtime-api-address") + 1]
        secret = Path(options[options.index("--superexec-auth-secret-file") + 1])
        enter(own.room[0], own.room[1], int(address.rpartition(":")[2]), secret)
        # Threads that are there already are in no room; they end here.
        os.execv(sys.executable, [*INTERPRETER, "fedsync.flower.launch", own.program, *options])
    sys.argv = [f"flower-{own.program}", *options]
    _program(own.program)()
    # They serve until they are told to end, and exit then. A SuperNode returns if its connection failed in a way that
    # it takes for final, such as a TLS handshake that was cut; its other threads would keep it, and nobody start it
    # again.
    os._exit(1)


def _program(name: str) -> Any:
    """What Flower's command of this name calls."""
    (found,) = entry_points(group="console_scripts", name=f"flower-{name}")
    return found.load()


def _stop_before_a_proxy(options: list[str]) -> None:
    """End with one sentence where a proxy keeps this SuperNode from its server; Flower says a class's name of it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--superlink")
    parser.add_argument("--root-certificates", type=Path)
    told, _ = parser.parse_known_args(options)
    if told.root_certificates is not None:
        problem = what_is_between(way_to(told.superlink, os.environ), told.root_certificates, _CONNECT_S)
        if problem is not None:
            sys.exit(problem)


def prepare() -> Callable[[], bool]:
    """Import what SuperNodes need, before they are forked; see `fedsync.common.nursery`."""
    _program("supernode")
    return lambda: True


def forked(arguments: list[str]) -> None:
    """As `main`, in a process that a nursery has forked, which may go before it."""
    exit_with_owner()
    main(arguments)


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    main(sys.argv[1:])
