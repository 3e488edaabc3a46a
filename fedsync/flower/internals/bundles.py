"""Messages that travel with their parts, in one request, where Flower asks for each part by itself.

A small message has three parts, so that an order and its answer take some twenty requests, each of which costs the
SuperLink milliseconds. What follows is said by both sides, `fedsync.flower.internals.bundle_routes` at the SuperLink
and `fedsync.flower.internals.bundle_client` at SuperNodes and ServerApps.

| request | its frames | frames of the answer |
|---|---|---|
| ``PULL``, of a node; held until there is a message | none | Flower's answer, then parts of its messages |
| ``PULL_NOW``, of a node; not held | none | likewise |
| ``PUSH``, of a node | Flower's request, then parts | Flower's answer |
| ``APP_PULL`` | Flower's request | Flower's answer, then parts |
| ``APP_PUSH`` | Flower's request, then parts | Flower's answer |
| ``APP_WAIT``; held until a reply is there, at most so many ms | none | none |
| ``APP_WAITING`` | names of messages | those that still wait here, or whose answer does |

Parts that come with an answer are those of its messages in their order, each as Flower's answer to who asks for it, and
empty where it is to be asked for. A message that has more than `FEW` has none with it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from fedsync.flower.internals.parcel_routes import PREFIX, NoParcel, Receive, Scope

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import ObjectTree

PULL, PULL_NOW, PUSH = (f"{PREFIX}{name}" for name in ("pull", "pull-now", "push"))
HEARTBEAT = "/v1/fleet/send-node-heartbeat"
"""Flower's own route, which is answered without its middlewares."""

NODE_PATHS = (PULL, PULL_NOW, PUSH, HEARTBEAT)
APP_PREFIX = "/v1/runtime/fedsync/"
APP_PULL, APP_PUSH, APP_WAIT, APP_WAITING = (f"{APP_PREFIX}{name}" for name in ("pull", "push", "wait/", "waiting"))

FEW = 8
"""Parts of a message that may come with it."""

MOST_BYTES, MOST_APP_BYTES = 2**20, 2**23
"""Bytes of a bundle from or for a node, and for the server's own app, which has messages of many nodes in one."""

MOST_FRAMES = 2**14
"""In one bundle."""

_LENGTH = struct.Struct(">I")


class Bundle:
    """Frames of bytes, each behind its length; has the methods by which Flower sends and reads a message.

    Args:
        frames: of it.
    """

    def __init__(self, frames: Sequence[bytes] = ()) -> None:
        self.frames = list(frames)

    def SerializeToString(self, **options: bool) -> bytes:
        return b"".join(part for frame in self.frames for part in (_LENGTH.pack(len(frame)), frame))

    def ParseFromString(self, data: bytes) -> None:
        """Take frames from bytes.

        Raises:
            ValueError: they are none.
        """
        self.frames, at = [], 0
        while at < len(data):
            if at + _LENGTH.size > len(data) or len(self.frames) >= MOST_FRAMES:
                raise ValueError("no bundle")
            (size,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size
            if size > len(data) - at:
                raise ValueError("no bundle")
            self.frames.append(data[at : at + size])
            at += size


def parts_of(tree: ObjectTree) -> list[str]:
    """Names of a message's parts, itself among them, that may come with it; none where there are too many."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    names = [part.object_id for part in islice(iterate_object_tree(tree), FEW + 1)]
    return names if len(names) <= FEW else []


async def body_of(scope: Scope, receive: Receive, most: int) -> bytes:
    """What comes with a request."""
    data, more = bytearray(), True
    if int(dict(scope["headers"]).get(b"content-length", b"0")) > most:
        raise NoParcel(413, "too long a bundle")
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise NoParcel(400, "it ends in the middle")
        data += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(data)


def frames_of(data: bytes) -> list[bytes]:
    """The frames of a request, at least one."""
    bundle = Bundle()
    try:
        bundle.ParseFromString(data)
    except ValueError:
        raise NoParcel(400, "no bundle") from None
    if not bundle.frames:
        raise NoParcel(400, "an empty bundle")
    return bundle.frames
