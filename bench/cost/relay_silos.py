"""Relays and their silos in one process: what `bench/cost/relay.py` asks a real server with.

The nodes that come to the server are relays, with all that a node does (`bench/cost/crowd_silos.py`). Each has the
engine of a real one (`fedsync.trainer.relay`); its silos answer in this process, by the session of a real silo. So what
lies between server and relays is real, and what lies behind relays costs this process alone.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from flwr.app import Message

from bench.cost.crowd_answers import Silo
from bench.cost.crowd_lines import HttpLine
from bench.cost.crowd_silos import Crowd
from fedsync.cipher.keys.keywrap import read_server_file
from fedsync.common.processes import exit_with_parent, raise_file_limit
from fedsync.core.transfer import Payload
from fedsync.flower import messages, payloads
from fedsync.trainer.protocol import Request, write_reply
from fedsync.trainer.refusals import refuse
from fedsync.trainer.regions import RegionAsk, RelayedNode
from fedsync.trainer.relay import Came, RelayService

HELD = 4
"""Messages of a relay that it holds or works on at the same time."""


class SilosHere:
    """A `fedsync.trainer.relay.Downstream`: silos of this process, which answer at once."""

    def __init__(self, silos: Sequence[Silo]) -> None:
        self._silos = silos
        self._came: list[Came] = []
        self._serial = 0

    def nodes(self) -> Sequence[RelayedNode]:
        return [RelayedNode(number, silo.name, "here") for number, silo in enumerate(self._silos)]

    def send(self, node: int, spec: str, asked: Request, payload: Payload | None, ask: RegionAsk) -> str | None:
        self._serial += 1
        silo = self._silos[node]
        try:
            reply, answer = silo._reply(silo._opened(spec), asked, payload)
        except Exception as error:
            print(f"{silo.name}: {error!r}", flush=True)
            reply, answer = refuse(error), None
        self._came.append(Came(str(self._serial), write_reply(reply), answer))
        return str(self._serial)

    def forget(self, waited: Collection[str]) -> None: ...

    def arrived(self, most: Mapping[str, int]) -> Sequence[Came]:
        came, self._came = self._came, []
        return came


class Relay(RelayService):
    """A relay as the crowd knows a silo; it looks for answers as soon as it has asked."""

    def __init__(self, name: str, silos: Sequence[Silo], keys: str | None) -> None:
        server = None if keys is None else read_server_file(Path(keys).read_bytes(), keys)
        super().__init__(SilosHere(silos), server)
        self.name = name
        self.turn()

    def _send(self, *arguments: Any) -> None:
        super()._send(*arguments)
        self.turn()

    def answer(self, message: Message, payload: Payload | None) -> Message:
        spec, text, _ = messages.read_request(message)
        said, answer = self.ask(spec, text, payload)
        return messages.relay_answer(message, said, None if answer is None else payloads.pack(answer))


class Relays(Crowd):
    """All relays of this process; each asks for its next message while it holds others."""

    def __init__(self, folder: Path, address: tuple[str, int], names: list[str], region: int) -> None:
        super().__init__(folder, address, names, 0.0)
        silos, keys = self._silos, yaml.safe_load((folder / "server.yaml").read_text()).get("keys")
        parts = [silos[first : first + region] for first in range(0, len(silos), region)]
        self._silos: list[Any] = [Relay(f"relay-{index}", part, keys) for index, part in enumerate(parts)]
        self._worker = ThreadPoolExecutor(HELD * len(parts))
        self._held: set[asyncio.Task[None]] = set()
        self._lines: dict[int, list[HttpLine]] = {}

    async def _answer(self, silo: Any, whole: Message, number: int, line: HttpLine, head: Any) -> None:
        idle = self._lines.setdefault(number, [])

        async def hand_in() -> None:
            own = idle.pop() if idle else HttpLine(self._address, self._trust)
            await super(Relays, self)._answer(silo, whole, number, own, head)
            idle.append(own)

        task = asyncio.create_task(hand_in())
        self._held.add(task)
        task.add_done_callback(self._held.discard)


def main() -> None:
    """Serve as the arguments of this process say, until its parent ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--silos", type=int, required=True)
    parser.add_argument("--region", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    exit_with_parent(options.parent)
    raise_file_limit()
    names = [f"silo-{index}" for index in range(options.silos)]

    async def run() -> None:
        await Relays(options.folder, ("127.0.0.1", options.port), names, options.region).run()

    asyncio.run(run())
