"""The secret of operators: a file of the server's user, which the SuperLink asks every operator for.

Flower's own command line sends it, too: it finds it in the credentials of its home, as after ``flwr login``.
"""

from __future__ import annotations

import base64
import os
import secrets
from pathlib import Path

import yaml

from fedsync.common.files import write_private
from fedsync.core.errors import ConfigError

OPERATOR_FILE = "operator.secret"
"""In the server's state folder."""

CREDENTIALS_FILE = "credentials.yaml"
"""In Flower's home, which is the same folder."""


def make_secret(state: Path) -> None:
    """Make the secret where there is none.

    Raises:
        ConfigError: the folder is open to others, or nothing can be written there.
    """
    path = state / OPERATOR_FILE
    if path.exists():
        return
    fresh = state / f".{OPERATOR_FILE}.{os.getpid()}.new"
    write_private(fresh, secrets.token_hex(32).encode())
    try:
        os.link(fresh, path)  # unlike a replacement, not in the place of one that somebody else made meanwhile
    except FileExistsError:
        pass
    finally:
        fresh.unlink()


def read_secret(state: Path) -> str:
    """The secret.

    Raises:
        ConfigError: it cannot be read, which only the server's user can.
    """
    path = state / OPERATOR_FILE
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        remedy = "Run the command as the user of the server, which has to be started once"
        raise ConfigError(str(path), f"cannot be read: {getattr(error, 'strerror', error)}", remedy) from None


def write_credentials(home: Path, address: str) -> None:
    """Have Flower's command line send the secret to a SuperLink.

    Args:
        home: Flower's, which is the server's state folder.
        address: of the SuperLink, ``host:port``.

    Raises:
        ConfigError: there is no secret, or nothing can be written there.
    """
    kept = {"authn-type": "oidc", "oidc-access-token": read_secret(home), "oidc-refresh-token": "none"}
    encoded = {
        f"flower.account-auth.{address}.{key}": base64.b64encode(value.encode()).decode() for key, value in kept.items()
    }
    write_private(home / CREDENTIALS_FILE, yaml.safe_dump(encoded).encode())
