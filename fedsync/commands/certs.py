"""Command ``fedsync certs``: the server's TLS certificate, and the node keys of silos."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.observe.terminal import say

if TYPE_CHECKING:
    from datetime import datetime

    from fedsync.identity.certificates import CertificateFacts

app = typer.Typer(help="Certificates and node keys, which identify server and silos.", no_args_is_help=True)

WARN_DAYS = 30


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="Folder for authority and server certificate.")],
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME|IP", help="Name or address by which silos reach the server; repeatable."),
    ] = None,
    days: Annotated[int, typer.Option("--days", help="Validity of the server's certificate [days].")] = 365,
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


@app.command()
def show(folder: Annotated[Path, typer.Argument(help="Folder with certificates or node keys.")]) -> None:
    """Describe the certificates and node keys in a folder, and check that they match and are valid."""
    from datetime import UTC, datetime

    from fedsync.identity.certificates import Authority, ServerCertificate, check_server_certificate, read_certificate
    from fedsync.identity.node_keys import read_node_keys

    authority, server = Authority.at(folder), ServerCertificate.at(folder)
    paths = [path for path in (authority.certificate, server.certificate) if path.exists()]
    nodes = read_node_keys(folder)
    if not paths and not nodes:
        remedy = "Make some with `fedsync certs init` or `fedsync certs silo`"
        raise ConfigError(str(folder), "there are no certificates and no node keys here", remedy)
    for path in paths:
        for line in describe(path, read_certificate(path), datetime.now(UTC)):
            say(line)
    if len(paths) == 2:
        check_server_certificate(authority.certificate, server)
    for key in nodes:
        kind, path = ("node key", key.private) if key.private.exists() else ("public node key", key.public)
        say(f"{path}: {kind} of {key.name}, {key.fingerprint}")


def describe(path: Path, facts: CertificateFacts, now: datetime) -> list[str]:
    """Describe a certificate in lines; the last line is a warning if it expires within `WARN_DAYS`."""
    hosts = f", for {', '.join(facts.hosts)}" if facts.hosts else ""
    lines = [f"{path}: {facts.subject}{hosts}, until {facts.expires:%Y-%m-%d %H:%M} UTC"]
    left = facts.days_left(now)
    if left < WARN_DAYS:
        when = f"expired {-left:.0f} days ago" if left < 0 else f"expires in {left:.0f} days"
        remedy = (
            "make another authority, for all silos"
            if facts.authority
            else f"run `fedsync certs init {path.parent} --renew`"
        )
        lines.append(f"warning: {path} {when}; {remedy}")
    return lines
