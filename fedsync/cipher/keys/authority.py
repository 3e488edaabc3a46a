"""Administrator's offline key management: makes the silos' group secret, pins silos' keys, and issues key bundles.

A change of members begins a new epoch. For emulated silos, one process makes all keys of administrator and silos.

    administrator/administrator.key     signing key, group secret, pinned silos
                  issued/epoch-2/       a bundle for each silo, and server.json for the server

The silos' side is `fedsync.cipher.keys.keyring`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedsync.cipher.keys.key_files import Epoch, Name, Record, Secret, SecretContext, read_record, write_record
from fedsync.cipher.keys.keyring import GROUP_FILE, Ring, accept, new_silo, open_ring
from fedsync.cipher.keys.keywrap import ServerKeys, announce, read_announcement, read_server_file, server_file, wrap
from fedsync.cipher.keys.material import KEY_BYTES, GroupKey, PublicKeys, SiloKeys, hkdf, verification_key
from fedsync.common.errors import ConfigError
from fedsync.common.files import private_folder, write_atomically, write_private

ADMINISTRATOR_FILE = "administrator.key"
SERVER_FILE = "server.json"

ContextMaker = Callable[[], bytes]


def bfv_context() -> bytes:
    # Imported here: only the administrator makes contexts, and the library loads slowly.
    from fedsync.cipher.suites.bfv import new_context

    return new_context()


class _AuthorityRecord(Record):
    """Content of the administrator's file. ``issued``: whether bundles of this epoch were given out. ``revoked``: names
    of removed silos, by public key (hex).
    """

    kind: Literal["fedsync administrator 1"] = "fedsync administrator 1"
    signing: Secret
    epoch: Epoch
    key: Secret
    context: SecretContext
    members: dict[Name, PublicKeys]
    revoked: dict[str, Name]
    issued: bool


@dataclass(frozen=True, slots=True)
class Issue:
    """Files that the administrator hands out: a bundle for each silo, and the server's file."""

    epoch: int
    bundles: Mapping[str, Path]
    server: Path


@dataclass(frozen=True, slots=True)
class KeyAuthority:
    """Content of the administrator's folder, without its secrets; silos pin ``public``, an Ed25519 key of 32 bytes.
    Silos in ``revoked`` may be members again with fresh keys. ``issued``: whether bundles of this epoch were written.
    """

    public: bytes
    epoch: int
    fingerprint: bytes
    members: Mapping[str, PublicKeys]
    revoked: tuple[str, ...]
    issued: bool


def new_authority(folder: Path, signing: bytes | None = None, new_context: ContextMaker = bfv_context) -> bytes:
    """Make a signing key (or take ``signing``, 32 bytes) and the first epoch's group secret; return the key to pin. Do
    this offline. Existing keys stay, and their public key is returned. `ConfigError` if the folder is unsuitable.
    """
    private_folder(folder)
    path = folder / ADMINISTRATOR_FILE
    if path.exists():
        return open_authority(folder).public
    signing, key = signing or secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)
    record = _AuthorityRecord(
        signing=signing, epoch=1, key=key, context=new_context(), members={}, revoked={}, issued=False
    )
    write_record(path, record)
    return verification_key(record.signing)


def issue(folder: Path, lines: Iterable[tuple[str, bytes]] = (), new_context: ContextMaker = bfv_context) -> Issue:
    """Pin silos, and write a bundle for each pinned silo and the server's file.

    If bundles of this epoch were given out and a silo is new, the next epoch begins: each epoch has one list of
    members. ``lines`` are (name in error messages, output of `announce`). `ConfigError` if the administrator's file is
    missing or damaged, no silo is pinned, or a line is damaged or contradicts a pinned key.
    """
    record = _read(folder)
    members = dict(record.members)
    for source, line in lines:
        name, public = read_announcement(line, source)
        _pin(members, record.revoked, name, public, source)
    if not members:
        raise ConfigError(str(folder), "no silo is pinned", "Give the silos' lines: --silo FILE")
    if record.issued and members.keys() != record.members.keys():
        record = _next_epoch(record, new_context)
    return _give_out(folder, record.model_copy(update={"members": members, "issued": True}))


def rotate(folder: Path, without: Iterable[str] = (), new_context: ContextMaker = bfv_context) -> Issue:
    """Begin the next epoch with a fresh group secret, and write its bundles. Silos in ``without`` get no bundle, and
    their keys are never pinned again. `ConfigError` if the administrator's file is missing or damaged, a name is not
    pinned, or no silo is left.
    """
    record = _read(folder)
    members, revoked = dict(record.members), dict(record.revoked)
    for name in without:
        if name not in members:
            pinned = ", ".join(members) or "none"
            raise ConfigError(f"--without {name}", "no such silo is pinned", f"Pinned are: {pinned}")
        dropped = members.pop(name)
        revoked |= {dropped.signing.hex(): name, dropped.exchange.hex(): name}
    if not members:
        raise ConfigError(str(folder), "no silo would be left", "Pin one first: `fedsync keys issue --silo FILE`")
    update = {"members": members, "revoked": revoked, "issued": True}
    return _give_out(folder, _next_epoch(record, new_context).model_copy(update=update))


