"""Which processes a real silo and a real server consist of, and how they are told what their files say."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from fedsync.common.files import write_private
from fedsync.common.processes import INTERPRETER
from fedsync.common.proxies import DIRECT, Way, proxied, way_to
from fedsync.config.server_start import ServerStartConfig, UpstreamConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.core.errors import ConfigError
from fedsync.flower.internals import versions
from fedsync.flower.internals.operator import make_secret
from fedsync.flower.parcels import FOLDER, PARCELS
from fedsync.identity.certificates import Authority, ServerCertificate
from fedsync.ops.supervisor import Program
from fedsync.trainer.owner_policy import owner_environment

CONNECTION = "fedsync"
"""How Flower's command line calls the connection to the server, with the server's state folder as its home."""

DATABASE, SECRET_FILE = "superlink.db", "superexec.secret"

RELAY_SOCKET = "relay.sock"
"""Socket of a relay's app, in its state folder."""

_POLL_S = 0.1
_CHILD = (*INTERPRETER, "fedsync.flower.internals.launch")


def way(code: str = "installed") -> str:
    """How this version of Flower is used: ``fast`` where it was tested, else ``stock``, as for ``shipped`` code."""
    return "fast" if versions.supported() and code != "shipped" else "stock"


def shipped_remedy() -> str:
    """What helps where this version of Flower cannot be kept from running the server's code."""
    return f"Install flwr {' or '.join(sorted(versions.TESTED))}, or write code: shipped if the server may"


def node_config(config: SiloStartConfig) -> str:
    """The silo's decisions, as the SuperNode takes them."""
    parts = [f"partition-id={config.index}", f'silo-name="{config.name}"']
    parts.append(f'resources="{"on" if config.resources else "off"}"')
    if config.device is not None:
        parts.append(f'device="{config.device}"')
    if config.processes is not None:
        parts.append(f"processes={config.processes}")
    if config.declared_speed is not None:
        parts.append(f"declared-speed={config.declared_speed!r}")
    return " ".join(parts)


def way_to_server(config: SiloStartConfig) -> Way:
    """How a silo reaches its server; without TLS, through no proxy.

    Raises:
        ConfigError: no proxy that can be used is named, in its file or in the environment.
    """
    return way_to(config.server, os.environ, DIRECT if config.insecure else config.proxy)


def silo_programs(config: SiloStartConfig) -> list[Program]:
    """A silo's SuperNode; the trainer comes with the first message.

    Raises:
        ConfigError: this version of Flower would run code from the server, and the silo's owner does not allow it; or
            a proxy is named that cannot be used.
    """
    if config.code != "shipped" and not versions.supported():
        problem = "this version of Flower runs whatever client a run brings along, beside the silo's keys and data"
        raise ConfigError("silo.yaml, code", problem, shipped_remedy())
    trust = ["--insecure"]
    if not config.insecure:
        trust = supernode_trust(Path(config.authority or ""), Path(config.node_key or ""))
    command = supernode_command(config.server, node_config(config), trust, config.code)
    environment = {**owner_environment(config), **proxied(way_to_server(config), os.environ)}
    return [Program("supernode", command, environment, rejoins=not config.insecure)]


def supernode_trust(authority: Path, key: Path) -> list[str]:
    """Options of a SuperNode that proves who it is; ``authority`` is the certificate of who signed the server's."""
    return ["--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]


def supernode_command(server: str, node: str, trust: Sequence[str], code: str = "installed") -> list[str]:
    """A SuperNode.

    Args:
        server: address of the SuperLink.
        node: its configuration, in Flower's form.
        trust: `supernode_trust`, or ``--insecure``.
        code: whose answers messages, see `SiloStartConfig`. The node's key is in the SuperNode's memory, so ``shipped``
            code runs in processes of its own, a new one for each message, which is Flower's own way.
    """
    poll = ["--poll", str(_POLL_S)] if versions.supported() else []
    answer = ["--answer"] if way(code) == "fast" else []
    return [*_CHILD, "supernode", *poll, *answer, "--superlink", server, "--node-config", node, *trust]


def server_programs(config: ServerStartConfig, *, lasting: bool = True) -> list[Program]:
    """The SuperLink, and apart from it what starts ServerApps, so that runs survive the SuperLink.

    Args:
        config: of the server.
        lasting: whether the SuperLink keeps its state in a database, where a request takes it 20 ms.

    Raises:
        ConfigError: the state folder is open to others, or nothing can be written there.
    """
    state = Path(config.state)
    secret = state / SECRET_FILE
    if not secret.exists():
        write_private(secret, secrets.token_bytes(32))
    make_secret(state)
    fast = way() == "fast"
    gate = ["--gate", config.gate.model_dump_json(), str(state)] if fast else []
    superlink = [*_CHILD, "superlink", *gate, "--host", config.host, "--port", str(config.port)]
    superlink += ["--isolation", "process", *(["--database", str(state / DATABASE)] if lasting else [])]
    superlink += ["--disable-runtime-dependency-installation", "--superexec-auth-secret-file", str(secret)]
    superexec = [*_CHILD, "superexec", *(["--hide-tokens"] if fast else []), "--runtime-api-address", config.loopback]
    superexec += ["--superexec-auth-secret-file", str(secret)]
    # ServerApps inherit it.
    parcels = {PARCELS: str(state / FOLDER)} if fast else {}
    if config.certificates is None:
        superexec += ["--insecure"]
        return [Program("superlink", [*superlink, "--insecure"]), Program("superexec", superexec, parcels)]
    up = [] if config.upstream is None else [uplink_program(config.upstream, state)]
    folder = Path(config.certificates)
    authority, server = str(Authority.at(folder).certificate), ServerCertificate.at(folder)
    superlink += ["--ssl-ca-certfile", authority, "--ssl-certfile", str(server.certificate)]
    superlink += ["--ssl-keyfile", str(server.key), "--enable-supernode-auth"]
    superexec += ["--root-certificates", authority]
    return [Program("superlink", superlink), Program("superexec", superexec, parcels), *up]


def uplink_program(upstream: UpstreamConfig, state: Path) -> Program:
    """A relay's SuperNode, which hands on what the server asks to the relay's app.

    Raises:
        ConfigError: this version of Flower answers one message at a time, or a proxy is named that cannot be used.
    """
    if way() != "fast":
        problem = "a relay holds a message while it answers others, which this version of Flower does not"
        raise ConfigError("upstream", problem, f"Install flwr {' or '.join(sorted(versions.TESTED))}")
    trust = supernode_trust(Path(upstream.authority), Path(upstream.node_key))
    command = supernode_command(upstream.server, f'partition-id=0 relay="{state / RELAY_SOCKET}"', trust)
    return Program("uplink", command, proxied(way_to(upstream.server, os.environ), os.environ), rejoins=True)
