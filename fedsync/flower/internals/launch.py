"""Run one of Flower's programs as a child that ends with its parent.

Usage: ``python -m fedsync.flower.internals.launch superlink|supernode|superexec [--poll SECONDS] [--gate] [options]``

``--poll`` makes a SuperNode look for messages more often than every 3 seconds, by `fedsync.flower.internals.polling`.
``--gate`` puts `fedsync.flower.internals.access_middleware` before a SuperLink. Both reach into internal modules of
flwr: give either with the versions in `fedsync.flower.internals.executor.TESTED` only.
"""

from __future__ import annotations

import os
import sys

from fedsync.common.processes import exit_with_parent
from fedsync.flower.internals.access_middleware import put_gate_before_superlink
from fedsync.flower.internals.polling import poll_often, pull_soon


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