def open_authority(folder: Path) -> KeyAuthority:
    """Read the public part of the folder; `ConfigError` if the file is missing, damaged or open to others."""
    record = _read(folder)
    group = _group(record)
    revoked = tuple(dict.fromkeys(record.revoked.values()))
    return KeyAuthority(group.administrator, group.epoch, group.fingerprint, group.members, revoked, record.issued)


def issued_folder(folder: Path, epoch: int) -> Path:
    return folder / "issued" / f"epoch-{epoch}"


def _pin(
    members: dict[str, PublicKeys], revoked: Mapping[str, str], name: str, public: PublicKeys, source: str
) -> None:
    known = members.get(name)
    if known is not None:
        if known != public:
            remedy = f"If the silo has made new keys, drop the old ones first: `fedsync keys rotate --without {name}`"
            raise ConfigError(source, f"{name!r} is pinned with other keys", remedy)
        return
    if revoked.keys() & {public.signing.hex(), public.exchange.hex()}:
        remedy = "The silo makes new keys in an empty folder: `fedsync keys silo`"
        raise ConfigError(source, f"the keys of {name!r} were revoked", remedy)
    for other, member in members.items():
        if public.signing == member.signing or public.exchange == member.exchange:
            remedy = "Each silo makes its own keys: `fedsync keys silo`"
            raise ConfigError(source, f"{name!r} has a key that is already pinned for {other!r}", remedy)
    members[name] = public


def _next_epoch(record: _AuthorityRecord, new_context: ContextMaker) -> _AuthorityRecord:
    key, context = secrets.token_bytes(KEY_BYTES), new_context()
    return record.model_copy(update={"epoch": record.epoch + 1, "key": key, "context": context})


def _give_out(folder: Path, record: _AuthorityRecord) -> Issue:
    # Record before bundles: after a crash between the two, the same epoch is wrapped again.
    write_record(folder / ADMINISTRATOR_FILE, record)
    group = _group(record)
    private_folder(folder / "issued")
    out = private_folder(issued_folder(folder, group.epoch))
    bundles = {name: out / f"{name}.bundle" for name in group.members}
    for name, path in bundles.items():
        write_private(path, wrap(group, name, record.signing))
    write_atomically(out / SERVER_FILE, server_file(ServerKeys.of(group), record.signing))
    return Issue(group.epoch, bundles, out / SERVER_FILE)


def _group(record: _AuthorityRecord) -> GroupKey:
    return GroupKey(record.epoch, record.context, record.key, record.members, verification_key(record.signing))


def _read(folder: Path) -> _AuthorityRecord:
    return read_record(folder / ADMINISTRATOR_FILE, _AuthorityRecord, "Make it with `fedsync keys init`")


@dataclass(frozen=True, slots=True)
class EmulatedKeys:
    """Keys of emulated silos: the server's part, and folders for `fedsync.cipher.keys.keyring.open_ring`."""

    server: ServerKeys
    server_file: Path
    silos: Mapping[str, Path]


def emulated_keys(
    names: Sequence[str], folder: Path, seed: int | None = None, new_context: ContextMaker = bfv_context
) -> EmulatedKeys:
    """Do all steps of ``fedsync keys`` for emulated silos on this machine, or reuse the folder's keys.

    All keys lie in one folder of mode 0700, so nobody is protected from anybody: use this for experiments only.
    ``seed`` makes the signing and exchange pairs reproducible; the group secret is always fresh, because the library
    draws its part. `ConfigError` if the folder is open to others, or has the keys of other silos.
    """
    private_folder(folder)
    home = folder / "administrator"
    silos = {name: folder / "silos" / name for name in names}
    new_authority(home, _seeded(seed, "administrator", "signing"), new_context)
    authority = open_authority(home)
    if authority.members and authority.members.keys() != silos.keys():
        found = ", ".join(authority.members)
        raise ConfigError(str(folder), f"these are the keys of other silos: {found}", "Use a folder for each run")
    out = issued_folder(home, authority.epoch)
    server_path = out / SERVER_FILE
    if not server_path.exists():  # it is written last, so a process may have been killed before it
        private_folder(folder / "silos")
        own = [new_silo(path, name, _pairs(seed, name)) for name, path in silos.items()]
        issue(home, [(keys.name, announce(keys).encode()) for keys in own], new_context)
        authority = open_authority(home)
    for name, path in silos.items():
        if not (path / GROUP_FILE).exists() or open_ring(path).group.epoch < authority.epoch:
            accept(path, (out / f"{name}.bundle").read_bytes(), authority.public)
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
