"""Connection from a relay (regional aggregator) to its silos, over the same transport that a server uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from math import inf

from fedsync.extras.relays.relay_messages import RegionAsk, RelayedNode
from fedsync.model.transfer import Payload
from fedsync.server.outbox import kind_of
from fedsync.silo.protocol import Request
from fedsync.transport.port import SiloAnswer, SiloQuestion, Transport


class RelayLine:
    """Implementation of `fedsync.extras.relays.relay.Downstream`.

    Args:
        silos: transport to the silos.
        look_s: shortest time between two lists of connected nodes [s].
    """

    def __init__(self, silos: Transport, look_s: float = 1.0) -> None:
        self._silos = silos
        self._look_s, self._looked_s = look_s, -inf
        self._here: list[RelayedNode] = []
        self._lock = threading.Lock()  # several threads send questions

    def nodes(self) -> Sequence[RelayedNode]:
        if time.monotonic() - self._looked_s >= self._look_s:
            self._looked_s = time.monotonic()
            self._here = [RelayedNode(each.node_id, each.name, each.since) for each in self._silos.peers()]
        return self._here

    def send(self, node: int, spec: str, asked: Request, payload: Payload | None, ask: RegionAsk) -> str | None:
        question = SiloQuestion(ask.text, payload, ask.most, spec, kind_of(asked), ask.ttl_s)
        with self._lock:
            return self._silos.send([(node, question)])[0]

    def arrived(self, most: Mapping[str, int]) -> Sequence[SiloAnswer]:
        with self._lock:
            return self._silos.receive()

    def wait(self, seconds: float) -> None:
        self._silos.wait(seconds)

    def forget(self, waited: Collection[str]) -> None:
        with self._lock:
            self._silos.keep(waited)
