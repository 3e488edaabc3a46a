"""How a resident trainer is called: a Unix socket, and on it a value as JSON with a payload behind it, both ways.

A payload that is a map of a file goes as the file's name: both sides are processes of one user.
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
    """Bytes of a file."""

    path: str
    offset: int
    nbytes: int


_WAITING = 128
"""Callers that may wait to be let in."""

_ALONE, _BESIDE, _FILE, _PASSING_FILE = b"-", b"+", b"@", b"!"
"""What follows a value: nothing, a payload, or the name of the file that has it, which stays or goes with its map."""


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


def send(
    connection: Connection,
    value: SocketRequest | SocketReply,
    payload: Payload | None = None,
    *,
    passing: bool = False,
) -> None:
    """Send a value; the first byte says what follows it.

    Args:
        connection: to the other side.
        value: to be sent.
        payload: beside it.
        passing: the file that the payload maps, if it does, is the receiver's, and goes with its map there.
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
    """Wait for what `send` has sent; a payload is uint8.

    Raises:
        EOFError: the other side went before it sent anything.
        OSError: it went in between, or is another FedSync's.
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
