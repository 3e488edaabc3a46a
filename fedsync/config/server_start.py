"""The server's own file: where it listens, what proves who it is, and which silos it knows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from fedsync.common.errors import ConfigError
from fedsync.common.names import SILO_NAME
from fedsync.config.locate import beside
from fedsync.config.sections.section import Section
from fedsync.config.silo_start import ADDRESS, LogsConfig, absolute, must_exist
from fedsync.config.yaml_file import YamlFile


class RelayedRegion(Section):
    """A relay, and whom it speaks for."""

    key: str
    """The relay's public node key, ``NAME.node.pub``."""

    silos: list[Annotated[str, Field(pattern=SILO_NAME)]]
    """Silos that come to the relay instead of to this server. A relay speaks for no others."""


class UpstreamConfig(Section):
    """The server that this one is a relay of."""

    name: Annotated[str, Field(pattern=SILO_NAME)]
    """Name of this relay; the server's file has its node key under it."""

    server: str
    """Address of that server, ``host:port``."""

    authority: str
    """That server's ``ca.crt``."""

    node_key: str
    """This relay's node key, as `fedsync certs silo` writes it."""


class HubConfig(Section):
    """Where silos come to in a run. Each run has a port of its own."""

    port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """The first port; left out, the one above the server's. 0 for any that is free."""

    runs: Annotated[int, Field(ge=1, le=1000)] = 16
    """Ports from there on, and so runs at a time."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]+$")] | None = None
    """Host name or address at which silos reach it; left out, the first one that the server's certificate is for."""

    proxy: Annotated[str, Field(pattern=ADDRESS)] | None = None
    """``host:port`` of an nginx in front, as ``deploy/nginx.conf`` has it. Hubs then listen on sockets and on no port;
    let the server itself listen on loopback."""

    sockets: str | None = None
    """Folder of these sockets, which nginx's user has to enter; left out, ``hubs`` in the state folder, for an nginx of
    the server's own user."""

    def listening(self, server: int) -> tuple[int, ...]:
        """Ports that may be listened on, beside the server's port."""
        first = server + 1 if self.port is None else self.port
        return (0,) if first == 0 else tuple(range(first, min(first + self.runs, 65536)))


class ServerStartConfig(Section):
    """What ``fedsync server start`` is told. Paths are relative to the file."""

    host: Annotated[str, Field(pattern=r"^[A-Za-z0-9.:-]+$")] = "0.0.0.0"
    """Address to listen on; 0.0.0.0 for all of the machine."""

    port: Annotated[int, Field(ge=1, le=65535)] = 9092
    """Port to listen on."""

    certificates: str | None = None
    """Folder with ``ca.crt``, ``server.pem`` and ``server.key``, as `fedsync certs init` writes them; ``ca.key`` does
    not belong there."""

    insecure: bool = False
    """No TLS and no authentication of silos, for a trial on one machine."""

    state: str
    """Folder of the server: database, runs, logs, health."""

    silos: dict[Annotated[str, Field(pattern=SILO_NAME)], str] = Field(default_factory=dict)
    """Public node keys, ``NAME.node.pub``, by the name of the silo."""

    relays: dict[Annotated[str, Field(pattern=SILO_NAME)], RelayedRegion] = Field(default_factory=dict)
    """Relays by name, each with its region."""

    upstream: UpstreamConfig | None = None
    """With it this server is a relay: its silos work for the server that is named, and runs are started there."""

    keys: str | None = None
    """The server's file for encrypted runs, as `fedsync keys issue` writes it."""

    logs: LogsConfig = Field(default_factory=LogsConfig)
    """How much of the logs is kept."""

    hub: HubConfig = Field(default_factory=HubConfig)
    """Where silos come to in a run."""

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
        if self.insecure and (self.certificates or self.silos):
            raise ValueError("insecure: true leaves out TLS and the silos' keys; remove it, or certificates and silos")
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a server's file, make its paths absolute, and see that what it names is there.

        Raises:
            ConfigError: anything is wrong; names the place and the remedy.
        """
        file = YamlFile.read(path)
        config = absolute(file.validate(cls), path, ("certificates", "state", "keys"))
        must_exist(file, config, {"certificates": "Make it with `fedsync certs init`"})
        must_exist(file, config, {"keys": "The administrator makes it with `fedsync keys issue`"})
        silos = {name: str(beside(path, key, file.place(("silos", name)))) for name, key in config.silos.items()}
        for name, key in silos.items():
            if not Path(key).is_file():
                remedy = f"The silo makes it: `fedsync certs silo {name} --dir FOLDER`"
                raise ConfigError(file.place(("silos", name)), f"{key} does not exist", remedy)
        relays = {}
        for name, relay in config.relays.items():
            key = str(beside(path, relay.key, file.place(("relays", name, "key"))))
            if not Path(key).is_file():
                remedy = f"The relay's operator makes it: `fedsync certs silo {name} --dir FOLDER`"
                raise ConfigError(file.place(("relays", name, "key")), f"{key} does not exist", remedy)
            relays[name] = relay.model_copy(update={"key": key})
        upstream = None if config.upstream is None else _there(config.upstream, file, path)
        hub = absolute(config.hub, path, ("sockets",))
        return config.model_copy(update={"silos": silos, "relays": relays, "upstream": upstream, "hub": hub})

    @property
    def node_keys(self) -> dict[str, str]:
        """Files of public node keys by the names that they are registered under: silos' and relays'."""
        return {**self.silos, **{name: relay.key for name, relay in self.relays.items()}}

    @property
    def regions(self) -> dict[str, list[str]]:
        """Silos of each relay, by its name."""
        return {name: relay.silos for name, relay in self.relays.items()}

    @property
    def loopback(self) -> str:
        """Address at which the server's own machine reaches it, ``host:port``."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
            self.host, f"[{self.host}]" if ":" in self.host else self.host
        )
        return f"{host}:{self.port}"


def _there(upstream: UpstreamConfig, file: YamlFile, path: Path) -> UpstreamConfig:
    """The section with paths that are absolute; raises `ConfigError` where one is not there."""
    found = {}
    for field, remedy in (
        ("authority", "Get it from that server's operator"),
        ("node_key", "Make it: `fedsync certs silo`"),
    ):
        place = file.place(("upstream", field))
        found[field] = str(beside(path, getattr(upstream, field), place))
        if not Path(found[field]).is_file():
            raise ConfigError(place, f"{found[field]} does not exist", remedy)
    return upstream.model_copy(update=found)
