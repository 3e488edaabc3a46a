"""Connection to a resident trainer: a Unix socket that carries JSON values with payloads, in both directions.

For a payload that maps a file, only the file's name is sent, because both sides are processes of one user.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from fedsync.common import codec
from fedsync.model.chunked_arrays import file_part, map_file
from fedsync.model.transfer import Payload
from fedsync.silo.protocol import SocketReply, SocketRequest


@dataclass(frozen=True, slots=True)
class _Place:
    path: str
    offset: int
    nbytes: int


_WAITING = 128  # pending connections

_ALONE, _BESIDE, _FILE, _PASSING_FILE = b"-", b"+", b"@", b"!"  # none, bytes, a file, a file to delete


def listen(path: Path) -> socket.socket:
    """Listen on a socket that only its owner can reach; the listener does not block."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(_WAITING)
    listener.setblocking(False)
    return listener


def call(path: Path) -> Connection | None:
    """Connect without waiting to be accepted; None if nobody listens. `BlockingIOError` if the queue is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        caller.setblocking(True)
        return Connection(caller.detach())


def hang_up(connection: Connection) -> None:
    """Shut down a connection that another thread reads; this thread still has to close it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


def send(
    connection: Connection, value: SocketRequest | SocketReply, payload: Payload | None = None, *, passing: bool = False
) -> None:
    """Send a value, preceded by a byte that names the kind of its payload. If ``passing``, the receiver owns the
    payload's file, and deletes it with its map.
    """
    text = codec.dumps(value, SocketRequest | SocketReply).encode()
    part = None if payload is None else file_part(payload)
    if part is not None:
        connection.send_bytes((_PASSING_FILE if passing else _FILE) + text)
        connection.send_bytes(codec.dumps(_Place(str(part.path), part.offset, part.nbytes)).encode())
    elif payload is not None:
        connection.send_bytes(_BESIDE + text)
        connection.send_bytes(payload.data)
    else:
        connection.send_bytes(_ALONE + text)


def receive(connection: Connection) -> tuple[SocketRequest | SocketReply, Payload | None]:
    """Receive a value and its payload, uint8. `EOFError` if the other side closed first; `OSError` if the connection
    broke, or the other side is another version of FedSync.
    """
    head = connection.recv_bytes()
    try:
        value: SocketRequest | SocketReply = codec.loads(SocketRequest | SocketReply, head[1:], own=True)
        kind, payload = head[:1], None
        if kind == _BESIDE:
            payload = np.frombuffer(connection.recv_bytes(), dtype=np.uint8)
        elif kind in (_FILE, _PASSING_FILE):
            place: _Place = codec.loads(_Place, connection.recv_bytes(), own=True)
            passing = kind == _PASSING_FILE
            payload = map_file(Path(place.path), np.uint8, place.offset, place.nbytes, remove=passing)
    except (codec.DecodeError, ValueError) as error:
        raise OSError(f"another FedSync: {error}") from error
    return value, payload
