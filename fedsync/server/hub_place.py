"""Where the hubs of a server's runs are: the server writes it down, and its ServerApps read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FILE, write_atomically

HUB = "FEDSYNC_HUB"
"""Environment variable of a ServerApp: a file with its `HubPlace`; without it silos are asked by Flower's messages."""


@dataclass(frozen=True, slots=True)
class HubPlace:
    """Where the hub of a run is.

    Args:
        host: to listen at.
        ports: of which the first free one is taken; 0 for any.
        name: host name for silos.
        certificate: PEM file of the server's certificate; empty for no TLS.
        key: PEM file of its key.
        authority: PEM file of who signed it.
        struck: JSON file with the names of silos that are let in no more; empty for none.
        proxy: ``host:port`` of a proxy that passes on ``/v1/fedsync/RUN/``; empty for none.
        sockets: folder of the sockets ``RUN.sock`` that it passes to.
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
        """The inverse of `save`.

        Raises:
            ConfigError: there is none.
        """
        try:
            found: Any = json.loads(path.read_text(encoding="utf-8"))
            return cls(**{**found, "ports": tuple(found["ports"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(HUB, f"{path} cannot be read: {error}", "Let `fedsync server start` write it") from None
