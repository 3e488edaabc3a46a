"""Relay between the server and a group of silos (*region*): forwards requests, adds up updates, and replies for all.

A relay keeps no model, has no key, and decides nothing. The server assigns the training, repeats requests (*questions*)
and sets timeouts, as for silos without a relay. The relay checks silos' replies as the server would.

| state of a question | until | next state |
|---|---|---|
| on its way | the silo's answer comes | ready; an update is kept for a sum |
| on its way | ``ttl_s`` expires, or the node is gone | forgotten: the server asks again |
| ready | the oldest request is answered | delivered and forgotten |
| any | the server opens another session | forgotten |

The reply to the oldest request is due when all questions are ready, when a silo connects or disconnects, or when the
request's time expires. It is also due when the first ready answer has waited for `LINGER` times the time that the silo
needed for it. So silos that finish together share one sum, and a slow silo delays the others only briefly.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedsync.common import codec, foreign
from fedsync.common.errors import ConfigError, LimitReached, ProtocolError
from fedsync.config.run_spec import RunSpec
from fedsync.core.orders import UpdateMeta, WorkOrder, WorkReport
from fedsync.core.report_checks import check_report, check_sealed
from fedsync.core.silo_weight import Weighting
from fedsync.extras.relays.region_sums import RegionAdder, share_of
from fedsync.extras.relays.relay_messages import (
    MAX_SILOS,
    RegionAnswer,
    RegionAsk,
    RegionMembers,
    RegionReply,
    RegionRequest,
    RelayedNode,
    joined,
    parted,
    piece_of,
    read_region_request,
    write,
)
from fedsync.model.chunked_arrays import ArrayKeeper
from fedsync.model.layout import Layout
from fedsync.model.running_statistics import fitted
from fedsync.model.transfer import Payload
from fedsync.silo.protocol import MAX_EVALUATION_TEXT, Request, Train, most_text, read_reply, read_request
from fedsync.transport.port import SiloAnswer

if TYPE_CHECKING:
    from fedsync.cipher.keys.keywrap import ServerKeys

logger = foreign.logger(__name__)

LINGER = 0.1
"""Wait of the first ready answer for others, as a share of its own duration."""

_LEAST_S, _MOST_S = 0.02, 2.0
_LOOK_S = 0.05
_OTHER_RUNS = 4
_ORDERS = 2 * MAX_SILOS
_MOST_WAITING = _OTHER_RUNS * _ORDERS
_MOST_HELD, _MOST_HELD_S = 32, 600.0

MOST_TEXT = 2**20
"""Limit of the silos' answers in one reply [characters of JSON]; the server accepts at most twice as many."""


class Downstream(Protocol):
    """Connection to the silos of the region."""

    def nodes(self) -> Sequence[RelayedNode]:
        """Return the connected nodes."""

    def send(self, node: int, spec: str, asked: Request, payload: Payload | None, ask: RegionAsk) -> str | None:
        """Send a question; return its message id, or None where the node is unknown."""

    def forget(self, waited: Collection[str]) -> None:
        """Drop all questions except ``waited``. Never called during `send`."""

    def arrived(self, most: Mapping[str, int]) -> Sequence[SiloAnswer]:
        """Return new answers; ``most`` limits the payload of each pending answer [bytes]."""


@dataclass(slots=True)
class _OnItsWay:
    """Question on its way, with the limit of its answer [characters]."""

    ask: RegionAsk
    most: int
    since_s: float


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    """Held request, with the limit of its reply's payload [bytes]."""

    most: int


@dataclass(slots=True, eq=False)
class _Run:
    """State of a run at the relay.

    Args:
        adder: adds updates; None while the layout is unknown.
        sealed: metrics are encrypted, so the server must not see single figures.
        orders: orders of the silos by update id, to check answers whichever request brought them.
        waiting: questions on their way, by message id.
        answers: ready answers with their payloads.
        kept: numbers of questions whose updates the adder has, by update id.
        ready_s: time at which the first ready answer is due; None if there is none.
        held: requests, the oldest first.
        told: connected nodes as last reported to the server.
    """

    spec: str
    session: str
    adder: RegionAdder | None = None
    weighting: Weighting = field(default_factory=Weighting)
    sealed: bool = False
    orders: dict[str, WorkOrder] = field(default_factory=dict)
    waiting: dict[str, _OnItsWay] = field(default_factory=dict)
    answers: list[tuple[RegionAnswer, Payload | None]] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    ready_s: float | None = None
    held: deque[_Held] = field(default_factory=deque)
    told: tuple[RelayedNode, ...] | None = None


