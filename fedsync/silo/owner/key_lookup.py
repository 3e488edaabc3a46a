"""Lookup of a silo's own encryption keys, and creation of keys for emulated silos."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.errors import ConfigError
from fedsync.config.cipher import PlainConfig
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring

KEYS = "FEDSYNC_KEYS"  # environment variable of a silo: the folder of its keys, or the parent of several silos' folders


def own_ring(name: str) -> Ring:
    from fedsync.cipher.keys.keyring import SILO_FILE, open_ring

    root = os.environ.get(KEYS)
    if not root:
        problem = "the run is encrypted, and this silo was given no keys"
        remedy = f"Make and accept keys with `fedsync keys`, and name their folder in {KEYS}"
        raise ConfigError("cipher.kind", problem, remedy)
    folder = Path(root) if (Path(root) / SILO_FILE).exists() else Path(root) / name
    ring = open_ring(folder)
    if ring.own.name != name:
        raise ConfigError(str(folder), f"these are the keys of {ring.own.name!r}", f"Name the folder of {name!r}")
    return ring


def many_keys() -> bool:
    from fedsync.cipher.keys.keyring import SILO_FILE

    root = os.environ.get(KEYS)
    return bool(root) and not (Path(root or "") / SILO_FILE).exists()


def has_keys() -> bool:
    """Return whether this silo has keys; a silo with keys sends no update in the clear."""
    return bool(os.environ.get(KEYS))


def emulated_rings(config: StrategyConfig, cluster: ClusterConfig, home: Path) -> tuple[Path, Path] | None:
    """Make keys for emulated silos; return the folder for `KEYS` and the server's file, or None without encryption."""
    if isinstance(config.cipher, PlainConfig):
        return None
    from fedsync.cipher.keys.authority import emulated_keys

    made = emulated_keys([silo.name for silo in cluster.silos], home / "keys", config.seed)
    return home / "keys" / "silos", made.server_file
