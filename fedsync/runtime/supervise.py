"""``fedsync silo start`` and ``fedsync server``: from a file to processes that run."""

from __future__ import annotations

import logging
import socket
import threading
import time
from pathlib import Path

from fedsync.config.server import ServerStartConfig
from fedsync.config.silo import SiloStartConfig
from fedsync.core.errors import ConfigError, RunError
from fedsync.identity.certificates import Authority, ServerCertificate, check_server_certificate
from fedsync.runtime.environment import STATE_FOLDER, flower_environment
from fedsync.runtime.link import stop_trainers
from fedsync.runtime.processes import free_ports
from fedsync.runtime.quota import tidy
from fedsync.runtime.registration import register_keys, revoke_keys
from fedsync.runtime.runs import Keeper, authority_of, connect, resume_run
from fedsync.runtime.supervisor_plans import CONNECTION, server_programs, silo_programs, way
from fedsync.runtime.supervisor_run import alone_in, stop_on_signals, supervise

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0


def start_silo(config: SiloStartConfig) -> None:
    """Run a silo until SIGTERM or SIGINT, then end all of its processes.

    Raises:
        ConfigError: the state folder will not do, or is at work already.
    """
    state = Path(config.state)
    trainers = state / STATE_FOLDER
    with alone_in(state), stop_on_signals() as stop:
        try:
            supervise(
                silo_programs(config, free_ports(1)[0]),
                flower_environment(state),
                state,
                config.logs,
                {"silo": config.name, "server": config.server, "way": way()},
                stop,
                lambda: tidy(trainers, config.state_bytes),
            )
        finally:
            stop_trainers(trainers)


def start_server(config: ServerStartConfig) -> None:
    """Run a server until SIGTERM or SIGINT, then end all of its processes.

    The silos of its file are registered once the SuperLink listens. Runs that died are resumed.

    Raises:
        ConfigError: the state folder, certificates or port will not do, or the folder is at work already.
    """
    state = Path(config.state)
    if config.certificates is not None:
        folder = Path(config.certificates)
        check_server_certificate(Authority.at(folder).certificate, ServerCertificate.at(folder))
    with alone_in(state), stop_on_signals() as stop:
        connect(config)
        threading.Thread(target=_register_when_up, args=(config, stop), daemon=True).start()
        keeper = Keeper(state, lambda folder: resume_run(config, folder))
        threading.Thread(target=keeper.watch, args=(stop,), daemon=True).start()
        supervise(
            server_programs(config),
            flower_environment(state),
            state,
            config.logs,
            {"listens": f"{config.host}:{config.port}", "way": way()},
            stop,
        )


def register_silos(config: ServerStartConfig) -> None:
    """Register the keys of all silos in the server's file; those that are registered stay.

    Raises:
        ConfigError: the server speaks no TLS.
        RunError: a key is refused, or the server does not answer.
    """
    authority = _required_authority(config)
    keys = {name: Path(key) for name, key in config.silos.items()}
    register_keys(keys, Path(config.state), CONNECTION, config.loopback, authority)


def revoke_silo(config: ServerStartConfig, name: str) -> None:
    """Take back the registration of a silo's keys.

    Raises:
        ConfigError: no key is registered under the name, the file still lists it, or the server speaks no TLS.
        RunError: the server does not answer.
    """
    if name in config.silos:
        raise ConfigError("silos", f"{name!r} would be registered again at the next start", "Remove it from the file")
    if revoke_keys(name, config.loopback, _required_authority(config)) == 0:
        raise ConfigError("silo name", f"no key is registered under {name!r}", "Check the name")


def _required_authority(config: ServerStartConfig) -> Path:
    authority = authority_of(config)
    if authority is None:
        raise ConfigError("insecure", "nodes are not authenticated", "Give certificates instead")
    return authority


def _register_when_up(config: ServerStartConfig, stop: threading.Event) -> None:
    if not config.silos:
        return
    host, _, port = config.loopback.rpartition(":")
    end = time.monotonic() + _START_TIMEOUT_S
    while not stop.is_set() and time.monotonic() < end:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            register_silos(config)
        except OSError:
            stop.wait(0.5)
        except RunError as error:
            logger.warning("%s", error)
            return
        else:
            logger.info("silos registered: %s", ", ".join(config.silos))
            return
