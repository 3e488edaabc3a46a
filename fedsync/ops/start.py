"""``fedsync silo start`` and ``fedsync server``: from a file to processes that run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from pathlib import Path

from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.core.errors import ConfigError
from fedsync.flower.environment import flower_environment
from fedsync.flower.internals.registration import Registered, register_each, revoke_keys
from fedsync.identity.certificates import Authority, ServerCertificate, check_server_certificate
from fedsync.ops.programs import CONNECTION, server_programs, silo_programs, way
from fedsync.ops.registration_loop import RegistrationLoop
from fedsync.ops.run_watchdog import RunWatchdog
from fedsync.ops.runs import authority_of, connect, resume_run
from fedsync.ops.supervisor_loop import alone_in, stop_on_signals, supervise
from fedsync.trainer.client import stop_trainers
from fedsync.trainer.folder import tidy
from fedsync.trainer.liveness import Trainers
from fedsync.trainer.protocol import STATE_FOLDER

_CONNECT_S = 1.0


def start_silo(config: SiloStartConfig) -> None:
    """Run a silo until SIGTERM or SIGINT, then end all of its processes.

    Raises:
        ConfigError: the state folder will not do, or is at work already.
    """
    state = Path(config.state)
    trainers = state / STATE_FOLDER
    with alone_in(state), stop_on_signals() as stop:
        seen = Trainers(trainers)
        threading.Thread(target=seen.watch, args=(stop,), daemon=True).start()
        try:
            supervise(
                silo_programs(config),
                flower_environment(state),
                state,
                config.logs,
                {"silo": config.name, "server": config.server, "way": way()},
                stop,
                lambda: tidy(trainers, config.state_bytes),
                seen.told,
            )
        finally:
            stop_trainers(trainers)


def start_server(config: ServerStartConfig) -> None:
    """Run a server until SIGTERM or SIGINT, then end all of its processes.

    The silos of its file are registered once the SuperLink listens. Runs that died are resumed. How both go is in the
    health file: what `RunWatchdog.status` and `RegistrationLoop.status` say.

    Raises:
        ConfigError: the state folder, certificates or port will not do, or the folder is at work already.
    """
    state = Path(config.state)
    if config.certificates is not None:
        folder = Path(config.certificates)
        check_server_certificate(Authority.at(folder).certificate, ServerCertificate.at(folder))
    with alone_in(state), stop_on_signals() as stop:
        connect(config)
        registrar = RegistrationLoop(list(config.silos), lambda names: _register_if_up(config, names))
        keeper = RunWatchdog(state, lambda folder: resume_run(config, folder, died=True))
        for watch in (registrar.watch, keeper.watch):
            threading.Thread(target=watch, args=(stop,), daemon=True).start()
        supervise(
            server_programs(config),
            flower_environment(state),
            state,
            config.logs,
            {"listens": f"{config.host}:{config.port}", "way": way()},
            stop,
            tell=lambda: {"silos": registrar.status(), "keeper": keeper.status()},
        )


def register_silos(config: ServerStartConfig, names: Iterable[str] | None = None) -> Registered:
    """Have the keys in the server's file be those that are registered for its silos; returns what became of each.

    Args:
        config: of the server.
        names: of the silos; None for all of the file.

    Raises:
        ConfigError: the server speaks no TLS.
    """
    authority = _required_authority(config)
    keys = {name: Path(config.silos[name]) for name in (config.silos if names is None else names)}
    return register_each(keys, Path(config.state), CONNECTION, config.loopback, authority)


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


def _register_if_up(config: ServerStartConfig, names: Iterable[str]) -> Registered:
    """As `register_silos`; an `OSError` where nobody listens, without Flower's imports."""
    host, _, port = config.loopback.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    return register_silos(config, names)
