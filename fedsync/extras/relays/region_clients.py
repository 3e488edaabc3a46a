"""Server's side of relays: it treats the silos behind a relay as nodes, and bundles their messages.

A node that identifies itself as a relay is not a node of the run; the nodes behind it are. These nodes have negative
numbers, which Flower does not use. Messages that the server posts at the same time for one relay form one message, a
*bundle*. Each relay always has an unanswered bundle, so it can report at any time.

| bundle | until | then |
|---|---|---|
| sent | its answer arrives | the answer is unpacked; if it was the last bundle, an empty bundle is sent |
| sent | ``hold_s`` and a margin have passed | it counts as lost; if it was the last bundle, an empty bundle is sent |
| any | its relay is gone | the bundle is forgotten, and so are the nodes behind the relay |
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import ProtocolError
from fedsync.extras.relays.relay_messages import (
    MAX_SILOS,
    RegionAsk,
    RegionMembers,
    RegionReply,
    RegionRequest,
    RelayedNode,
    joined,
    parted,
    piece_of,
    read_region_reply,
    write,
)
from fedsync.model.layout import Layout
from fedsync.model.transfer import DurableAggregator, Payload
from fedsync.transport.port import MOST_TEXT_BYTES, Peer, SiloAnswer, SiloQuestion, Transport

logger = foreign.logger(__name__)

_LOST_S = 35.0
_PAUSES = Backoff(1.0, 64.0)
"""Pauses after replies that cannot be used."""

_REST = 10.0
"""Pause after a reply that answers nothing, in multiples of the time that it took to read."""

_RETURNS, _RETURNS_S, _ARRIVALS = 3, 60.0, 5 * MAX_SILOS
"""Arrivals of a silo that count within the time [s], and of a relay's silos; each costs the run work in progress."""

_TEXTS = 2**20


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """Question for a silo behind a relay, with its payload; see `RegionAsk`.

    ``in_sum``: maximum size of its update's share of a region's sum [bytes].
    """

    text: str
    payload: Payload | None
    most: int
    ttl_s: float
    update_id: str = ""
    examples: int = 1
    in_sum: int = 0


@dataclass(slots=True)
class _Relay:
    """State of a relay.

    Args:
        name: name for logs and errors.
        since: time of its activation.
        here: nodes of its silos, by the relay's numbers.
        numbers: the server's numbers of these nodes, by the relay's numbers.
        bundles: unanswered messages, and the time at which each is given up.
        waiting: for each unanswered question, the maximum size of its payload [bytes], and the requested update.
        room: maximum size of each silo's update [bytes], by the relay's numbers.
        knows: whether the relay knows the layout.
        quiet_s: earliest time of the next empty bundle.
        came: recent arrivals of silos, by name if they have one, with their times.
        problem: why the last reply could not be used; empty if it could.
        refused: number of replies in a row that could not be used.
    """

    name: str
    since: str
    here: dict[int, RelayedNode] = field(default_factory=dict)
    numbers: dict[int, int] = field(default_factory=dict)
    bundles: dict[str, float] = field(default_factory=dict)
    waiting: dict[str, tuple[int, str]] = field(default_factory=dict)
    room: dict[int, int] = field(default_factory=dict)
    knows: bool = False
    quiet_s: float = 0.0
    came: list[tuple[float, str]] = field(default_factory=list)
    problem: str = ""
    refused: int = 0

    def present(self, told: Iterable[RelayedNode]) -> dict[int, RelayedNode]:
        """Return the silos that count as connected; one that arrives too often counts as away for a while."""
        now_s, here = time.monotonic(), dict[int, RelayedNode]()
        self.came = [each for each in self.came if now_s - each[0] < _RETURNS_S]
        often = Counter(who for _, who in self.came)
        for each in told:
            if self.here.get(each.node) != each:
                who = each.name or str(each.node)
                if often[who] >= _RETURNS or len(self.came) >= _ARRIVALS:
                    continue
                often[who] += 1
                self.came.append((now_s, who))
            here[each.node] = each
        return here


