"""The three transports, with silos that tests play: over HTTPS, in Flower's messages, and in memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.app import Context, Message, RecordDict

from fedsync.flower import flower_messages as messages
from fedsync.flower.grid_transport import GridTransport
from fedsync.flower.hub_transport import HubTransport
from fedsync.model.transfer import Payload
from fedsync.transport.line import HubLine
from fedsync.transport.memory_transport import MemorySilo, MemoryTransport
from fedsync.transport.port import Transport
from fedsync.transport.questions import HEAD, Blob, FrameHead, SiloAnswer, SiloQuestion
from tests.flower.grid import Answer, DirectGrid, run_identity
from tests.transport.hubs import Served, served

GARBLED = SiloAnswer("", "garbled")
"""What a silo returns for an answer whose bytes are none."""


class Network(Protocol):
    """A transport, and the nodes that it reaches.

    Args:
        holds: whether it keeps questions until they are answered.
        wakes: whether an answer ends a wait.
    """

    holds: bool
    wakes: bool

    @property
    def transport(self) -> Transport: ...

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None: ...

    def leave(self, node: int) -> None: ...


class InMemory:
    holds, wakes = True, True

    def __init__(self, *, threads: bool) -> None:
        self.transport = MemoryTransport(threads=threads)
        self.leave = self.transport.leave

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None:
        def answer(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer | None:
            found = silo(asked, payload)
            return replace(found, text="\ud800") if found is GARBLED else found

        self.transport.join(node, answer, name)


class OverFlower:
    holds, wakes = False, False

    def __init__(self) -> None:
        self._grid = DirectGrid(9)
        self._grid.nodes.clear()
        self.transport = GridTransport(self._grid)
        self.leave = self._grid.nodes.discard

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None:
        self._grid.nodes.add(node)
        self._grid.starts[node] += 1
        self._grid.names[node], self._grid.answers[node] = name, flower_silo(silo)


def flower_silo(silo: MemorySilo) -> Answer:
    """A silo behind Flower's messages."""

    def answer(message: Message, context: Context) -> Message | None:
        spec, text, payload = messages.read_request(message)
        found = silo(SiloQuestion(text, payload, spec=spec), payload)
        if found is GARBLED:
            return Message(RecordDict(), reply_to=message)
        return None if found is None else messages.answer(message, found.text, found.payload, relay=found.relay)

    return answer


class OverHttps:
    holds, wakes = True, True

    def __init__(self, up: Served, folder: Path) -> None:
        self._up, self._folder, self._names = up, folder, dict[int, str]()
        nobody: Any = None  # no grid: silos come by themselves
        self.transport = HubTransport(nobody, up.hub, folder, [up.address], up.authority)

    def join(self, node: int, silo: MemorySilo, name: str = "") -> None:
        self._names[node] = f"{node} {name}".rstrip()
        line = self._up.joined(self._names[node])
        threading.Thread(target=self._serve, args=(line, silo), daemon=True).start()

    def leave(self, node: int) -> None:
        self._up.hub.strike_off(self._names[node])

    def _serve(self, line: HubLine, silo: MemorySilo) -> None:
        after = 0
        with suppress(Exception):  # struck off, or the test is over
            while True:
                if (asked := line.asked(after)) is None:
                    continue
                after, payload = asked.number, asked.payload
                if isinstance(payload, Blob):
                    line.fetch(payload, self._folder / "blob")
                    payload = np.fromfile(self._folder / "blob", np.uint8)
                found = silo(SiloQuestion(asked.text, payload, spec=asked.spec), payload)
                if found is GARBLED:
                    head = FrameHead(2, asked.number).dump()
                    line._http.post("/answers", headers={**line._known(), HEAD: head}, content=b"\xff\xfe")
                elif found is not None:
                    with suppress(Exception):  # refused
                        line.answer(replace(asked, most=2**40), found.text, found.payload, relay=found.relay)


@contextmanager
def network(kind: str, folder: Path) -> Iterator[Network]:
    if kind == "hub":
        with served(folder) as up:
            yield OverHttps(up, folder)
    elif kind == "grid":
        with run_identity():
            yield OverFlower()
    else:
        yield InMemory(threads=kind == "memory, threads")
