"""Run one of Flower's programs as a child that ends with its parent.

Usage: ``python -m fedsync.flower.internals.launch superlink|supernode|superexec [--poll SECONDS] [--answer]
[--gate LIMITS STATE] [--hide-tokens] [options]``

- ``--poll`` makes a SuperNode look for messages more often than every 3 seconds, by `fedsync.flower.internals.polling`.
- ``--answer`` has it answer them itself, by `fedsync.flower.internals.answering`.
- ``--gate`` puts `fedsync.flower.internals.access_middleware` before a SuperLink: its limits, as JSON, and the server's
  state folder.
- ``--hide-tokens`` has a SuperExec start apps by `fedsync.flower.internals.tokens`.

All reach into internal modules of flwr: give them with the versions in `fedsync.flower.internals.versions.TESTED` only.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from fedsync.common.processes import exit_with_owner, exit_with_parent, free_ports
from fedsync.common.proxies import way_to
from fedsync.config.gate import GateConfig
from fedsync.flower.internals.access_middleware import put_gate_before_superlink
from fedsync.flower.internals.answering import answer_here
from fedsync.flower.internals.polling import poll_often, pull_soon
from fedsync.flower.internals.tokens import hide_tokens
from fedsync.identity.server_proof import what_is_between

_CONNECT_S = 10.0


def main(arguments: list[str]) -> None:
    """Become the program that the first argument names."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("program")
    parser.add_argument("--poll", type=float)
    parser.add_argument("--answer", action="store_true")
    parser.add_argument("--gate", nargs=2, metavar=("LIMITS", "STATE"))
    parser.add_argument("--hide-tokens", action="store_true")
    own, options = parser.parse_known_args(arguments)
    log = logging.getLogger("fedsync")
    log.addHandler(logging.StreamHandler())
    log.setLevel(logging.INFO)
    if own.program == "supernode":
        _stop_before_a_proxy(options)
    if own.poll is not None:
        poll_often(own.poll)
        pull_soon()
    if own.answer:
        answer_here()
        options += ["--isolation", "process"]
    elif own.program == "supernode":
        # For the processes that it starts. One that is started again must not wait for a port that is taken meanwhile.
        options += ["--host", "127.0.0.1", "--port", str(free_ports(1)[0])]
    if own.gate:
        put_gate_before_superlink(GateConfig.model_validate_json(own.gate[0]), Path(own.gate[1]))
    if own.hide_tokens:
        hide_tokens()
    sys.argv = [f"flower-{own.program}", *options]
    _run(own.program)
    # They serve until they are told to end, and exit then. A SuperNode returns if its connection failed in a way that
    # it takes for final, such as a TLS handshake that was cut; its other threads would keep it, and nobody start it
    # again.
    os._exit(1)


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


def _run(program: str) -> None:
    if program == "superlink":
        from flwr.superlink.cli.flower_superlink import flower_superlink

        flower_superlink()
    elif program == "superexec":
        from flwr.supercore.cli.flower_superexec import flower_superexec

        flower_superexec()
    else:
        from flwr.supernode.cli.flower_supernode import flower_supernode

        flower_supernode()


def prepare() -> Callable[[], bool]:
    """Import what SuperNodes need, before they are forked; see `fedsync.common.nursery`."""
    for module in ("flwr.supernode.cli.flower_supernode", "fedsync.flower.client_app"):
        import_module(module)
    return lambda: True


def forked(arguments: list[str]) -> None:
    """As `main`, in a process that a nursery has forked, which may go before it."""
    exit_with_owner()
    main(arguments)


if __name__ == "__main__":
    exit_with_parent(os.getppid())
    main(sys.argv[1:])
