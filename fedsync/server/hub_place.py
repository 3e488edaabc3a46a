"""Address of the hubs of a server's runs: the server writes it to a file, and its ServerApps read the file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FILE, write_atomically

HUB = "FEDSYNC_HUB"
"""Environment variable of a ServerApp: path of its `HubPlace`; without it, the ServerApp uses Flower's messages."""


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Address of the hub of a run.

    Args:
        host: address to listen on.
        ports: candidate ports, of which the first free port is taken; 0 for any port.
        name: host name for silos.
        certificate: PEM file of the server's certificate; empty for no TLS.
        key: PEM file of the certificate's key.
        authority: PEM file of the CA certificate.
        struck: JSON file with the names of refused silos; empty for none.
        proxy: ``host:port`` of a proxy that forwards ``/v1/fedsync/RUN/``; empty for none.
        sockets: folder of the sockets ``RUN.sock`` to which the proxy forwards.
    """

    host: str = "127.0.0.1"
    ports: tuple[int, ...] = (0,)
    name: str = "127.0.0.1"
    certificate: str = ""
    key: str = ""
    authority: str = ""
    struck: str = ""
    proxy: str = ""
    sockets: str = ""

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)).encode(), OWNER_FILE)

    @classmethod
    def load(cls, path: Path) -> HubPlace:
        """Read the file of `save`.

        Raises:
            ConfigError: the file is missing or invalid.
        """
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**found, "ports": tuple(found["ports"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(HUB, f"{path} cannot be read: {error}", "Let `fedsync server start` write it") from None
