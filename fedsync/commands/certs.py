"""Command ``fedsync certs``: the server's TLS certificate, and the node keys of silos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.observe.terminal import say

app = typer.Typer(help="Certificates and node keys, which identify server and silos.", no_args_is_help=True)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder for authority and server certificate.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME|IP", help="Name or address by which silos reach the server; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option("--days", help="Days for which the server's certificate is valid.")] = 365,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew", help="Make a new server certificate with the same authority, and the same hosts unless given."
        ),
    ] = False,
) -> None:
    """Make an authority and the server's certificate. localhost and 127.0.0.1 are always covered."""
    from datetime import UTC, datetime

    from fedsync.identity import certificates
    from fedsync.identity.certificates import Authority, ServerCertificate, make_authority, make_server_certificate

    if not hosts and renew:
        hosts = list(certificates.read_certificate(ServerCertificate.at(folder).certificate).hosts)
    elif not hosts:
        remedy = "Give the name or address under which silos reach the server, for example --host fl.example.org"
        raise ConfigError("--host", "missing", remedy)
    # Check before the authority is made: an existing authority would make the corrected command fail.
    certificates.check_hosts(hosts)
    certificates.check_days(days, certificates.MAX_DAYS if renew else certificates.AUTHORITY_DAYS)
    # Certificates have no fractions of a second, and none may outlive the authority by such a fraction.
    now = datetime.now(UTC).replace(microsecond=0)
    authority = Authority.at(folder) if renew else make_authority(folder, now=now)
    server = make_server_certificate(authority, hosts, folder, days, now)
    say(f"{authority.certificate}: to the server and to every silo")
    say(f"{server.certificate}, {server.key}: to the server")
    if renew:
        say("A server that runs shows the old certificate until `fedsync server start` is restarted; runs go on")
    say(f"{authority.key}: secret; keep it offline, it signs renewals")


@app.command()
def silo(
    name: Annotated[str, typer.Argument(help="Name of the silo.")],
    folder: Annotated[Path, typer.Option("--dir", help="The silo's folder for its node key.")],
) -> None:
    """Make a silo's node key, at the silo, or print the paths of an existing key again."""
    from fedsync.identity.node_keys import make_node_key

    key = make_node_key(name, folder)
    say(f"{name} {key.fingerprint}")
    say(f"{key.private}: secret; it stays here, as node_key in silo.yaml")
    say(f"{key.public}: to the server's operator, who names it in server.yaml:")
    say(f"  silos: {{{name}: nodes/{key.public.name}}}")
