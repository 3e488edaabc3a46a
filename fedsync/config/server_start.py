"""Configuration file of the server: addresses, certificates, and registered silos."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from fedsync.common.names import SILO_NAME
from fedsync.config.sections.section import Section
from fedsync.config.silo_start import ADDRESS, LogsConfig, absolute, existing, must_exist
from fedsync.config.yaml_file import YamlFile


class RelayedRegion(Section):
    """Relay, and the silos of its region."""

    key: str
    """Public node key of the relay, ``NAME.node.pub``."""

    silos: list[Annotated[str, Field(pattern=SILO_NAME)]]
    """Silos that connect to the relay instead of this server. The relay may act for no other silos."""


class UpstreamConfig(Section):
    """Upstream server of this relay."""

    name: Annotated[str, Field(pattern=SILO_NAME)]
    """Name of this relay; the upstream server's file lists the relay's node key under this name."""

    server: str
    """Address of the upstream server, ``host:port``."""

    authority: str
    """Certificate ``ca.crt`` of the upstream server."""

    node_key: str
    """Private node key of this relay, as `fedsync certs silo` writes it."""


class HubConfig(Section):
    """Addresses that silos connect to during runs. Each run has its own port."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """First port; left out, the port after the server's port. 0 takes any free port."""

    runs: Annotated[int, Field(ge=1, le=1000)] = 16
    """Number of ports, counted from the first, and so the number of simultaneous runs."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]+$")] | None = None
    """Host name or address at which silos reach the hub; left out, the first name in the server's certificate."""

    proxy: Annotated[str, Field(pattern=ADDRESS)] | None = None
    """``host:port`` of an nginx reverse proxy, as in ``deploy/nginx.conf``. Hubs then listen on Unix sockets instead of
    ports; let the server itself listen on loopback."""

    sockets: str | None = None
    """Folder of these sockets, which the user of nginx must be able to enter. Left out: ``hubs`` in the state folder,
    for an nginx that runs as the server's user."""

    def listening(self, server: int) -> tuple[int, ...]:
        first = server + 1 if self.port is None else self.port
        return (0,) if first == 0 else tuple(range(first, first + self.runs))


class ServerStartConfig(Section):
    """Options of ``fedsync server start``. Paths are relative to the file."""

    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]+$")] = "0.0.0.0"
    """Address to listen on; 0.0.0.0 for all addresses of the machine."""

    port: Annotated[int, Field(ge=1, le=65535)] = 9092
    """Port to listen on."""

    certificates: str | None = None
    """Folder of `fedsync certs init` with ``ca.crt``, ``server.pem`` and ``server.key``. Keep ``ca.key`` elsewhere."""

    insecure: bool = False
    """Whether to run without TLS and without authentication of silos, for a trial on one machine."""

    state: str
    """State folder of the server: database, runs, logs, health."""

    silos: dict[Annotated[str, Field(pattern=SILO_NAME)], str] = Field(default_factory=dict)
    """Files of public node keys, ``NAME.node.pub``, by silo name."""

    relays: dict[Annotated[str, Field(pattern=SILO_NAME)], RelayedRegion] = Field(default_factory=dict)
    """Relays by name, each with the silos of its region."""

    upstream: UpstreamConfig | None = None
    """Upstream server. With this section, this server is a relay: its silos work for the upstream server, where runs
    are started."""

    keys: str | None = None
    """File of the server for encrypted runs, as `fedsync keys issue` writes it."""

    logs: LogsConfig = Field(default_factory=LogsConfig)
    """Limits on the size of the logs."""

    hub: HubConfig = Field(default_factory=HubConfig)
    """Addresses that silos connect to during runs."""

    @model_validator(mode="after")
    def _secure(self) -> Self:
        if not self.insecure and self.certificates is None:
            raise ValueError(
                "certificates is missing; name the folder of `fedsync certs init`, or write insecure: true for a trial "
                "on one machine"
            )
        if twice := self.silos.keys() & self.relays.keys():
            raise ValueError(f"{', '.join(sorted(twice))}: a relay needs a name that no silo has")
        if self.upstream is not None and (self.insecure or self.relays):
            raise ValueError("upstream makes this server a relay: it needs certificates, and has no relays of its own")
        if self.insecure and (self.certificates or self.silos or self.relays):
            told = "insecure: true leaves out TLS and all node keys; remove it, or certificates, silos and relays"
            raise ValueError(told)
        ports = self.hub.listening(self.port)
        if self.hub.proxy is None and (ports[-1] > 65535 or self.port in ports):
            told = f"hub.port and hub.runs give the ports from {ports[0]} to {ports[-1]}, above 65535 or with port "
            raise ValueError(f"{told}{self.port} of the server; choose another port, or fewer runs")
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a server's file with absolute paths; raises `ConfigError` for errors and for files that do not exist."""
        file = YamlFile.read(path)
        config = absolute(file.validate(cls), path, ("certificates", "state", "keys"))
        keys = "The administrator makes it with `fedsync keys issue`"
        must_exist(file, config, {"certificates": "Make it with `fedsync certs init`", "keys": keys})
        silos, relays, upstream = {}, {}, config.upstream
        for name, key in config.silos.items():
            made = f"The silo makes it: `fedsync certs silo {name} --dir FOLDER`"
            silos[name] = existing(file, path, ("silos", name), key, made)
        for name, relay in config.relays.items():
            made = f"The relay's operator makes it: `fedsync certs silo {name} --dir FOLDER`"
            key = existing(file, path, ("relays", name, "key"), relay.key, made)
            relays[name] = relay.model_copy(update={"key": key})
        if upstream is not None:
            got, made = "Get it from that server's operator", "Make it: `fedsync certs silo`"
            authority = existing(file, path, ("upstream", "authority"), upstream.authority, got)
            node_key = existing(file, path, ("upstream", "node_key"), upstream.node_key, made)
            upstream = upstream.model_copy(update={"authority": authority, "node_key": node_key})
        hub = absolute(config.hub, path, ("sockets",))
        return config.model_copy(update={"silos": silos, "relays": relays, "upstream": upstream, "hub": hub})

    @property
    def node_keys(self) -> dict[str, str]:
        return {**self.silos, **{name: relay.key for name, relay in self.relays.items()}}

    @property
    def regions(self) -> dict[str, list[str]]:
        return {name: relay.silos for name, relay in self.relays.items()}

    @property
    def loopback(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
            self.host, f"[{self.host}]" if ":" in self.host else self.host
        )
        return f"{host}:{self.port}"
