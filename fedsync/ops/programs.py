"""Which processes a real silo and a real server consist of, and how they are told what their files say."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from fedsync.common.files import write_private
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.core.errors import ConfigError
from fedsync.flower.internals import executor
from fedsync.identity.certificates import Authority, ServerCertificate
from fedsync.ops.supervisor import Program
from fedsync.trainer.owner_policy import owner_environment

CONNECTION = "fedsync"
"""How Flower's command line calls the connection to the server, with the server's state folder as its home."""

DATABASE, SECRET_FILE = "superlink.db", "superexec.secret"
NODE_SECRET_FILE, NODE_PORT_FILE = "supernode.secret", "supernode.port"

_POLL_S = 0.1
_CHILD = (sys.executable, "-m", "fedsync.flower.internals.launch")


def way() -> str:
    """How this version of Flower is used: ``fast`` where it was tested, else ``stock``."""
    return "fast" if executor.supported() else "stock"


def shipped_remedy() -> str:
    """What helps where this version of Flower cannot be kept from running the server's code."""
    return f"Install flwr {' or '.join(sorted(executor.TESTED))}, or write code: shipped if the server may"


def node_config(config: SiloStartConfig) -> str:
    """The silo's decisions, as the SuperNode takes them."""
    parts = [f"partition-id={config.index}", f'silo-name="{config.name}"']
    parts.append(f'resources="{"on" if config.resources else "off"}"')
    if config.device is not None:
        parts.append(f'device="{config.device}"')
    if config.declared_speed is not None:
        parts.append(f"declared-speed={config.declared_speed!r}")
    return " ".join(parts)


def silo_programs(config: SiloStartConfig) -> list[Program]:
    """A silo's SuperNode and, the fast way, the executor of its messages; the trainer comes with the first message.

    Raises:
        ConfigError: this version of Flower would run code from the server, and the silo's owner does not allow it.
    """
    state = Path(config.state)
    options = ["--superlink", config.server, "--node-config", node_config(config)]
    if config.insecure:
        options.append("--insecure")
    else:
        options += ["--root-certificates", str(config.authority)]
        options += ["--auth-supernode-private-key", str(config.node_key)]
    owner = owner_environment(config)
    port = state / NODE_PORT_FILE
    if way() == "stock":
        if config.code != "shipped":
            problem = "this version of Flower runs whatever client a run brings along, beside the silo's keys and data"
            raise ConfigError("silo.yaml, code", problem, shipped_remedy())
        return [Program("supernode", supernode_command(port, options), owner, rejoins=not config.insecure)]
    secret = new_secret(state / NODE_SECRET_FILE)
    return [
        Program("supernode", supernode_command(port, options, secret, _POLL_S), rejoins=not config.insecure),
        # A SuperNode whose executor ended in the middle of a message waits for ever: it is started again too.
        Program(
            "executor",
            executor_command(port, secret, _POLL_S, shipped=config.code == "shipped"),
            owner,
            takes_along="supernode",
        ),
    ]


def supernode_command(
    port: Path, options: Sequence[str], secret: Path | None = None, poll_s: float | None = None
) -> list[str]:
    """A SuperNode with a port of its own on loopback.

    Args:
        port: file in which it leaves the port.
        options: its own.
        secret: file with what an executor has to prove; None leaves messages to processes of its own, the stock way.
        poll_s: how often it looks for messages, the fast way [s].
    """
    command = [
        sys.executable,
        "-m",
        "fedsync.flower.internals.port",
        str(port),
        "fedsync.flower.internals.launch",
        "supernode",
    ]
    command += [] if poll_s is None else ["--poll", str(poll_s)]
    command += [*options, "--host", "127.0.0.1"]
    if secret is not None:
        command += ["--isolation", "process", "--superexec-auth-secret-file", str(secret)]
    return command


def executor_command(port: Path, secret: Path, poll_s: float, *, shipped: bool = False) -> list[str]:
    """What answers the messages of a SuperNode; arguments as there, ``shipped`` as for `Apps`."""
    command = [
        sys.executable,
        "-m",
        "fedsync.flower.internals.executor",
        "--port-file",
        str(port),
        "--secret-file",
        str(secret),
    ]
    return [*command, "--poll", str(poll_s), *(["--shipped"] if shipped else [])]


def new_secret(path: Path) -> Path:
    """Write a secret that processes of one machine share; returns its file.

    Raises:
        ConfigError: the folder is open to others, or nothing can be written there.
    """
    write_private(path, secrets.token_bytes(32))
    return path


def server_programs(config: ServerStartConfig) -> list[Program]:
    """The SuperLink with its database, and apart from it what starts ServerApps, so that runs survive the SuperLink."""
    state = Path(config.state)
    secret = state / SECRET_FILE
    if not secret.exists():
        new_secret(secret)
    gate = ["--gate"] if way() == "fast" else []
    superlink = [*_CHILD, "superlink", *gate, "--host", config.host, "--port", str(config.port)]
    superlink += ["--database", str(state / DATABASE), "--isolation", "process"]
    superlink += ["--disable-runtime-dependency-installation", "--superexec-auth-secret-file", str(secret)]
    superexec = [*_CHILD, "superexec", "--runtime-api-address", config.loopback]
    superexec += ["--superexec-auth-secret-file", str(secret)]
    if config.certificates is None:
        return [Program("superlink", [*superlink, "--insecure"]), Program("superexec", [*superexec, "--insecure"])]
    folder = Path(config.certificates)
    authority, server = str(Authority.at(folder).certificate), ServerCertificate.at(folder)
    superlink += ["--ssl-ca-certfile", authority, "--ssl-certfile", str(server.certificate)]
    superlink += ["--ssl-keyfile", str(server.key), "--enable-supernode-auth"]
    return [Program("superlink", superlink), Program("superexec", [*superexec, "--root-certificates", authority])]
