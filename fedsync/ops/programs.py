"""Command lines and environments of the processes of a real silo or server, from its configuration file."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import private_folder, write_private
from fedsync.common.processes import INTERPRETER, free_ports
from fedsync.common.proxies import DIRECT, Way, proxied, way_to
from fedsync.common.sandbox.confinement import NETWORK_ABI, can_confine, landlock_abi, program_folders
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.identity.certificates import Authority, ServerCertificate, read_certificate
from fedsync.ops.supervisor import Program
from fedsync.server.run_folder import HUB, HubPlace
from fedsync.silo.agent.joins import FOLDER as AGENT_FOLDER
from fedsync.silo.agent.joins import INBOX, INBOX_FOLDER, LOOPBACK, OWN_NODE
from fedsync.silo.agent.joins import MODULE as AGENT
from fedsync.silo.owner.owner_policy import owner_environment
from fedsync.silo.protocol import STATE_FOLDER

logger = foreign.logger(__name__)

CONNECTION = "fedsync"
"""Name of the server connection in Flower's command line, whose home is the server's state folder."""

ROOM = "room"
"""Sandbox folder for code that runs bring, in a silo's state folder."""

DATABASE, SECRET_FILE = "superlink.db", "superexec.secret"

HUB_FILE, STRUCK_FILE = "hub.json", "struck.json"
"""Files in a server's state folder: addresses of hubs, and names of revoked silos that hubs reject."""

SOCKETS = "hubs"
"""Folder of the hubs' sockets, in a server's state folder, for hubs behind a reverse proxy."""

_CHILD = (*INTERPRETER, "fedsync.flower.launch")


def node_settings(config: SiloStartConfig) -> dict[str, str | int | float]:
    found: dict[str, str | int | float | None] = {
        "partition-id": config.index,
        "silo-name": config.name,
        "resources": "on" if config.resources else "off",
        "device": config.device,
        "declared-speed": config.declared_speed,
    }
    return {key: value for key, value in found.items() if value is not None}


def node_config(config: SiloStartConfig) -> str:
    settings = node_settings(config).items()
    return " ".join(f'{key}="{value}"' if isinstance(value, str) else f"{key}={value!r}" for key, value in settings)


def way_to_server(config: SiloStartConfig) -> Way:
    """Return a silo's route to its server, without TLS never by a proxy; `ConfigError` if the proxy is unusable."""
    return way_to(config.server, os.environ, DIRECT if config.insecure else config.proxy)


def silo_programs(config: SiloStartConfig) -> list[Program]:
    """Return agent, SuperNode and sandbox of a silo; the first message starts the trainer. Raises `ConfigError` if the
    proxy is unusable; or this system cannot isolate a run's client code from the silo's keys and data, and the owner
    does not allow such code without isolation.
    """
    trust = ["--insecure"]
    if not config.insecure:
        trust = supernode_trust(Path(config.authority or ""), Path(config.node_key or ""))
    command = supernode_command(config.server, node_config(config), trust)
    way = proxied(way_to_server(config), os.environ, *config.trusted_hosts)
    environment = {**owner_environment(config), **way, OWN_NODE: json.dumps(node_settings(config))}
    folder = private_folder(private_folder(Path(config.state) / STATE_FOLDER) / AGENT_FOLDER)
    if config.code == "shipped":
        return [_agent(folder, environment), Program("supernode", command, environment, rejoins=not config.insecure)]
    supernode = Program("supernode", command, way, rejoins=not config.insecure)
    problem = "this system cannot isolate the client code of a run from keys and data"
    remedy = "Use a Linux with Landlock (5.13, better 6.7), or write code: shipped if the server may run code here"
    return confined(
        supernode,
        folder,
        Path(config.state) / ROOM,
        environment,
        config.trusted_hosts,
        [*config.closed(), *config.paths],
        ConfigError("silo.yaml, code", problem, remedy),
    )


