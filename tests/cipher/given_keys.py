"""An administrator and silos for tests; the context is any bytes, so nothing is slow."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from fedsync.cipher.keys.authority import issue, new_authority
from fedsync.cipher.keys.keyring import new_silo
from fedsync.cipher.keys.keywrap import announce
from fedsync.cipher.keys.material import GroupKey, PublicKeys, SiloKeys

ADMINISTRATOR = bytes(range(32))


def some_context() -> bytes:
    return secrets.token_bytes(500)


def group_of(*members: SiloKeys, epoch: int = 1, key: bytes = b"k" * 32, context: bytes = b"context") -> GroupKey:
    public: dict[str, PublicKeys] = {member.name: member.public for member in members}
    return GroupKey(epoch, context, key, public, ADMINISTRATOR)


@dataclass(frozen=True)
class Place:
    """Folders of an administrator and silos."""

    root: Path
    public: bytes

    @classmethod
    def make(cls, root: Path) -> Place:
        return cls(root, new_authority(root / "admin", new_context=some_context))

    @property
    def admin(self) -> Path:
        return self.root / "admin"

    def silo(self, name: str) -> Path:
        return self.root / name

    def line(self, name: str) -> tuple[str, bytes]:
        return name, announce(new_silo(self.silo(name), name)).encode()

    def issue(self, *names: str) -> dict[str, bytes]:
        """Bundles of all pinned silos."""
        issued = issue(self.admin, [self.line(name) for name in names], some_context)
        return {name: path.read_bytes() for name, path in issued.bundles.items()}
