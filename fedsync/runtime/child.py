"""Run one of Flower's programs as a child that ends with its parent.

Usage: ``python -m fedsync.runtime.child superlink|supernode|superexec [--poll SECONDS] [--gate] [its options]``

``--poll`` makes a SuperNode look for messages more often than every 3 seconds, by `fedsync.runtime.pauses`. ``--gate``
puts `fedsync.runtime.gate` before a SuperLink. Both reach into internal modules of flwr: give either with the versions
in `fedsync.runtime.executor.TESTED` only.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from fedsync.runtime.answers import OWNER
from fedsync.runtime.gate import put_gate_before_superlink
from fedsync.runtime.pauses import poll_often, pull_soon
from fedsync.runtime.processes import alive


def exit_with_parent(parent: int) -> None:
    """End this process soon after the one that started it is gone, however it went."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def exit_with_owner() -> None:
    """End this process soon after the one that `OWNER` names is gone; where nobody is named, never.

    For processes that Flower started, whose parents may go and leave them behind.
    """
    owner = int(os.environ.get(OWNER, 0))
    if owner == 0:
        return

    def watch() -> None:
        while alive(owner):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(arguments: list[str]) -> None:
    """Become the program that the first argument names."""
    exit_with_parent(os.getppid())
    program, *options = arguments
    if options[:1] == ["--poll"]:
        poll_often(float(options[1]))
        pull_soon()
        options = options[2:]
    if options[:1] == ["--gate"]:
        put_gate_before_superlink()
        options = options[1:]
    sys.argv = [f"flower-{program}", *options]
    if program == "superlink":
        from flwr.superlink.cli.flower_superlink import flower_superlink

        flower_superlink()
    elif program == "superexec":
        from flwr.supercore.cli.flower_superexec import flower_superexec

        flower_superexec()
    else:
        from flwr.supernode.cli.flower_supernode import flower_supernode

        flower_supernode()
    # They serve until they are told to end, and exit then. A SuperNode returns if its connection failed in a way that
    # it takes for final, such as a TLS handshake that was cut; its other threads would keep it, and nobody start it
    # again.
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
