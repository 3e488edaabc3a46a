"""Relays of `bench/cost/crowd_silos.py`: each has a real relay's engine, and its silos answer in this process.

So the traffic between server and relays is real. The silos behind the relays cost this process only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.cost.crowd_answers import Silo
from fedsync.cipher.keys.keywrap import read_server_file
from fedsync.extras.relays.relay import RelayService
from fedsync.extras.relays.relay_messages import RegionAsk, RelayedNode
from fedsync.model.transfer import Payload
from fedsync.silo.protocol import Request, write_request
from fedsync.transport.port import SiloAnswer

HELD = 4
"""Messages of a relay that it holds or works on at the same time."""


class SilosHere:
    """A `fedsync.extras.relays.relay.Downstream`: silos of this process, which answer at once."""

    def __init__(self, silos: Sequence[Silo]) -> None:
        self._silos = silos
        self._came: list[SiloAnswer] = []
        self._serial = 0

    def nodes(self) -> Sequence[RelayedNode]:
        return [RelayedNode(number, silo.name, "here") for number, silo in enumerate(self._silos)]

    def send(self, node: int, spec: str, asked: Request, payload: Payload | None, ask: RegionAsk) -> str | None:
        self._serial += 1
        self._came.append(SiloAnswer(str(self._serial), *self._silos[node].answer(spec, write_request(asked), payload)))
        return str(self._serial)

    def forget(self, waited: Collection[str]) -> None: ...

    def arrived(self, most: Mapping[str, int]) -> Sequence[SiloAnswer]:
        came, self._came = self._came, []
        return came


class Relay(RelayService):
    """A relay as the crowd knows a silo; it looks for answers as soon as it has asked."""

    def __init__(self, name: str, silos: Sequence[Silo], keys: str) -> None:
        super().__init__(SilosHere(silos), read_server_file(Path(keys).read_bytes(), keys) if keys else None)
        self.name = name
        self.turn()

    def _send(self, *arguments: Any) -> None:
        super()._send(*arguments)
        self.turn()

    answer = RelayService.ask
