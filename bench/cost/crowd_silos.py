"""Many silos in one process: what `bench/cost/crowd.py` asks a real server with.

Each has its own node key, proves itself with each request as a SuperNode does, holds a request at the gate, and keeps
a line as a SuperNode does. Where that does not show that it lives, a heartbeat does, on a line of its own, whose TLS
is agreed anew. What a silo answers is made by the session of a real one (`fedsync.trainer.session`), with the model
that it keeps and its keys; only the training is none: an update is noise of the size of a small step. What is left
for it at the gate it fetches there, on a line of its own. Under encryption silos share what each of them would
compute alike, and the server cannot tell: `bench/cost/crowd_shared.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import random
import ssl
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
)
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest, GetRunResponse
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

from bench.cost.crowd_answers import Silo
from bench.cost.crowd_lines import HttpLine
from bench.cost.crowd_shared import Kept, share_sealers
from fedsync.common.processes import exit_with_parent, raise_file_limit
from fedsync.core.transfer import Payload
from fedsync.flower import messages
from fedsync.flower.internals.bundle_client import HEARD_S
from fedsync.flower.internals.bundles import PULL, PUSH, Bundle, parts_of
from fedsync.flower.internals.node_proof import PROOF_S
from fedsync.flower.internals.parcel_routes import PREFIX
from fedsync.flower.internals.polling import FIRST_S
from fedsync.flower.parcels import Parcel

BEAT_S = (17.5, 22.5)
"""Pause between two heartbeats of a SuperNode [s]."""

READY = "ready"
FLEET = "/v1/fleet/"


class Crowd:
    """All silos of this process.

    Args:
        folder: has node keys, keys for encryption and the authority's certificate.
        address: of the server.
        names: of the silos.
        work_s: how long an order takes beside what its answer takes to make.
    """

    def __init__(self, folder: Path, address: tuple[str, int], names: list[str], work_s: float) -> None:
        share_sealers()
        self._folder, self._address, self._work_s = folder, address, work_s
        self._silos = [Silo(name, index, folder) for index, name in enumerate(names)]
        self._trust = ssl.create_default_context(cafile=str(folder / "certs" / "ca.crt"))
        self._worker = ThreadPoolExecutor(1)
        self._parcels = Kept[Payload](16)
        versions = RuntimeVersionMetadata.from_local_component("SuperNode").as_metadata()
        self._head = f"content-type: {PROTOBUF_MEDIA_TYPE}\r\naccept: {PROTOBUF_MEDIA_TYPE}\r\n"
        self._head += "".join(f"{name}: {value}\r\n" for name, value in versions)
        self._starting = asyncio.Semaphore(16)
        self._heard: dict[int, float] = {}
        self.there = 0
        """Silos that are activated."""

    async def run(self) -> None:
        """Serve for ever."""
        await asyncio.gather(self._tell(), *(self._serve(silo) for silo in self._silos))

    async def _tell(self) -> None:
        while self.there < len(self._silos):
            await asyncio.sleep(0.5)
        (self._folder / READY).touch()

    async def _serve(self, silo: Silo) -> None:
        key: Any = load_ssh_private_key((self._folder / "nodes" / f"{silo.name}.node").read_bytes(), None)
        public = public_key_to_bytes(key.public_key())

        signed: tuple[float, str] = -inf, ""

        def head() -> str:
            nonlocal signed
            if time.monotonic() - signed[0] < PROOF_S:
                return signed[1]
            stamp = now().isoformat()
            proof = base64.b64encode(sign_message(key, stamp.encode("ascii"))).decode()
            shown = base64.b64encode(public).decode()
            text = f"{self._head}flwr-public-key: {shown}\r\nflwr-timestamp: {stamp}\r\nflwr-signature: {proof}\r\n"
            signed = time.monotonic(), text
            return text

        line = HttpLine(self._address, self._trust)
        async with self._starting:
            asked = ActivateNodeRequest(public_key=public, heartbeat_interval=30)
            told = await self._again(line, f"{FLEET}activate-node", head, asked.SerializeToString())
        number = ActivateNodeResponse.FromString(told).node_id
        self.there += 1
        beating = asyncio.create_task(self._beat(number, head))
        runs: set[int] = set()
        while not beating.done():
            frames = Bundle()
            frames.ParseFromString(await self._again(line, PULL, head, b""))
            self._heard[number] = time.monotonic()
            if not frames.frames:
                continue
            found = PullMessagesResponse.FromString(frames.frames[0])
            message, tree = message_from_proto(found.messages_list[0]), found.message_object_trees[0]
            run = message.metadata.run_id
            if run not in runs:
                runs.add(run)
                await self._know(line, head, number, run)
            parts = await self._parts(line, head, number, run, tree, frames.frames[1:])
            whole: Any = inflate_object_from_contents(message.metadata.message_id, parts)
            whole.metadata.__dict__["_message_id"] = message.metadata.message_id
            await self._answer(silo, whole, number, line, head)
        await beating

    async def _know(self, line: HttpLine, head: Any, number: int, run: int) -> None:
        """Ask for a run and its app, as a SuperNode does once."""
        node = Node(node_id=number)
        ask = GetRunRequest(node=node, run_id=run).SerializeToString()
        told = GetRunResponse.FromString(await self._again(line, f"{FLEET}get-run", head, ask)).run
        ask = GetFabRequest(node=node, run_id=run, hash_str=told.fab_hash).SerializeToString()
        await self._again(line, f"{FLEET}get-fab", head, ask)

    async def _answer(self, silo: Silo, whole: Message, number: int, line: HttpLine, head: Any) -> None:
        """Answer a message; the next is asked for when this returns."""
        if self._work_s:
            await asyncio.sleep(self._work_s * random.uniform(0.9, 1.1))
        loop, frames = asyncio.get_running_loop(), Bundle()
        try:
            payload = await self._payload(whole, head)
        except FileNotFoundError:  # it was taken back: nobody waits for this answer any more
            return
        body = await loop.run_in_executor(self._worker, _answered, silo, whole, payload, number)
        frames.ParseFromString(await self._again(line, PUSH, head, body))
        self._heard[number] = time.monotonic()
        left = PushMessagesResponse.FromString(frames.frames[0]).objects_to_push
        if left:
            raise SystemExit(f"the server did not take parts: {left}")

    async def _payload(self, whole: Message, head: Any) -> Payload | None:
        """The bytes beside a message, or those that it says are at the gate, as `ParcelClient` fetches them."""
        _, _, payload = messages.read_request(whole)
        if not isinstance(payload, Parcel):
            return payload
        line = HttpLine(self._address, self._trust)
        path = f"{PREFIX}{payload.session}/parcels/{payload.digest}"
        try:
            came = await self._persist(lambda: line.get(path, head()))
        finally:
            line.close()
        if hashlib.sha256(came).hexdigest() != payload.digest:
            raise SystemExit(f"the server sent another parcel than {payload.digest}")
        # Thousands wait for their turn to be answered: those of one name are one in memory.
        return self._parcels.find(payload.digest, lambda: np.frombuffer(came, np.uint8))

    async def _parts(
        self, line: HttpLine, head: Any, number: int, run: int, tree: Any, frames: list[bytes]
    ) -> dict[str, bytes]:
        """Parts of a message, by name: those that came with it, and others once the server has them."""
        node, parts, asked = Node(node_id=number), dict[str, bytes](), False
        came = (PullObjectResponse.FromString(frame) for frame in frames)
        for name, part in zip_longest(parts_of(tree), came):
            while part is None or not part.object_available:
                asked = True
                ask = PullObjectRequest(node=node, run_id=run, object_id=name).SerializeToString()
                part = PullObjectResponse.FromString(await self._again(line, f"{FLEET}pull-object", head, ask))
                if not part.object_available:
                    await asyncio.sleep(FIRST_S)
            parts[name] = part.object_content
        if asked:
            told = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=tree.object_id)
            await self._again(line, f"{FLEET}confirm-message-received", head, told.SerializeToString())
        return parts

    async def _beat(self, number: int, head: Any) -> None:
        body = SendNodeHeartbeatRequest(node=Node(node_id=number), heartbeat_interval=30).SerializeToString()
        while True:
            await asyncio.sleep(random.uniform(*BEAT_S))
            if time.monotonic() - self._heard.get(number, -inf) < HEARD_S:
                continue
            line = HttpLine(self._address, self._trust)
            await self._again(line, f"{FLEET}send-node-heartbeat", head, body)
            line.close()

    async def _again(self, line: HttpLine, path: str, head: Any, body: bytes) -> bytes:
        return await self._persist(lambda: line.post(path, head(), body))

    async def _persist(self, ask: Callable[[], Awaitable[bytes]]) -> bytes:
        pause_s = 0.2
        while True:
            try:
                return await ask()
            except FileNotFoundError:
                raise
            except OSError as error:
                if isinstance(error, PermissionError):
                    print(error, flush=True)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, 10.0)


def _answered(silo: Silo, message: Any, payload: Payload | None, number: int) -> bytes:
    """A bundle with the answer to a message."""
    reply = silo.answer(message, payload)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    node, tree = Node(node_id=number), get_object_tree(reply)
    parts = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
    asked = PushMessagesRequest(
        node=node,
        messages_list=[message_to_proto(remove_content_from_message(reply))],
        message_object_trees=[tree],
        clientapp_runtime_list=[0.0],
    )
    run = reply.metadata.run_id
    pushed = [
        PushObjectRequest(node=node, run_id=run, object_id=name, object_content=parts[name]) for name in parts_of(tree)
    ]
    return Bundle([asked.SerializeToString(), *(each.SerializeToString() for each in pushed)]).SerializeToString()


def main() -> None:
    """Serve as the arguments of this process say, until its parent ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--silos", type=int, required=True)
    parser.add_argument("--work", type=float, default=0.0)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    exit_with_parent(options.parent)
    raise_file_limit()
    names = [f"silo-{index}" for index in range(options.silos)]
    address = ("127.0.0.1", options.port)

    async def run() -> None:
        await Crowd(options.folder, address, names, options.work).run()

    asyncio.run(run())
