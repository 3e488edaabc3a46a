"""How a resident trainer is called: a Unix socket, and on it a JSON header with a payload behind it, both ways."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from fedsync.core.transfer import Payload

_WAITING = 128
"""Callers that may wait to be let in."""


def listen(path: Path) -> socket.socket:
    """Listen on a socket that only its owner can reach, in place of one that was left there; it does not block."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_WAITING)
    listener.setblocking(False)
    return listener


def call(path: Path) -> Connection | None:
    """Connect, without waiting to be let in; None if nobody listens.

    Raises:
        BlockingIOError: somebody listens, but lets nobody in, and many wait already.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        caller.setblocking(True)
        return Connection(caller.detach())


def hang_up(connection: Connection) -> None:
    """End a connection under the hands of a thread that waits for it; closing it is left to that one."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def send(connection: Connection, header: Mapping[str, Any], payload: Payload | None = None) -> None:
    """Send a header, which names the type of the payload that follows, if one does."""
    kind = None if payload is None else payload.dtype.name
    connection.send_bytes(json.dumps({**header, "payload": kind}).encode())
    if payload is not None:
        connection.send_bytes(payload.tobytes())


def receive(connection: Connection) -> tuple[dict[str, Any], Payload | None]:
    """Wait for what `send` has sent.

    Raises:
        EOFError: the other side went before it sent anything.
        OSError: it went in between.
    """
    header: dict[str, Any] = json.loads(connection.recv_bytes())
    kind = header.get("payload")
    return header, np.frombuffer(connection.recv_bytes(), dtype=kind) if kind else None
