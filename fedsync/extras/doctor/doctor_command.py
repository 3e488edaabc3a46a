"""Command ``fedsync doctor``: checks of the setup before a silo or a server is started."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.observe.terminal import say

if TYPE_CHECKING:
    from fedsync.extras.doctor.machine_checks import Check

_WIDTH = 14


def doctor(
    silo: Annotated[Path | None, typer.Option("--silo", metavar="FILE", help="Check this silo.")] = None,
    server: Annotated[Path | None, typer.Option("--server", metavar="FILE", help="Check this server.")] = None,
) -> None:
    """Check versions, certificates, keys, clock, disk, memory, device and the connection to the server."""
    at_silo = None if silo is None else SiloStartConfig.load(silo)
    at_server = None if server is None else ServerStartConfig.load(server)
    from fedsync.extras.doctor import preflight as checks

    if at_silo is not None:
        from fedsync.cipher.keys.passphrase import NAMED_BY

        os.environ[NAMED_BY] = at_silo.passphrase_env

    def all_checks() -> Iterator[Check]:
        now = datetime.now(UTC)
        if at_silo is not None:
            yield from checks.check_silo(at_silo, now)
        if at_server is not None:
            yield from checks.check_server(at_server, now)
        if at_silo is None and at_server is None:
            yield from checks.check_machine()

    if not report(all_checks()):
        raise typer.Exit(1)


def report(found: Iterable[Check]) -> bool:
    """Print a line for each check as it ends; return whether all passed."""
    good = True
    for check in found:
        good &= check.ok
        remedy = f". {check.remedy}" if check.remedy else ""
        say(f"{'ok' if check.ok else 'FAIL':<5} {check.name:<{_WIDTH}} {check.detail}{remedy}")
    return good
