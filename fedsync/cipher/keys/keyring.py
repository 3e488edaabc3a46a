"""Key files of a silo, and the check and storage of the administrator's key bundle.

    silo/    silo.key     the silo's own key pairs
             group.key    the epoch's group key, once accepted

The administrator's side is `fedsync.cipher.keys.authority`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedsync.cipher.keys.key_files import Epoch, Key, Name, Record, Secret, SecretContext, read_record, write_record
from fedsync.cipher.keys.keywrap import unwrap
from fedsync.cipher.keys.material import GroupKey, PublicKeys, SiloKeys
from fedsync.common.errors import ConfigError
from fedsync.common.files import private_folder
from fedsync.common.names import check_silo_name

SILO_FILE = "silo.key"
GROUP_FILE = "group.key"


@dataclass(frozen=True, slots=True)
class Ring:
    """Keys of one silo: its own pairs, the epoch's group key, and the folder of the files (None: in memory)."""

    own: SiloKeys
    group: GroupKey
    folder: Path | None = None


class _SiloRecord(Record):
    kind: Literal["fedsync silo 1"] = "fedsync silo 1"
    name: Name
    exchange: Secret
    signing: Secret


class _GroupRecord(Record):
    kind: Literal["fedsync group 1"] = "fedsync group 1"
    epoch: Epoch
    key: Secret
    context: SecretContext
    members: dict[Name, PublicKeys]
    administrator: Key


def new_silo(folder: Path, name: str, keys: SiloKeys | None = None) -> SiloKeys:
    """Return the silo's own pairs in the folder, or write ``keys`` or fresh pairs. `ConfigError` if the folder belongs
    to another silo, or is unsuitable.
    """
    check_silo_name(name)
    private_folder(folder)
    path = folder / SILO_FILE
    if path.exists():
        held = open_silo(folder)
        if held.name != name:
            raise ConfigError(str(path), f"these are the keys of {held.name!r}", "Use a folder for each silo")
        return held
    keys = keys or SiloKeys.generate(name)
    write_record(path, _SiloRecord(name=name, exchange=keys.exchange, signing=keys.signing))
    return keys


def open_silo(folder: Path) -> SiloKeys:
    """Read a silo's own pairs; `ConfigError` if the file is missing, damaged or open to others."""
    record = read_record(folder / SILO_FILE, _SiloRecord, "Make the keys with `fedsync keys silo NAME`")
    return SiloKeys(record.name, record.exchange, record.signing)


def open_group(folder: Path) -> GroupKey:
    """Read the accepted group key; `ConfigError` if the file is missing, damaged or open to others."""
    remedy = "Accept the administrator's bundle: `fedsync keys accept`"
    record = read_record(folder / GROUP_FILE, _GroupRecord, remedy)
    return GroupKey(record.epoch, record.context, record.key, record.members, record.administrator)


def open_ring(folder: Path) -> Ring:
    """Read all keys of a silo; `ConfigError` as `open_silo`, or if the group does not have this silo."""
    own, group = open_silo(folder), open_group(folder)
    if group.members.get(own.name) != own.public:
        problem = f"the group key was not issued to these keys of {own.name!r}"
        raise ConfigError(str(folder / GROUP_FILE), problem, "Have the administrator issue a bundle for them")
    return Ring(own, group, folder)


def accept(folder: Path, bundle: bytes, administrator: bytes | None = None) -> GroupKey:
    """Check and open a bundle at its silo, and store the group key.

    ``administrator`` is the Ed25519 public key, obtained from the administrator in person. It is pinned with the first
    bundle and may be None from then on. `ConfigError` if the silo's files or the public key are missing, or differ from
    the pinned ones; `ProtocolError` if the bundle is refused.
    """
    own = open_silo(folder)
    held = open_group(folder) if (folder / GROUP_FILE).exists() else None
    if held is not None:
        if administrator not in {None, held.administrator}:
            remedy = f"To follow another administrator, remove {folder / GROUP_FILE}"
            raise ConfigError("--admin", f"this silo has pinned {held.administrator.hex()}", remedy)
        administrator = held.administrator
    if administrator is None:
        raise ConfigError("--admin", "no administrator is pinned yet", "Give the public key that `keys init` printed")
    group = unwrap(bundle, own, administrator, held.epoch if held else 0)
    named = {name: getattr(group, name) for name in _GroupRecord.model_fields if name != "kind"}
    write_record(folder / GROUP_FILE, _GroupRecord(**named))
    return group
