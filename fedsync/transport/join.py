"""Join: the Flower message that admits a silo to a run. All other messages pass over the server's hub.

Flower's node authentication ensures who receives the message, so the message's secret identifies the node. The secret
is single-use: the silo chooses the secret of its session and sends its digest in the first request, which the join's
secret authorises. A later reader of the join, for example of the SuperLink's database, is refused.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from fedsync.common.errors import SERVER, ConfigError, ProtocolError

SECRET_BYTES = 32
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_MOST_CHARACTERS, _MOST_ADDRESSES, _MOST_PEM = 65_536, 8, 32_768


def new_secret() -> str:
    return secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> str:
    """Return the form in which the hub stores a secret: SHA-256, hexadecimal."""
    return hashlib.sha256(secret.encode()).hexdigest()


def read_authority(file: Path) -> str:
    """Return the text of a PEM file; characters outside of ASCII, which only its comments can have, are left out."""
    return file.read_text(encoding="ascii", errors="ignore")


@dataclass(frozen=True, slots=True)
class Join:
    """Admission of a silo to a run.

    ``addresses`` are URLs of the hub, the preferred URL first. ``secret`` authorises one first request. ``authority``
    is the PEM of the only authority that the silo trusts for the hub; empty for no TLS. ``run`` names the hub's
    sessions; it changes if all sessions begin anew.
    """

    addresses: tuple[str, ...]
    secret: str
    authority: str
    run: str
    silo: str

    def dump(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the result of `dump`; `ProtocolError` if it is invalid."""
        try:
            found: Any = json.loads(text) if len(text) <= _MOST_CHARACTERS else None
            join = cls(**{**found, "addresses": tuple(found["addresses"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ProtocolError(SERVER, "join", "it is none") from None
        texts = (*join.addresses, join.secret, join.authority, join.run, join.silo)
        if not all(isinstance(each, str) for each in texts) or not 1 <= len(join.addresses) <= _MOST_ADDRESSES:
            raise ProtocolError(SERVER, "join", "it is none")
        if not _SECRET.fullmatch(join.secret) or len(join.authority) > _MOST_PEM:
            raise ProtocolError(SERVER, "join", "its secret or its certificate is invalid")
        for address in join.addresses:
            _check_address(address, tls=bool(join.authority))
        return join

    def trusted(self, hosts: Collection[str], authority: str | None) -> Join:
        """Return the join with only the addresses that the silo's owner allows; `ConfigError` if none is left. So a
        malicious server cannot direct the silo to machines inside its own network. An ``authority`` (PEM) that the
        owner has installed replaces the join's; None keeps the join's.
        """
        authority = self.authority if authority is None else authority
        scheme = "https" if authority else "http"
        parts, hosts = [(each, urlsplit(each)) for each in self.addresses], {host.lower() for host in hosts}
        kept = tuple(each for each, of in parts if of.hostname in hosts and of.scheme == scheme)
        if not kept:
            named = ", ".join(sorted({str(urlsplit(each).hostname) for each in self.addresses}))
            if any(of.hostname in hosts for _, of in parts):
                problem = f"the server's hub at {named:.200} does not speak {scheme.upper()}"
                raise ConfigError("hub_hosts", problem, "Give the server certificates of the silo's authority")
            remedy = "Add the host in silo.yaml, if it is the server's"
            raise ConfigError("hub_hosts", f"the server names {named:.200}, which this silo's owner has not", remedy)
        return type(self)(kept, self.secret, authority, self.run, self.silo)


def _check_address(address: str, *, tls: bool) -> None:
    try:
        parts = urlsplit(address)
        sound = parts.port is not None or parts.hostname is not None
    except ValueError:
        sound = False
    if not sound or not parts.hostname or parts.username or parts.query or parts.fragment or "@" in address:
        raise ProtocolError(SERVER, "join", f"the address {address!r:.100} is invalid")
    if parts.scheme != ("https" if tls else "http"):
        raise ProtocolError(SERVER, "join", f"the address {address!r:.100} does not match its certificate")
