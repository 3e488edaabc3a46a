"""Checks before the start of a silo or a server: machine, files, keys and network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from fedsync.common.errors import ConfigError
from fedsync.common.proxies import Way, way_to
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.extras.doctor import health as health
from fedsync.extras.doctor import machine_checks as here
from fedsync.extras.doctor import network_checks as network
from fedsync.extras.doctor.machine_checks import Check
from fedsync.identity.certificates import Authority, ServerCertificate
from fedsync.ops.programs import way_to_server


def check_machine() -> Iterator[Check]:
    yield here.check_versions()
    yield here.check_disk(Path.cwd())
    yield here.check_memory()
    yield here.check_device("auto")


def check_silo(config: SiloStartConfig, now: datetime) -> Iterator[Check]:
    """Run all checks of a silo, cheap checks first."""
    yield here.check_versions()
    yield here.check_code(config)
    if config.authority is not None:
        yield here.check_certificate(Path(config.authority), "authority", now)
    if config.node_key is not None:
        yield here.check_node_key(Path(config.node_key))
    if config.keys is not None:
        yield here.check_ring(Path(config.keys), config.name)
        yield here.check_open(Path(config.keys))
    yield here.check_disk(Path(config.state))
    yield here.check_memory()
    yield here.check_device(config.device or "auto")
    yield from _check_way(lambda: way_to_server(config), config.authority, now)
    yield health.check_health(Path(config.state), now)
    yield from health.check_refusals(Path(config.state))
    yield health.check_approvals(config)
    yield health.check_audit_log(config)


def check_server(config: ServerStartConfig, now: datetime) -> Iterator[Check]:
    yield here.check_versions()
    if config.certificates is not None:
        folder = Path(config.certificates)
        yield here.check_certificate(Authority.at(folder).certificate, "authority", now)
        yield here.check_certificate(ServerCertificate.at(folder).certificate, "certificate", now)
        yield here.check_authority_key(folder)
    if config.keys is not None:
        yield here.check_server_keys(Path(config.keys))
    yield here.check_disk(Path(config.state))
    yield here.check_memory()
    if config.upstream is not None:
        upstream = config.upstream
        yield here.check_certificate(Path(upstream.authority), "upstream CA", now)
        yield here.check_node_key(Path(upstream.node_key))
        yield from _check_way(lambda: way_to(upstream.server, os.environ), upstream.authority, now)
        yield from health.check_refusals(Path(config.state))
    if config.certificates is not None:
        running = health.is_running(Path(config.state))
        certificate = ServerCertificate.at(Path(config.certificates)).certificate
        yield network.check_served(config.loopback, certificate, now, running=running)
    yield health.check_health(Path(config.state), now)
    yield health.check_registration(Path(config.state), now, config.node_keys)
    yield health.check_runs(Path(config.state), now)


def _check_way(found: Callable[[], Way], authority: str | None, now: datetime | None = None) -> Iterator[Check]:
    try:
        way = found()
    except ConfigError as error:
        yield Check("server", False, f"{error.place}: {error.problem}", error.remedy)
        return
    reached = network.check_reachable(way)
    yield reached
    if reached.ok and authority is not None:
        yield network.check_tls(way, Path(authority), now)
        yield network.check_clock(way, Path(authority), time.time)