class Regions:
    """Relays of a run.

    Args:
        layout: layout of the model, which relays receive.
        adds: whether a relay may add up the updates of its region before the server commits them.
        hold_s: time for which a relay holds a request without an answer [s].
    """

    def __init__(self, layout: Layout | None = None, *, adds: bool = True, hold_s: float = 0.0) -> None:
        self._layout, self._hold_s = layout, hold_s
        self.adds = adds
        self._session = secrets.token_hex(8)
        self._relays: dict[int, _Relay] = {}
        self._behind: dict[int, tuple[int, int]] = {}
        self._alone: set[str] = set()
        self._serial = self._newest = 0

    def __contains__(self, node: int) -> bool:
        """Whether a node is behind a relay."""
        return node in self._behind

    # Membership.

    def around(self, peers: Iterable[Peer]) -> list[Peer]:
        """Return the transport's nodes without relays, and the nodes behind relays."""
        found = {peer.node_id: peer for peer in peers}
        for node, relay in list(self._relays.items()):
            if node not in found or found[node].since != relay.since:
                self._forget(node)
        silos = [
            Peer(relay.numbers[number], each.name, each.since)
            for relay in self._relays.values()
            for number, each in relay.here.items()
        ]
        return [*(peer for node, peer in found.items() if node not in self._relays), *silos]

    def relay_of(self, node: int) -> str:
        """Name of the relay in front of a node; empty for none."""
        return self._relays[self._behind[node][0]].name if node in self._behind else ""

    def enrol(self, node: int, name: str, since: str, answer: SiloAnswer) -> None:
        """Add a node that has identified itself as a relay; raises `ProtocolError` for an invalid answer."""
        reply = read_region_reply(answer.text, name)
        logger.info("%s is a relay", name)
        self._relays[node] = _Relay(name, since)
        self._hear(node, reply)

    def _hear(self, node: int, reply: RegionReply) -> None:
        relay = self._relays[node]
        relay.knows = reply.knows
        relay.here = relay.present(reply.here)
        for number in relay.here.keys() - relay.numbers.keys():
            self._newest -= 1
            relay.numbers[number] = self._newest
            self._behind[self._newest] = node, number
        if len(relay.numbers) > MAX_SILOS:
            for number in relay.numbers.keys() - relay.here.keys():
                del self._behind[relay.numbers.pop(number)]
                relay.room.pop(number, None)

    def _forget(self, node: int) -> None:
        relay = self._relays.pop(node)
        for number in relay.numbers.values():
            del self._behind[number]

    # Requests.

    def push(self, transport: Transport, spec: str, letters: Sequence[tuple[int, RelayedRequest]]) -> list[str | None]:
        """Send (node, request) pairs, one message per relay; return each question's name, None for a lost node."""
        named: list[str | None] = []
        asks: dict[int, list[RegionAsk]] = {}
        pieces: dict[int, list[Payload]] = {}
        for node, letter in letters:
            if node not in self._behind:
                named.append(None)
                continue
            relay, number = self._behind[node]
            self._serial += 1
            question = f"{self._session}/{self._serial}"
            named.append(question)
            piece, apart = _place(pieces.setdefault(relay, []), letter.payload), letter.update_id in self._alone
            asks.setdefault(relay, []).append(
                RegionAsk(
                    question, number, letter.text, piece, letter.most, letter.ttl_s,
                    letter.update_id if self.adds and not apart else "", letter.examples,
                )
            )  # fmt: skip
            most, room = max(letter.most, letter.in_sum), self._relays[relay].room
            self._relays[relay].waiting[question] = most, letter.update_id
            if letter.update_id:
                room[number] = max(room.get(number, 0), most)
        now_s = time.monotonic()
        for node, relay_ in self._relays.items():
            relay_.bundles = {name: until_s for name, until_s in relay_.bundles.items() if now_s < until_s}
            if node in asks or (not relay_.bundles and now_s >= relay_.quiet_s):
                question_ = self._bundle(node, spec, asks.get(node, []), pieces.get(node, []))
                for name in transport.send([(node, question_)]):
                    if name is not None:
                        relay_.bundles[name] = now_s + question_.ttl_s
        return named

    def _bundle(self, node: int, spec: str, asks: Sequence[RegionAsk], pieces: list[Payload]) -> SiloQuestion:
        relay = self._relays[node]
        layout = None if relay.knows else self._layout
        lengths = tuple(piece.nbytes for piece in pieces)
        # The relay may also answer later questions in its reply, so the limit allows an update of each silo.
        most = sum(bytes_ for bytes_, _ in relay.waiting.values())
        most = max(most, sum(bytes_ for number, bytes_ in relay.room.items() if number in relay.here)) + _TEXTS
        text = write(RegionRequest(self._session, tuple(asks), lengths, self._hold_s, layout, most))
        ttl_s = self._hold_s + _LOST_S
        return SiloQuestion(text, joined(pieces), most, spec, ttl_s=ttl_s, most_text=MOST_TEXT_BYTES)

    @property
    def bundles(self) -> set[str]:
        return {name for relay in self._relays.values() for name in relay.bundles}

    # Answers.

    def unpack(
        self, answer: SiloAnswer, wanted: Container[str], aggregator: DurableAggregator | None
    ) -> list[SiloAnswer] | None:
        """Return the silos' answers in a message, None if no relay sent it. The aggregator receives the sums.

        Args:
            wanted: names of questions that still wait for an answer.
            aggregator: aggregator of the run; None before there is a model.
        """
        node = next((node for node, relay in self._relays.items() if answer.name in relay.bundles), None)
        if node is None:
            return None
        relay = self._relays[node]
        del relay.bundles[answer.name]
        relay.waiting = {number: each for number, each in relay.waiting.items() if number in wanted}
        found, begun_s, pause_s = list[SiloAnswer](), time.monotonic(), _PAUSES.first_s / 10
        try:
            found = self._read(node, answer, aggregator)
            relay.problem, relay.refused = "", 0
        except ProtocolError as error:
            if str(error) != relay.problem:
                logger.warning("%s", error)
            pause_s = _PAUSES.pause_s(relay.refused)
            relay.problem, relay.refused = str(error), relay.refused + 1
        if not found:
            now_s = time.monotonic()
            relay.quiet_s = now_s + max(pause_s, _REST * (now_s - begun_s))
        return found

    def _read(self, node: int, told: SiloAnswer, aggregator: DurableAggregator | None) -> list[SiloAnswer]:
        relay, payload = self._relays[node], told.payload
        if told.problem:
            raise ProtocolError(relay.name, told.check, told.problem)
        reply = read_region_reply(told.text, relay.name)
        pieces = parted(payload, reply.pieces, relay.name)
        for number in (*(each.piece for each in reply.answers), *(each.piece for each in reply.sums)):
            piece_of(pieces, number, relay.name)  # validate every piece before any of them has an effect
        summed = dict[str, str]()
        for each in reply.sums:
            problem = self._add(relay, each, piece_of(pieces, each.piece, relay.name), aggregator)
            summed.update(dict.fromkeys(each.numbers, problem))
        found = []
        for answer in reply.answers:
            waiting = relay.waiting.pop(answer.number, None)
            if waiting is None:
                continue
            again = bool(summed.get(answer.number)) and not answer.problem
            (self._alone.add if again else self._alone.discard)(waiting[1])
            piece, in_sum = piece_of(pieces, answer.piece, relay.name), answer.number in summed and not again
            found.append(SiloAnswer(answer.number, answer.text, piece, answer.problem, summed=in_sum, again=again))
        self._hear(node, reply)
        return found

    @staticmethod
    def _add(relay: _Relay, members: RegionMembers, whole: Payload | None, aggregator: DurableAggregator | None) -> str:
        """Pass a sum to the aggregator; return the reason if it is refused."""
        known = tuple(relay.waiting[number][1] for number in members.numbers if number in relay.waiting)
        try:
            if aggregator is None or whole is None or known != members.update_ids or "" in known:
                raise ProtocolError(relay.name, "sum", "it contains updates that no request waits for")
            aggregator.put_sum(relay.name, members.update_ids, whole)
        except ProtocolError as error:
            logger.warning("%s; its updates are asked for one by one", error)
            return str(error)
        return ""


def _place(pieces: list[Payload], payload: Payload | None) -> int:
    """Return the index of a payload among pieces; append the payload if it is missing."""
    if payload is None:
        return -1
    for number, piece in enumerate(pieces):
        if piece is payload:
            return number
    pieces.append(payload)
    return len(pieces) - 1
