"""The join: the one Flower message that lets a silo into a run's sessions at the hub.

Flower's node authentication says who gets it, so the secret in it stands for the node. It is single-use: the silo
chooses the secret of its session, and says its digest in the first request, which the join's secret admits. Whoever
reads the join later, for example in the SuperLink's database, is turned away.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from fedsync.common.errors import SERVER, ConfigError, ProtocolError

SECRET_BYTES = 32
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_MOST_CHARACTERS, _MOST_ADDRESSES, _MOST_PEM = 65_536, 8, 32_768


def new_secret() -> str:
    """A fresh secret of 32 bytes, as a bearer token."""
    return secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> str:
    """What the hub keeps of a secret: SHA-256, hexadecimal."""
    return hashlib.sha256(secret.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Join:
    """A silo's way into one run.

    Args:
        addresses: URLs of the hub, the preferred one first.
        secret: admits one first request.
        authority: PEM of the only authority whose certificate is accepted there; empty for none, without TLS.
        run: name of the hub's sessions; another one where they begin anew.
        silo: name under which the server knows the silo.
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
        """The inverse of `dump`.

        Raises:
            ProtocolError: the server sent something else.
        """
        try:
            found: Any = json.loads(text) if len(text) <= _MOST_CHARACTERS else None
            join = cls(**{**found, "addresses": tuple(found["addresses"])})
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ProtocolError(SERVER, "join", "it is none") from None
        texts = (*join.addresses, join.secret, join.authority, join.run, join.silo)
        if not all(isinstance(each, str) for each in texts) or not 1 <= len(join.addresses) <= _MOST_ADDRESSES:
            raise ProtocolError(SERVER, "join", "it is none")
        if not _SECRET.fullmatch(join.secret) or len(join.authority) > _MOST_PEM:
            raise ProtocolError(SERVER, "join", "its secret or its certificate is none")
        for address in join.addresses:
            _check_address(address, tls=bool(join.authority))
        return join

    def trusted(self, hosts: Collection[str], authority: str | None) -> Join:
        """The join as the silo's owner admits it: a lying server is not to steer the silo to machines inside its house.

        Args:
            hosts: names and addresses of machines at which the hub may be.
            authority: PEM that the owner has installed, which replaces the join's; None takes the join's.

        Raises:
            ConfigError: no address is on one of the hosts, with TLS where there is an authority.
        """
        authority = self.authority if authority is None else authority
        scheme = "https" if authority else "http"
        parts = [(each, urlsplit(each)) for each in self.addresses]
        kept = tuple(each for each, of in parts if of.hostname in hosts and of.scheme == scheme)
        if not kept:
            named = ", ".join(sorted({str(urlsplit(each).hostname) for each in self.addresses}))
            remedy = "Add the host in silo.yaml, if it is the server's"
            raise ConfigError("hub_hosts", f"the server names {named:.200}, which this silo's owner has not", remedy)
        return type(self)(kept, self.secret, authority, self.run, self.silo)


def _check_address(address: str, *, tls: bool) -> None:
    """See that an address is a plain URL, and of the scheme that goes with the certificate.

    Raises:
        ProtocolError: it is not.
    """
    try:
        parts = urlsplit(address)
        sound = parts.port is not None or parts.hostname is not None
    except ValueError:
        sound = False
    if not sound or not parts.hostname or parts.username or parts.query or parts.fragment or "@" in address:
        raise ProtocolError(SERVER, "join", f"the address {address!r:.100} is none")
    if parts.scheme != ("https" if tls else "http"):
        raise ProtocolError(SERVER, "join", f"the address {address!r:.100} does not go with its certificate")
