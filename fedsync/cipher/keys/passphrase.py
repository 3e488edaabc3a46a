"""Optional passphrase on key files at rest: scrypt makes the key, AES-256-GCM seals the file.

A folder's key files are all sealed or all plain. The passphrase is looked up here in this order: the command's
argument, the environment variable that the owner named, the system's keyring, a prompt at the terminal.

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

NAMED_BY = "FEDSYNC_PASSPHRASE_ENV"  # names the variable with the passphrase; without it, `DEFAULT`

DEFAULT = "FEDSYNC_PASSPHRASE"
SERVICE = "fedsync"  # service name in the system's keyring; the user name there is the folder of the keys

GIVEN: ContextVar[str | None] = ContextVar("passphrase", default=None)
_MAGIC = b"FSKEYFILE1\0"
_COST = 16  # binary logarithm of scrypt's cost: 64 MiB, and a fraction of a second per file

_MAX_COST = 20
_SALT_BYTES = 32
_NONCE = bytes(12)
_KEYRING_S = 10.0


def is_sealed(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def seal_file(data: bytes, passphrase: str) -> bytes:
    """Seal a key file: magic, cost [1], salt [32], ciphertext and its tag."""
    head = _MAGIC + bytes([_COST]) + secrets.token_bytes(_SALT_BYTES)
    # The key is derived from a fresh salt and used once, so the nonce can be constant.
    return head + AESGCM(_key(passphrase, head)).encrypt(_NONCE, data, head)


def open_file(data: bytes, passphrase: str, path: Path) -> bytes:
    end = len(_MAGIC) + 1 + _SALT_BYTES
    head = data[:end]
    try:
        if len(head) == end and head[len(_MAGIC)] <= _MAX_COST:
            return AESGCM(_key(passphrase, head)).decrypt(_NONCE, data[end:], head)
    except InvalidTag:
        pass
    raise ConfigError(str(path), "the passphrase is wrong, or the file is damaged", "Try again, or use a backup")


def find_passphrase(folder: Path) -> str:
    name = os.environ.get(NAMED_BY) or DEFAULT
    found = GIVEN.get() or os.environ.get(name) or _from_keyring(str(folder.resolve())) or _typed(folder)
    if not found:
        remedy = (
            f"Put the passphrase into the environment variable {name} (passphrase_env in silo.yaml names another), or "
            f"into the system's keyring: keyring set {SERVICE} {folder.resolve()}"
        )
        raise ConfigError(str(folder), "the keys are encrypted with a passphrase, and none was given", remedy)
    return found


def _key(passphrase: str, head: bytes) -> bytes:
    cost, salt = head[len(_MAGIC)], head[len(_MAGIC) + 1 :]
    return Scrypt(salt=salt, length=32, n=1 << max(cost, 1), r=8, p=1).derive(passphrase.encode())


def _from_keyring(user: str) -> str | None:
    """Password from the package ``keyring``, if installed; gives up after `_KEYRING_S` if a person must act."""
    found: list[str | None] = []

    def ask() -> None:
        try:
            found.append(import_module("keyring").get_password(SERVICE, user))
        except Exception:  # no package or no keyring, or the keyring is locked
            found.append(None)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_KEYRING_S)
    return found[0] if found else None


@cache
def _typed(folder: Path) -> str | None:
    return getpass(f"Passphrase of {folder}: ") if sys.stdin is not None and sys.stdin.isatty() else None