def confined(
    supernode: Program,
    folder: Path,
    home: Path,
    environment: Mapping[str, str],
    hosts: Sequence[str],
    closed: Sequence[str],
    unable: ConfigError,
) -> list[Program]:
    """Return a SuperNode with its ClientApps in a sandbox, and the agent that receives their joins.

    The sandbox must not read the files and folders ``closed``. Raises `ConfigError` if one is inside a program folder;
    ``unable`` itself, if this system cannot confine.
    """
    if not can_confine():
        raise unable
    open_folders = [each for each in program_folders() if each.is_dir() and each != Path("/proc")]
    for path in closed:
        if any(Path(path).resolve().is_relative_to(each) for each in open_folders):
            problem = "it is in a folder of programs, which a run's client code may read"
            raise ConfigError(str(path), problem, "Keep keys, data and state elsewhere")
    if landlock_abi() < NETWORK_ABI:
        logger.warning("a run's client code is isolated from files, and not from the network: this needs Linux 6.7")
    inbox, secret, port = private_folder(folder / INBOX_FOLDER), folder / SECRET_FILE, str(free_ports(1)[0])
    write_private(secret, secrets.token_bytes(32))
    executes = ["--superexec-auth-secret-file", str(secret)]
    room = [*_CHILD, "superexec", "--room", str(home), str(inbox), "--insecure"]
    room += ["--runtime-api-address", f"127.0.0.1:{port}", *executes]
    command = [*supernode.command, "--isolation", "process", "--host", "127.0.0.1", "--port", port, *executes]
    return [
        _agent(folder, environment),
        replace(supernode, command=command),
        Program("room", room, {INBOX: str(inbox), ALLOWED: json.dumps({"hub_hosts": list(hosts)})}),
    ]


def _agent(folder: Path, environment: Mapping[str, str]) -> Program:
    return Program("agent", [*INTERPRETER, AGENT, str(folder), "--stay"], environment)


def supernode_trust(authority: Path, key: Path) -> list[str]:
    return ["--root-certificates", str(authority), "--auth-supernode-private-key", str(key)]


def supernode_command(server: str, node: str, trust: Sequence[str]) -> list[str]:
    return [*_CHILD, "supernode", "--superlink", server, "--node-config", node, *trust]


def server_programs(config: ServerStartConfig, *, lasting: bool = True) -> list[Program]:
    """Return the SuperLink, and a separate launcher of ServerApps, so that runs survive a SuperLink restart.

    ``lasting``: the SuperLink keeps its state in a database, which costs 20 ms per request. Raises `ConfigError` if the
    state folder is open to other users, or not writable.
    """
    state = Path(config.state)
    secret = state / SECRET_FILE
    if not secret.exists():
        write_private(secret, secrets.token_bytes(32))
    superlink = [*_CHILD, "superlink", "--host", config.host, "--port", str(config.port)]
    superlink += ["--isolation", "process", *(["--database", str(state / DATABASE)] if lasting else [])]
    superlink += ["--disable-runtime-dependency-installation", "--superexec-auth-secret-file", str(secret)]
    superexec = [*_CHILD, "superexec", "--runtime-api-address", config.loopback]
    superexec += ["--superexec-auth-secret-file", str(secret)]
    hub_place(config).save(state / HUB_FILE)
    hub = {HUB: str(state / HUB_FILE)}  # ServerApps inherit this variable
    if config.certificates is None:
        superexec += ["--insecure"]
        return [Program("superlink", [*superlink, "--insecure"]), Program("superexec", superexec, hub)]
    folder = Path(config.certificates)
    authority, server = str(Authority.at(folder).certificate), ServerCertificate.at(folder)
    superlink += ["--ssl-ca-certfile", authority, "--ssl-certfile", str(server.certificate)]
    superlink += ["--ssl-keyfile", str(server.key), "--enable-supernode-auth"]
    superexec += ["--root-certificates", authority]
    return [Program("superlink", superlink), Program("superexec", superexec, hub)]


def hub_place(config: ServerStartConfig) -> HubPlace:
    ports = config.hub.listening(config.port)
    if config.certificates is None:
        return HubPlace(config.host, ports, config.hub.name or "127.0.0.1")
    folder = Path(config.certificates)
    server, authority = ServerCertificate.at(folder), Authority.at(folder).certificate
    hosts = read_certificate(server.certificate).hosts
    # Silos elsewhere cannot use this machine's own names.
    name = config.hub.name or next((host for host in hosts if host not in LOOPBACK), hosts[0])
    struck = str(Path(config.state) / STRUCK_FILE)
    proxy, sockets = config.hub.proxy or "", config.hub.sockets or str(Path(config.state) / SOCKETS)
    files = str(server.certificate), str(server.key), str(authority), struck
    return HubPlace(config.host, ports, name, *files, proxy, sockets)
