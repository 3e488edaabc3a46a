"""Keys for emulated silos on one machine: administrator and silos in one process."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsync.cipher.keys.authority import (
    ADMINISTRATOR_FILE,
    SERVER_FILE,
    ContextMaker,
    bfv_context,
    issue,
    issued_folder,
    new_authority,
    open_authority,
)
from fedsync.cipher.keys.keyring import GROUP_FILE, Ring, accept, new_silo, open_ring, read_bundle
from fedsync.cipher.keys.keywrap import ServerKeys, announce, read_server_file
from fedsync.cipher.keys.material import KEY_BYTES, GroupKey, SiloKeys, hkdf, verification_key
from fedsync.common.errors import ConfigError
from fedsync.common.files import private_folder


@dataclass(frozen=True, slots=True)
class EmulatedKeys:
    """Keys of emulated silos: the server's part, and folders for `fedsync.cipher.keys.keyring.open_ring`."""

    server: ServerKeys
    server_file: Path
    silos: Mapping[str, Path]


def emulated_keys(
    names: Sequence[str], folder: Path, seed: int | None = None, new_context: ContextMaker = bfv_context
) -> EmulatedKeys:
    """Do all steps of ``fedsync keys`` for emulated silos on this machine.

    All keys lie in one folder, so nobody is protected from anybody: use this for experiments only.

    Args:
        folder: folder for the keys, of mode 0700. Existing keys are reused, so that a run can continue.
        seed: makes the signing and exchange pairs reproducible; the group secret is always fresh, because the library
            draws its part itself.

    Raises:
        ConfigError: the folder is open to others, or has the keys of other silos.
    """
    private_folder(folder)
    home = folder / "administrator"
    silos = {name: folder / "silos" / name for name in names}
    if not (home / ADMINISTRATOR_FILE).exists():
        new_authority(home, _seeded(seed, "administrator", "signing"), new_context)
    authority = open_authority(home)
    if not authority.issued:
        private_folder(folder / "silos")
        own = [new_silo(path, name, _pairs(seed, name)) for name, path in silos.items()]
        issue(home, [(keys.name, announce(keys).encode()) for keys in own], new_context)
        authority = open_authority(home)
    if authority.members.keys() != silos.keys():
        found = ", ".join(authority.members)
        raise ConfigError(str(folder), f"these are the keys of other silos: {found}", "Use a folder for each run")
    out = issued_folder(home, authority.epoch)
    for name, path in silos.items():
        if not (path / GROUP_FILE).exists() or open_ring(path).group.epoch < authority.epoch:
            accept(path, read_bundle(out / f"{name}.bundle"), authority.public)
    server_path = out / SERVER_FILE
    server = read_server_file(server_path.read_bytes(), str(server_path), authority.public)
    return EmulatedKeys(server, server_path, silos)


def emulated_rings(
    names: Sequence[str], seed: int | None = None, new_context: ContextMaker = bfv_context
) -> tuple[ServerKeys, dict[str, Ring]]:
    """Make the keys of `emulated_keys` in memory, for silos that are objects in one process."""
    own = {name: _pairs(seed, name) or SiloKeys.generate(name) for name in names}
    signing = _seeded(seed, "administrator", "signing") or secrets.token_bytes(KEY_BYTES)
    members = {name: keys.public for name, keys in own.items()}
    context = new_context()
    group = GroupKey(1, context, secrets.token_bytes(KEY_BYTES), members, verification_key(signing))
    return ServerKeys.of(group), {name: Ring(keys, group) for name, keys in own.items()}


def _pairs(seed: int | None, name: str) -> SiloKeys | None:
    exchange, signing = _seeded(seed, name, "exchange"), _seeded(seed, name, "signing")
    return None if exchange is None or signing is None else SiloKeys(name, exchange, signing)


def _seeded(seed: int | None, name: str, use: str) -> bytes | None:
    return None if seed is None else hkdf(str(seed).encode(), b"", f"fedsync emulated 1/{use}/{name}".encode())
