"""How a resident trainer is called: a Unix socket, and on it a value as JSON with a payload behind it, both ways."""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from fedsync.core import codec
from fedsync.core.transfer import Payload
from fedsync.trainer.protocol import SocketReply, SocketRequest

_WAITING = 128
"""Callers that may wait to be let in."""

_ALONE, _BESIDE = b"-", b"+"


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


def send(connection: Connection, value: SocketRequest | SocketReply, payload: Payload | None = None) -> None:
    """Send a value; the first byte says whether a payload follows."""
    text = codec.dumps(value, SocketRequest | SocketReply).encode()
    connection.send_bytes((_ALONE if payload is None else _BESIDE) + text)
    if payload is not None:
        connection.send_bytes(payload.data)


def receive(connection: Connection) -> tuple[SocketRequest | SocketReply, Payload | None]:
    """Wait for what `send` has sent; a payload is uint8.

    Raises:
        EOFError: the other side went before it sent anything.
        OSError: it went in between, or is another FedSync's.
    """
    head = connection.recv_bytes()
    try:
        value: SocketRequest | SocketReply = codec.loads(SocketRequest | SocketReply, head[1:], own=True)
    except codec.DecodeError as error:
        raise OSError(f"another FedSync: {error}") from error
    payload = np.frombuffer(connection.recv_bytes(), dtype=np.uint8) if head[:1] == _BESIDE else None
    return value, payload
