"""Key files at rest under a passphrase, if their owner wants: scrypt makes the key, AES-256-GCM seals the file.

A folder's key files are all sealed or all plain. Who needs the passphrase asks for it here, in this order: what a
command was given, the environment variable that the owner named, the system's keyring, whoever sits at the terminal.

Source: scrypt, RFC 7914; AES-GCM, NIST SP 800-38D.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from contextvars import ContextVar
from functools import cache
from getpass import getpass
from importlib import import_module
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from fedsync.common.errors import ConfigError

NAMED_BY = "FEDSYNC_PASSPHRASE_ENV"
"""Environment variable with the name of the one that has the passphrase; without it, `DEFAULT`."""

DEFAULT = "FEDSYNC_PASSPHRASE"
SERVICE = "fedsync"
"""What the system's keyring calls the passphrase; the user name there is the folder of the keys."""

GIVEN: ContextVar[str | None] = ContextVar("passphrase", default=None)
"""The passphrase that a command was given, for folders old and new."""

_MAGIC = b"FSKEYFILE1\0"
_COST = 16
"""Binary logarithm of scrypt's cost: 64 MiB, and a fraction of a second a file."""

_MAX_COST = 20
_SALT_BYTES = 32
_NONCE = bytes(12)
_KEYRING_S = 10.0


def is_sealed(data: bytes) -> bool:
    """Whether these are the bytes of a key file under a passphrase."""
    return data.startswith(_MAGIC)


def seal_file(data: bytes, passphrase: str) -> bytes:
    """The bytes of a key file under a passphrase: magic, cost [1], salt [32], ciphertext and its tag."""
    head = _MAGIC + bytes([_COST]) + secrets.token_bytes(_SALT_BYTES)
    # The key is made of a fresh salt and used once, so the nonce can be constant.
    return head + AESGCM(_key(passphrase, head)).encrypt(_NONCE, data, head)


def open_file(data: bytes, passphrase: str, path: Path) -> bytes:
    """The inverse of `seal_file`.

    Raises:
        ConfigError: the passphrase is another, or the file is damaged.
    """
    end = len(_MAGIC) + 1 + _SALT_BYTES
    head = data[:end]
    try:
        if len(head) == end and head[len(_MAGIC)] <= _MAX_COST:
            return AESGCM(_key(passphrase, head)).decrypt(_NONCE, data[end:], head)
    except InvalidTag:
        pass
    raise ConfigError(str(path), "the passphrase is wrong, or the file is damaged", "Try again, or use a backup")


def find_passphrase(folder: Path) -> str:
    """The passphrase of a folder of keys.

    Raises:
        ConfigError: nobody knows it.
    """
    name = os.environ.get(NAMED_BY) or DEFAULT
    found = GIVEN.get() or os.environ.get(name) or _from_keyring(str(folder.resolve())) or _typed(folder)
    if not found:
        remedy = (
            f"Put the passphrase into the environment variable {name} (passphrase_env in silo.yaml names another), or "
            f"into the system's keyring: keyring set {SERVICE} {folder.resolve()}"
        )
        raise ConfigError(str(folder), "the keys are under a passphrase, and there is none", remedy)
    return found


def _key(passphrase: str, head: bytes) -> bytes:
    cost, salt = head[len(_MAGIC)], head[len(_MAGIC) + 1 :]
    return Scrypt(salt=salt, length=32, n=1 << max(cost, 1), r=8, p=1).derive(passphrase.encode())


def _from_keyring(user: str) -> str | None:
    """What the package ``keyring`` finds, if it is installed; one that waits for somebody is not waited for."""
    found: list[str | None] = []

    def ask() -> None:
        try:
            found.append(import_module("keyring").get_password(SERVICE, user))
        except Exception:  # no package, no keyring, or it is locked
            found.append(None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_KEYRING_S)
    return found[0] if found else None


@cache
def _typed(folder: Path) -> str | None:
    return getpass(f"Passphrase of {folder}: ") if sys.stdin is not None and sys.stdin.isatty() else None
