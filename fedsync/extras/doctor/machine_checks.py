"""Read-only checks of this machine, its keys and its configuration; failures name a remedy."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import ParamSpec

import psutil

from fedsync.common.errors import ConfigError, FedSyncError, SiloLocked
from fedsync.common.sandbox.confinement import NETWORK_ABI, can_confine, can_own_namespaces, landlock_abi
from fedsync.config.silo_start import SiloStartConfig
from fedsync.identity.certificates import Authority, read_certificate
from fedsync.identity.node_keys import node_key_fingerprint
from fedsync.ops.supervisor import versions
from fedsync.silo.owner.lockout import Lockout

Arguments = ParamSpec("Arguments")

LEAST_DISK_BYTES = 1_000_000_000
LEAST_MEMORY_BYTES = 500_000_000
WARN_DAYS, LEAST_DAYS = 30, 7
"""Remaining days of a certificate below which its check warns, and fails."""


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check; ``remedy`` is empty if the user need not act."""

    name: str
    ok: bool
    detail: str
    remedy: str = ""


def guarded(name: str) -> Callable[[Callable[Arguments, Check]], Callable[Arguments, Check]]:
    """Turn the errors of a check into a failed result, so that the remaining checks still run."""

    def decorated(check: Callable[Arguments, Check]) -> Callable[Arguments, Check]:
        @wraps(check)
        def found(*arguments: Arguments.args, **named: Arguments.kwargs) -> Check:
            try:
                return check(*arguments, **named)
            except ConfigError as error:
                return Check(name, False, f"{error.place}: {error.problem}", error.remedy)
            except (FedSyncError, OSError) as error:
                return Check(name, False, str(error), "See the message")
            except Exception as error:  # user code of a task, or a foreign key file, may raise anything
                told = f"{type(error).__name__}: {error}"
                return Check(name, False, told, "See the message; if it says nothing, report it")

        return found

    return decorated


def check_versions() -> Check:
    found = ", ".join(f"{name} {version}" for name, version in versions().items())
    return Check("versions", True, f"Python {platform.python_version()}, {found}")


def check_code(config: SiloStartConfig) -> Check:
    """Check that the system can isolate a run's own client code from the silo's keys and data."""
    if config.code == "shipped":
        return Check("code", True, "FedSync's client, and whatever client the server sends")
    if not can_confine():
        remedy = "Use a Linux with Landlock (5.13, better 6.7), or write code: shipped if the server may run code here"
        return Check("code", False, "this system cannot isolate the client code of a run from keys and data", remedy)
    held = "files, memory and network" if landlock_abi() >= NETWORK_ABI else "files and memory"
    few = "" if landlock_abi() >= NETWORK_ABI else "; Linux 6.7 would isolate it from the network, too"
    own = "have a network and shared memory of their own"
    if not can_own_namespaces():
        own = "cannot open sockets; runs with `workers` are refused without user namespaces"
    return Check(
        "code", True, f"a run's client code is isolated from the silo's {held} (Landlock){few}; trainers {own}"
    )


def check_certificate(path: Path, name: str, now: datetime) -> Check:

    def found() -> Check:
        facts = read_certificate(path)
        hosts = f", for {', '.join(facts.hosts)}" if facts.hosts else ""
        remedy = "Make another authority, for all silos" if facts.authority else "Run `fedsync certs init DIR --renew`"
        return judge_expiry(name, f"{facts.subject}{hosts}", facts.expires, now, remedy)

    return guarded(name)(found)()


def judge_expiry(name: str, what: str, expires: datetime, now: datetime, remedy: str) -> Check:
    left = (expires - now) / timedelta(days=1)
    detail = f"{what}, until {expires:%Y-%m-%d}"
    if left <= 0:
        return Check(name, False, f"{detail}: expired", remedy)
    few = "" if left >= WARN_DAYS else f": {left:.0f} days left"
    return Check(name, left >= LEAST_DAYS, f"{detail}{few}", remedy if few else "")


def check_authority_key(folder: Path) -> Check:
    key = Authority.at(folder).key
    if not key.exists():
        return Check("authority key", True, "not on this machine")
    return Check("authority key", True, f"{key} lies here: whoever takes the server can sign; move it offline")


@guarded("node key")
def check_node_key(path: Path) -> Check:
    if path.suffix != ".node":
        return Check("node key", False, f"{path} is not named NAME.node", "Make it with `fedsync certs silo`")
    return Check("node key", True, f"{path.stem} {node_key_fingerprint(path)}")


@guarded("keys")
def check_ring(folder: Path, name: str) -> Check:
    from fedsync.cipher.keys.keyring import open_ring

    ring = open_ring(folder)
    if ring.own.name != name:
        return Check("keys", False, f"{folder} has the keys of {ring.own.name!r}", f"Name the folder of {name!r}")
    members = ", ".join(ring.group.members)
    return Check("keys", True, f"epoch {ring.group.epoch}, group {ring.group.fingerprint.hex()[:16]}, for {members}")


@guarded("lock")
def check_open(folder: Path) -> Check:
    from fedsync.cipher.keys.keyring import open_ring

    try:
        Lockout(open_ring(folder)).check()
    except SiloLocked as error:
        return Check("lock", False, str(error))
    return Check("lock", True, "open")


@guarded("keys")
def check_server_keys(path: Path) -> Check:
    from fedsync.cipher.keys.keywrap import read_server_file

    file = read_server_file(path.read_bytes(), str(path))
    return Check("keys", True, f"epoch {file.epoch}, group {file.fingerprint.hex()[:16]}, {', '.join(file.senders)}")


@guarded("disk")
def check_disk(folder: Path) -> Check:
    free = shutil.disk_usage(_nearest(folder)).free
    detail = f"{_size(free)} free"
    remedy = f"Free {_size(LEAST_DISK_BYTES)} at least, or choose another state folder"
    return Check("disk", True, detail) if free >= LEAST_DISK_BYTES else Check("disk", False, detail, remedy)


def check_memory() -> Check:
    free = psutil.virtual_memory().available
    if free >= LEAST_MEMORY_BYTES:
        return Check("memory", True, f"{_size(free)} available")
    detail = f"{_size(free)} available, {_size(LEAST_MEMORY_BYTES)} wanted"
    return Check("memory", False, detail, "End other programs, or use a larger machine")


@guarded("device")
def check_device(device: str) -> Check:
    from fedsync.train.machine.device import resolve

    return Check("device", True, str(resolve(device, "device")))


def _nearest(folder: Path) -> Path:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _size(count: int) -> str:
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    return f"{count / unit:.1f} {name}"
