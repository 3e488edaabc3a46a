"""Commands ``fedsync silo start`` and ``fedsync server``: processes, registration and revocation of silos."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Collection, Iterable
from functools import partial
from math import inf
from pathlib import Path

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FILE, private_folder, write_atomically
from fedsync.common.locks import taken
from fedsync.common.processes import listen_error, raise_file_limit
from fedsync.common.proxies import split
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.flower.process_environment import flower_environment
from fedsync.flower.registration import Registered, known_nodes, register_each, revoke_keys
from fedsync.identity.certificates import Authority, ServerCertificate, check_server_certificate
from fedsync.ops.audit_heads import HeadKeeper
from fedsync.ops.owner_window import PresenceWatch
from fedsync.ops.programs import CONNECTION, STRUCK_FILE, server_programs, silo_programs
from fedsync.ops.registration_loop import (
    DONE,
    REGISTERED_FILE,
    REVOKED,
    RegistrationLoop,
    note_registered,
    read_registered,
)
from fedsync.ops.run_watchdog import RunWatchdog
from fedsync.ops.runs import authority_of, connect, resume_run
from fedsync.ops.supervisor import alone_in, stop_on_signals, supervise
from fedsync.server.run_folder import struck_silos
from fedsync.silo.protocol import STATE_FOLDER
from fedsync.silo.session.liveness import Trainers
from fedsync.silo.session.trainer_client import stop_trainers
from fedsync.silo.session.trainer_folder import tidy

logger = foreign.logger(__name__)

_CONNECT_S = 1.0
_LOOK_S = 1.0
_LEFT_S = 3.0


def start_silo(config: SiloStartConfig) -> None:
    """Run a silo until SIGTERM or SIGINT, then end its processes; `ConfigError` if the state folder is unusable."""
    state, trainers = Path(config.state), Path(config.state) / STATE_FOLDER
    with alone_in(state), stop_on_signals() as stop:
        seen, heads = Trainers(trainers), HeadKeeper(config)
        presence = PresenceWatch(config.presence, lambda: seen.working)
        heads.tend()

        def tidy_up() -> None:
            tidy(trainers, config.state_bytes)
            heads.tend()

        threading.Thread(target=seen.watch, args=(stop,), daemon=True).start()
        try:
            supervise(
                silo_programs(config),
                flower_environment(state),
                state,
                config.logs,
                {"silo": config.name, "server": config.server},
                stop,
                tidy_up,
                lambda: {**seen.told(), **presence.told()},
                presence.should_run,
                lambda: stop_trainers(trainers),
            )
        finally:
            stop_trainers(trainers)
            heads.tend(last=True)


def start_server(config: ServerStartConfig) -> None:
    """Run a server until SIGTERM or SIGINT, then end all of its processes.

    The silos of its file are registered once the SuperLink listens. Dead runs are resumed. The health file has the
    state of both. Raises `ConfigError` if state folder, certificates or port are unusable or in use.
    """
    state = Path(config.state)
    if config.certificates is not None:
        folder, (own, _) = Path(config.certificates), split(config.loopback)
        check_server_certificate(Authority.at(folder).certificate, ServerCertificate.at(folder), own)
    raise_file_limit()
    with alone_in(state), stop_on_signals() as stop:
        _check_port(config)
        connect(config)
        (state / REGISTERED_FILE).unlink(missing_ok=True)
        registrar = RegistrationLoop(list(config.node_keys), lambda names: _register_if_up(config, names))
        keeper = RunWatchdog(state, lambda folder: resume_run(config, folder, died=True))
        watches, programs = [registrar.watch, keeper.watch], server_programs(config)
        if config.upstream is not None:
            from fedsync.extras.relays.relay_start import begin_relaying, uplink_programs

            watches.append(partial(begin_relaying, config))
            programs += uplink_programs(config.upstream, state)
        for watch in watches:
            threading.Thread(target=watch, args=(stop,), daemon=True).start()
        supervise(
            programs,
            flower_environment(state),
            state,
            config.logs,
            {"listens": f"{config.host}:{config.port}"},
            stop,
            tell=lambda: {"silos": registrar.told | read_registered(state), "keeper": keeper.status()},
        )


def _check_port(config: ServerStartConfig) -> None:
    """Raise `ConfigError` if the SuperLink cannot listen: it would restart forever, with errors only in its log."""
    end_s = time.monotonic() + _LEFT_S  # the SuperLink of a just killed supervisor may still exit
    while (error := listen_error(config.host, config.port)) is not None:
        if error.errno != errno.EADDRINUSE or time.monotonic() >= end_s:
            problem = f"nobody can listen on {config.host}:{config.port}: {error.strerror or error}"
            remedy = f"End the program that `ss -ltnp sport = :{config.port}` shows, or write another host or port"
            raise ConfigError("server.yaml, port", problem, remedy)
        time.sleep(_LOOK_S)


def register_silos(config: ServerStartConfig, names: Iterable[str] | None = None) -> Registered:
    """Register the keys of the file's silos; return each result. `ConfigError` without TLS, or in another's state."""
    _require_authority(config)
    state = private_folder(Path(config.state))
    keys = {name: Path(config.node_keys[name]) for name in (config.node_keys if names is None else names)}
    found = register_each(keys, state, CONNECTION)
    _strike(state, set(), keys.keys() - found.problems.keys())
    note_registered(state, {name: str(found.problems.get(name, DONE)) for name in keys})
    return found


def revoke_silo(config: ServerStartConfig, name: str) -> None:
    """Revoke the registration of a silo's keys, after the hubs of active runs reject the silo: so a killed command can
    be repeated. Raises `ConfigError` if the name was never registered, the file still lists the name, the server has no
    TLS, or its state folder is another user's; `RunError` if the server does not answer.
    """
    if name in config.node_keys:
        raise ConfigError("silos", f"{name!r} would be registered again at the next start", "Remove it from the file")
    _require_authority(config)
    state = private_folder(Path(config.state))
    known = {*read_registered(state), *(node.name for node in known_nodes(state))}
    if name not in known:
        remedy = f"Check the name; registered were: {', '.join(sorted(known)) or 'none'}"
        raise ConfigError("silo name", f"no key was ever registered under {name!r}", remedy)
    _strike(state, {name}, set())
    revoke_keys(name, state, CONNECTION)
    note_registered(state, {name: REVOKED})


def _require_authority(config: ServerStartConfig) -> None:
    if authority_of(config) is None:
        raise ConfigError("insecure", "nodes are not authenticated", "Give certificates instead")


def _strike(state: Path, names: Collection[str], forgiven: Collection[str]) -> None:
    """Make the hubs of active runs reject the silos in ``names``, and accept the silos in ``forgiven`` again."""
    file = state / STRUCK_FILE
    with taken(state / f"{STRUCK_FILE}.lock", inf):
        before = struck_silos(file)
        after = (before | set(names)) - set(forgiven)
        if after != before:
            write_atomically(file, json.dumps(sorted(after)).encode(), OWNER_FILE)


def _register_if_up(config: ServerStartConfig, names: Iterable[str]) -> Registered:
    socket.create_connection(split(config.loopback), timeout=_CONNECT_S).close()
    told = read_registered(Path(config.state))
    return register_silos(config, [name for name in names if told.get(name) != REVOKED])
