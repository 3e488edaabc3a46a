"""The way from a relay to the silos of its region: Flower's grid, as a server has it.

Large payloads are left at the relay's gate, as at a server's (`fedsync.flower.parcels`).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from math import inf

from flwr.serverapp import Grid

from fedsync.core.errors import ProtocolError
from fedsync.core.transfer import Payload
from fedsync.flower import messages, payloads
from fedsync.flower.internals.pull import BESIDE, Arrival, Arrivals
from fedsync.flower.packing import Packer
from fedsync.flower.parcels import Parcel, ParcelStore, Ticket
from fedsync.trainer.protocol import Request
from fedsync.trainer.regions import RegionAsk, RelayedNode
from fedsync.trainer.relay import Came


class RelayLine:
    """A `fedsync.trainer.relay.Downstream`.

    Args:
        grid: of Flower, of the relay's own SuperLink.
        parcels: what is left at its gate; None where there is none.
        look_s: shortest time between two looks at who is there [s].
    """

    def __init__(self, grid: Grid, parcels: ParcelStore | None = None, look_s: float = 1.0) -> None:
        self._grid = grid
        self._look_s, self._looked_s = look_s, -inf
        self._here: list[RelayedNode] = []
        self._arrivals = Arrivals(grid)
        self._parcels = parcels
        self._fetching: set[int] = set()
        self._sent: dict[str, tuple[int, str, Ticket | None]] = {}
        self._packer = Packer(parcels)

    def nodes(self) -> Sequence[RelayedNode]:
        if time.monotonic() - self._looked_s >= self._look_s:
            self._looked_s, found = time.monotonic(), self._grid.get_nodes()
            self._here = [RelayedNode(each.node_id, each.name, str(each.last_activated_at)) for each in found]
        return self._here

    def send(self, node: int, spec: str, asked: Request, payload: Payload | None, ask: RegionAsk) -> str | None:
        packed = None if payload is None else self._packer.pack(payload, fetches=node in self._fetching)
        ticket = None
        if self._parcels is not None and ask.most > payloads.SMALL_BYTES:
            ticket = self._parcels.expect(node, ask.number, ask.most)
        message = messages.request(node, spec, asked, packed, ask.ttl_s, ticket)
        identifier = next(iter(self._grid.push_messages([message])), "")
        if not identifier:
            return None
        digest = packed.digest if isinstance(packed, Parcel) else ""
        self._sent[identifier] = node, digest, ticket
        return identifier

    def arrived(self, most: Mapping[str, int]) -> Sequence[Came]:
        found = self._arrivals.pull({identifier: BESIDE + nbytes for identifier, nbytes in most.items()})
        return [self._read(arrival, most.get(arrival.answers, 0)) for arrival in found if arrival.answers in self._sent]

    def wait(self, seconds: float) -> None:
        """Wait for answers, so long at most."""
        self._arrivals.wait(seconds)

    def forget(self, waited: Collection[str]) -> None:
        """Keep at the gate what messages under way speak of, and forget what nobody waits for."""
        self._sent = {identifier: sent for identifier, sent in self._sent.items() if identifier in waited}
        if self._parcels is None:
            return
        digests = {digest for _, digest, _ in self._sent.values()} | self._packer.digests
        tickets = {(node, ticket.name) for node, _, ticket in self._sent.values() if ticket is not None}
        self._parcels.keep(digests, tickets)

    def _read(self, arrival: Arrival, most: int) -> Came:
        node, _, ticket = self._sent.pop(arrival.answers)
        if arrival.content is None:
            return Came(arrival.answers, problem=arrival.problem)
        (self._fetching.add if messages.fetches(arrival.content) else self._fetching.discard)(node)
        name = f"node {node}"
        try:
            text, payload = messages.read_answer_text(arrival.content, name, most)
            uploaded = messages.read_uploaded(arrival.content, name)
            if uploaded is not None:
                if self._parcels is None or ticket is None:
                    raise ProtocolError(name, "upload", "nobody expects it")
                payload = self._parcels.arrived(node, ticket, uploaded, name)
        except ProtocolError as error:
            return Came(arrival.answers, problem=str(error))
        return Came(arrival.answers, text, payload)