class RelayService:
    """Service of a relay; see the module. Any thread may call `ask`; one thread at a time uses ``downstream``.

    Args:
        keys: the server's keys for encrypted runs; None where there are none.
        folder: for pending updates; None keeps them in memory.
    """

    def __init__(
        self,
        downstream: Downstream,
        keys: ServerKeys | None = None,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._downstream, self._keys, self._folder, self._clock = downstream, keys, folder, clock
        self._runs: dict[str, _Run] = {}
        self._here: tuple[RelayedNode, ...] = ()
        self._changed = threading.Condition()

    def ask(self, spec: str, text: str, payload: Payload | None) -> tuple[str, Payload | None]:
        """Answer the server's question; text and bytes in, text and bytes out. Raises `ProtocolError` if the request is
        invalid, and `LimitReached` if too many requests or questions are pending.
        """
        request = read_region_request(text)
        if request is None:  # the server asks the node for its identity: a relay, with these silos
            with self._changed:
                return write(RegionReply(here=self._here)), None
        with self._changed:
            self._check_room(request)
            run = self._run_of(spec, request)
            self._send(run, request, payload)
            mine, until_s = _Held(request.most), self._clock() + min(request.hold_s, _MOST_HELD_S)
            run.held.append(mine)
            try:
                while not self._is_due(run, mine, until_s):
                    self._changed.wait(min(_LOOK_S, max(until_s - self._clock(), 0.0)))
                return self._reply(run, first=run.held[0] is mine and not _outdone(run, mine))
            finally:
                run.held.remove(mine)

    def turn(self) -> None:
        """Update the connected nodes once, and collect answers."""
        here = tuple(self._downstream.nodes())
        with self._changed:
            most = {number: each.ask.most for run in self._runs.values() for number, each in run.waiting.items()}
            self._downstream.forget(most.keys())
        came = self._downstream.arrived(most)
        with self._changed:
            if here != self._here:
                self._here = here
                self._forget_gone()
                self._changed.notify_all()
            for each in came:
                for run in self._runs.values():
                    if (waiting := run.waiting.pop(each.name, None)) is not None:
                        self._take(run, waiting, each)
            self._expire()
            if came:
                self._changed.notify_all()

    @property
    def waits(self) -> bool:
        with self._changed:
            return any(run.waiting for run in self._runs.values())

    # Questions.

    def _check_room(self, request: RegionRequest) -> None:
        """Bound the pending requests and questions over all runs, whatever names a server gives to runs."""
        held = sum(len(run.held) for run in self._runs.values())
        waiting = sum(len(run.waiting) for run in self._runs.values()) + len(request.asks)
        if held >= _MOST_HELD or waiting > _MOST_WAITING:
            problem = f"{held} requests and {waiting} questions wait here, at most {_MOST_HELD} and {_MOST_WAITING}"
            raise LimitReached("relay", problem, "Wait for answers, or give the region more relays")

    def _run_of(self, spec: str, request: RegionRequest) -> _Run:
        key = hashlib.sha256(spec.encode()).hexdigest()
        run = self._runs.get(key)
        if run is None or run.session != request.session:
            held = deque[_Held]() if run is None else run.held
            run = self._runs[key] = _Run(spec, request.session, held=held)
            for old in [old for old, each in self._runs.items() if old != key and not each.held][:-_OTHER_RUNS]:
                del self._runs[old]
        if run.adder is None and request.layout is not None:
            self._open(run, RunSpec.parse(spec), request.layout, key)
        return run

    def _open(self, run: _Run, spec: RunSpec, layout: Layout, key: str) -> None:
        weighting = spec.aggregation.weigher(spec.local.solver(spec.task)).weighting
        if weighting is None:
            return  # only the server can weigh these updates, so it asks for no sums
        folder = None if self._folder is None else self._folder / key[:16]
        plan = spec.encryption_plan(layout)
        if plan is None:
            from fedsync.extras.relays.plain_region import PlainRegion

            keeper = ArrayKeeper(folder, or_memory=True)
            run.adder = PlainRegion(layout.size, fitted(spec.wire.formats, layout).up, keeper)
        elif self._keys is None:
            problem = "the run is sealed, and this relay has no server.json"
            raise ConfigError("keys", problem, "Name it in the relay's file")
        else:
            from fedsync.extras.relays.sealed_region import SealedRegion

            run.adder, run.sealed = SealedRegion(plan, self._keys, folder), plan.seal_metrics
        run.weighting = weighting

    def _send(self, run: _Run, request: RegionRequest, payload: Payload | None) -> None:
        pieces = parted(payload, request.pieces, "server")
        for ask in request.asks:
            asked = read_request(ask.text)
            if isinstance(asked, Train):
                run.orders[asked.order.update_id] = asked.order
                while len(run.orders) > _ORDERS:
                    del run.orders[next(iter(run.orders))]
            sent = self._downstream.send(ask.node, run.spec, asked, piece_of(pieces, ask.piece, "server"), ask)
            if sent is None:
                self._ready(run, RegionAnswer(ask.number, problem="its node is not known to the relay"), None, 0.0)
            else:
                run.waiting[sent] = _OnItsWay(ask, most_text(asked), self._clock())

    # Answers.

    def _take(self, run: _Run, waiting: _OnItsWay, came: SiloAnswer) -> None:
        ask, took_s = waiting.ask, self._clock() - waiting.since_s
        if len(came.text) > waiting.most:
            problem = f"its answer has {len(came.text)} characters, at most {waiting.most}"
            self._ready(run, RegionAnswer(ask.number, problem=problem), None, took_s)
            return
        if came.problem or came.payload is None:
            self._ready(run, RegionAnswer(ask.number, came.text, problem=came.problem), None, took_s)
            return
        if run.adder is not None and ask.update_id and self._added(run, ask, came.text, came.payload):
            run.kept[ask.update_id] = ask.number
            self._ready(run, RegionAnswer(ask.number, came.text), None, took_s)
        else:
            self._ready(run, RegionAnswer(ask.number, came.text), came.payload, took_s)

    def _added(self, run: _Run, ask: RegionAsk, text: str, payload: Payload) -> bool:
        """Return whether an update went into the sum; a rejected update goes to the server, which reports the error.

        An update cannot be checked without its order, which a restarted relay does not know.
        """
        silo, order = ask.update_id.rpartition("/")[0], run.orders.get(ask.update_id)
        assert run.adder is not None
        try:
            report = read_reply(text, silo, MAX_EVALUATION_TEXT)
            if not isinstance(report, WorkReport) or order is None or ask.update_id in run.kept:
                return False
            meta = UpdateMeta.of(silo, order, report, ask.examples, payload.nbytes)
            check_report(silo, order, meta, report)
            if run.sealed:
                check_sealed(silo, report)
            share = share_of(run.weighting, ask.examples, report)
            run.adder.put(silo, ask.update_id, report.base_version, share, payload)
        except ProtocolError as error:
            logger.warning("not added to others: %s", error)
            return False
        return True

    def _ready(self, run: _Run, answer: RegionAnswer, payload: Payload | None, took_s: float) -> None:
        run.answers.append((answer, payload))
        if run.ready_s is None:
            run.ready_s = self._clock() + min(max(LINGER * took_s, _LEAST_S), _MOST_S)

    def _is_due(self, run: _Run, mine: object, until_s: float) -> bool:
        now_s = self._clock()
        if now_s >= until_s or self._runs.get(hashlib.sha256(run.spec.encode()).hexdigest()) is not run:
            return True
        if run.held[0] is not mine or _outdone(run, mine):
            return run.held[0] is mine
        ready = run.ready_s is not None and (not run.waiting or now_s >= run.ready_s)
        return ready or run.told != self._here

    def _reply(self, run: _Run, *, first: bool) -> tuple[str, Payload | None]:
        """Return all ready answers; an empty reply for any request but the oldest."""
        if not first:
            return write(RegionReply(run.session, here=self._here, knows=run.adder is not None)), None
        pieces, answers, sums = list[Payload](), list[RegionAnswer](), list[RegionMembers]()
        apart, told = dict[str, int](), _told_now(run.answers)
        numbers_told = {answer.number for answer, _ in told}
        kept = {update_id: number for update_id, number in run.kept.items() if number in numbers_told}
        # Answers that fail to leave from here on are lost, and the server asks again.
        run.answers, run.told = run.answers[len(told) :], self._here
        run.kept = {update_id: number for update_id, number in run.kept.items() if update_id not in kept}
        run.ready_s = self._clock() if run.answers else None
        for each in () if run.adder is None or not kept else run.adder.sums(list(kept)):
            numbers = tuple(kept[update_id] for update_id in each.update_ids)
            if len(numbers) == 1:
                apart[numbers[0]] = len(pieces)
            else:
                sums.append(RegionMembers(numbers, each.update_ids, len(pieces)))
            pieces.append(each.payload)
        for answer, payload in told:
            piece = apart.get(answer.number, -1)
            if payload is not None:
                piece = len(pieces)
                pieces.append(payload)
            answers.append(RegionAnswer(answer.number, answer.text, piece, answer.problem))
        lengths, knows = tuple(piece.nbytes for piece in pieces), run.adder is not None
        reply = RegionReply(run.session, tuple(answers), tuple(sums), lengths, self._here, knows)
        return write(reply), joined(pieces)

    def _forget_gone(self) -> None:
        here = {each.node for each in self._here}
        for run in self._runs.values():
            run.waiting = {number: each for number, each in run.waiting.items() if each.ask.node in here}

    def _expire(self) -> None:
        now_s = self._clock()
        for run in self._runs.values():
            run.waiting = {n: each for n, each in run.waiting.items() if now_s < each.since_s + each.ask.ttl_s}


def _outdone(run: _Run, mine: _Held) -> bool:
    """Return whether a held request admits a larger reply; such a request is answered first."""
    return any(other.most > mine.most for other in run.held)


def _told_now(answers: Sequence[tuple[RegionAnswer, Payload | None]]) -> list[tuple[RegionAnswer, Payload | None]]:
    """Return the first answers, as many as fit into one reply."""
    length, told = 0, list[tuple[RegionAnswer, Payload | None]]()
    for answer, payload in answers:
        length += len(codec.dumps(answer.text))
        if told and length > MOST_TEXT:
            break
        told.append((answer, payload))
    return told
