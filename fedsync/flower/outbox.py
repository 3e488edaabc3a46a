"""What the server asks silos, and the answers that it waits for.

| a message is | until | then |
|---|---|---|
| posted | `flush` | waiting, or lost at once where its node is not known any more |
| waiting | its answer comes | answered: what asked for the same since is forgotten |
| waiting | ``ask_s``, and twice as long as answers take lately | waiting, and asked for again; each time later |
| waiting | ``ask_s``, but the SuperLink has it, or its answer | waiting for as long again |
| waiting | ``due_s`` | overdue: an answer that still comes is not looked at |
| any | its node is gone | forgotten |

An order is asked for again by `Collect`, and so until it is done; anything else is sent once more. The time of an order
that is queued at its silo begins when the one before it is over.

What silos behind a relay are asked goes together (`fedsync.flower.regions`), and is waited for one by one.

Large payloads are left at the server's gate where there is one (`fedsync.flower.parcels`): for nodes that say in an
answer that they can fetch them, and of all nodes that leave theirs there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

from flwr.app import Message
from flwr.serverapp import Grid

from fedsync.core import foreign
from fedsync.core.errors import PolicyError, ProtocolError
from fedsync.core.orders import Subject, WorkOrder
from fedsync.core.transfer import MAX_SEALED_BYTES, NO_PAYLOAD, DurableAggregator, Payload
from fedsync.flower import messages, payloads
from fedsync.flower.internals.pull import BESIDE, MOST_AT_ONCE, Arrival, Arrivals
from fedsync.flower.nodes import APP_ERRORS, AnotherApp, Nodes
from fedsync.flower.packing import Packer
from fedsync.flower.parcels import Parcel, ParcelStore, Ticket
from fedsync.flower.pending_message import PendingMessage
from fedsync.flower.regions import Letter, Relayed
from fedsync.flower.timeouts import AnswerTimes, Timeouts
from fedsync.trainer.protocol import (
    MAX_LAYOUT_TEXT,
    MAX_TEXT,
    AskModel,
    AskSnapshot,
    Collect,
    Describe,
    EvaluateModel,
    Question,
    Reply,
    Request,
    Train,
    read_reply,
    write_request,
)

logger = foreign.logger(__name__)

_QUESTION_S = 60.0
_LEAST_S = 1.0
_SOON_S = 5.0
"""What is to be asked for again so soon is looked for at the SuperLink with what is now."""

_SMALL_ANSWER_BYTES = 2**20
"""Bytes beside a reply that is no model: one sealed chunk and its header, or what a silo reveals of its masks."""


class Outbox:
    """Makes the messages of one run, and keeps them until they are answered; times are the driver's, in seconds.

    They go out when told to, so that what they are made of can be put on disk before.

    Args:
        grid: of Flower.
        nodes: which node is which silo.
        spec: the run's specification as JSON, for the silos.
        timing: how long to wait.
        report_s: after so long silos say how far an order in work is.
        aggregator: knows what each silo needs to have the current model, and what it wants to know of silos; None as
            long as there is no model.
        model_bytes: size of the model.
        at_once: answers that are fetched at the same time.
        parcels: what is left at the server's gate; None where there is none.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Nodes,
        spec: str,
        timing: Timeouts,
        report_s: float,
        aggregator: DurableAggregator | None = None,
        model_bytes: int = MAX_SEALED_BYTES,
        at_once: int = MOST_AT_ONCE,
        parcels: ParcelStore | None = None,
    ) -> None:
        self._grid = grid
        self._nodes = nodes
        self._spec = spec
        self._timing = timing
        self._report_s = report_s
        self._aggregator = aggregator
        self._model_bytes = model_bytes
        self._arrivals = Arrivals(grid, at_once)
        self._parcels = parcels
        self._fetching: set[int] = set()
        self._packer = Packer(parcels)
        self._answer_times = AnswerTimes(timing.ask_s)
        self._posted: list[tuple[PendingMessage, Message | Letter]] = []
        self._sent: dict[str, PendingMessage] = {}

    # What is asked.

    def ask(self, node: int, request: Request, now_s: float) -> None:
        """Ask a node something that no order hangs on."""
        self._post(PendingMessage(node, request, now_s + self._timing.order_timeout_s), request, None, now_s)

    def train(self, silo: str, order: WorkOrder, now_s: float) -> None:
        queued = bool(order.behind) and any(sent.asks_for(order.behind) for sent in self.waiting)
        due_s, end_s = (inf, inf) if queued else self._timing.order_until(now_s)
        node, request = self._nodes.by_name[silo], Train(order, self._report_s)
        self._send(PendingMessage(node, request, due_s, end_s, queued=queued), silo, now_s)

    def over(self, update_id: str, now_s: float) -> None:
        """An order is over, so the time of the one that is queued behind it begins."""
        if not any(sent.queued for sent in self.waiting):
            return
        due_s, end_s = self._timing.order_until(now_s)

        def begun(sent: PendingMessage) -> PendingMessage:
            behind = sent.queued and sent.order is not None and sent.order.behind == update_id
            return replace(sent, due_s=due_s, end_s=end_s, queued=False) if behind else sent

        self._change(begun)

    def evaluate(self, silo: str, request: EvaluateModel, now_s: float) -> None:
        """Have a silo score a model."""
        due_s = now_s + self._timing.order_timeout_s
        self._send(PendingMessage(self._nodes.by_name[silo], request, due_s), silo, now_s)

    def repeat(self, sent: PendingMessage, silo: str, now_s: float) -> None:
        """Send an order or an evaluation once more, with what the aggregator now knows that the silo needs."""
        self._send(replace(sent, again=True), silo, now_s)

    def collect(self, sent: PendingMessage, order: WorkOrder, now_s: float) -> None:
        """Ask for an order in work, which is also the way for the word to stop."""
        request = Collect(order.update_id, self._report_s, sent.halt)
        self._post(replace(sent, collecting=True), request, None, now_s)

    def snapshot(self, answered: str, now_s: float) -> None:
        """Ask for a sealed model if one is wanted and none is under way: ``answered`` if it is here, else any silo."""
        here, asked = self._nodes.by_name, AskSnapshot()
        if self._aggregator is None or not self._aggregator.wants_snapshot or not here:
            return
        if not any(sent.request == asked for sent in self.waiting):
            self.ask(here.get(answered) or next(iter(here.values())), asked, now_s)

    def questions(self, now_s: float) -> None:
        """Ask what the aggregator wants to know of silos before the last commit counts; each is asked once."""
        if self._aggregator is None:
            return
        while questions := self._aggregator.questions():
            for silo, question in questions.items():
                node = self._nodes.by_name.get(silo)
                if node is None:
                    self._aggregator.give_up(silo)  # which others may be asked for
                    continue
                timeout_s = min(_QUESTION_S, self._timing.order_timeout_s)
                sent = PendingMessage(node, Question(), now_s + timeout_s)
                self._posted.append((sent, self._message(sent, Question(), question, timeout_s)))

    def ask_again(self, sent: PendingMessage, now_s: float) -> None:
        """Ask for the answer to what was sent: where a line breaks, a message is lost that was taken for delivered."""
        match sent.request:
            case Train(order):
                self.collect(sent, order, now_s)
            case EvaluateModel():
                self._send(sent, self._nodes.sender(sent.node), now_s)
            case request:
                self._post(sent, request, None, now_s)

    def _send(self, sent: PendingMessage, silo: str, now_s: float) -> None:
        """Post an order or an evaluation, with what its silo needs to have the model."""
        if self._aggregator is None:
            raise PolicyError("a silo is to train before there is a model")
        before = [other.order for other in self.waiting if other.node == sent.node and other.request != sent.request]
        rounds = {order.round: order.base_version for order in before if order is not None and not order.apart}
        if rounds and not sent.again:
            # That is what it holds when it comes to this.
            self._aggregator.holds(silo, rounds[max(rounds)])
        self._post(sent, sent.request, self._payload(self._aggregator, sent.request, silo), now_s)

    @staticmethod
    def _payload(aggregator: DurableAggregator, request: Request, silo: str) -> Payload:
        match request:
            case Train(order) if order.apart:
                return aggregator.apart(order)
            case EvaluateModel(owner=owner) if owner:
                return aggregator.own(owner)
            case EvaluateModel(subject=subject) if subject.own and not aggregator.seals_figures:
                return NO_PAYLOAD
            case EvaluateModel(subject=subject):
                return aggregator.outgoing(silo, subject)
            case _:
                return aggregator.outgoing(silo, Subject.LAST)

    def _ticket(self, sent: PendingMessage) -> Ticket | None:
        """Where an answer may be left that is larger than what goes into a message anyway."""
        most = self._most_bytes(sent.request)
        large = isinstance(sent.request, Train | AskModel | AskSnapshot) and most > payloads.SMALL_BYTES
        if self._parcels is None or not large:
            return None
        what = sent.order.update_id if sent.order is not None else type(sent.request).__name__
        return self._parcels.expect(sent.node, what, most)

    def _post(self, sent: PendingMessage, request: Request, payload: Payload | None, now_s: float) -> None:
        """Post what is asked for again if it has no answer; an order has one when its silo reports at the latest."""
        sent = replace(sent, ask_s=now_s + self._patience_s(sent), sent_s=None if sent.queued else now_s)
        left_s = max(min(sent.due_s - now_s, self._timing.order_timeout_s), _LEAST_S)
        if sent.node in self._nodes.regions:
            self._posted.append((sent, self._message(sent, request, payload, left_s)))
            return
        packed = None if payload is None else self._packer.pack(payload, fetches=sent.node in self._fetching)
        parcel = packed.digest if isinstance(packed, Parcel) else ""
        sent = replace(sent, parcel=parcel, ticket=self._ticket(sent))
        self._posted.append((sent, messages.request(sent.node, self._spec, request, packed, left_s, sent.ticket)))

    def _patience_s(self, sent: PendingMessage) -> float:
        """How long an answer is waited for before it is asked for again."""
        patience_s = self._timing.patience_s(sent.asked) + (0.0 if sent.order is None else self._report_s)
        return max(patience_s, self._answer_times.patience_s)

    def _message(
        self, sent: PendingMessage, request: Request, payload: Payload | None, left_s: float
    ) -> Message | Letter:
        """A question with its bytes in it, or for a relay's bundle."""
        if sent.node not in self._nodes.regions:
            return messages.request(
                sent.node, self._spec, request, None if payload is None else payloads.pack(payload), left_s
            )
        letter = Letter(write_request(request), payload, self._most_bytes(sent.request), left_s)
        if sent.order is None or sent.order.apart or self._aggregator is None:
            return letter
        examples = self._nodes.examples.get(self._nodes.sender(sent.node), 1)
        in_sum = -(-self._aggregator.sum_bytes(2) // 2)
        return replace(letter, update_id=sent.order.update_id, examples=examples, in_sum=in_sum)

    # What is waited for.

    @property
    def waiting(self) -> Sequence[PendingMessage]:
        return [*self._sent.values(), *(sent for sent, _ in self._posted)]

    def halt(self, update_id: str) -> bool:
        """Mark an order that has no answer yet; False if there is none."""
        found = any(sent.asks_for(update_id) for sent in self.waiting)
        self._change(lambda sent: replace(sent, halt=True) if sent.asks_for(update_id) else sent)
        return found

    def _change(self, change: Callable[[PendingMessage], PendingMessage]) -> None:
        self._sent = {identifier: change(sent) for identifier, sent in self._sent.items()}
        self._posted = [(change(sent), message) for sent, message in self._posted]

    def flush(self) -> list[PendingMessage]:
        """Push what was posted; returns those whose node the SuperLink does not know any more."""
        self._tidy_up()
        lost = self._bundle([(sent, letter) for sent, letter in self._posted if isinstance(letter, Letter)])
        posted = [(sent, message) for sent, message in self._posted if isinstance(message, Message)]
        self._posted = []
        while posted:
            count = messages.together([message for _, message in posted])
            pushed, posted = posted[:count], posted[count:]
            found = iter(self._grid.push_messages([message for _, message in pushed]))
            for sent, _ in pushed:
                identifier = next(found, "")  # there are none at all where Flower finds it too large
                if identifier:
                    self._sent[identifier] = sent
                else:
                    lost.append(sent)
        return lost

    def _bundle(self, letters: Sequence[tuple[PendingMessage, Letter]]) -> list[PendingMessage]:
        """Send what is for silos behind relays; returns those whose relay is gone."""
        regions, lost = self._nodes.regions, []
        told = [(sent.node, letter) for sent, letter in letters]
        named = regions.push(self._grid, self._spec, told, self._fetching, self._parcels)
        for (sent, _), number in zip(letters, named, strict=True):
            if number is None:
                lost.append(sent)
            else:
                self._sent[number] = sent
        return lost

    def _tidy_up(self) -> None:
        """Keep at the gate what messages under way speak of."""
        if self._parcels is None:
            return
        digests = {sent.parcel for sent in self.waiting} | self._packer.digests
        tickets = {(sent.node, sent.ticket.name) for sent in self.waiting if sent.ticket is not None}
        more = self._nodes.regions.parcels
        self._parcels.keep(digests | more[0], tickets | more[1])

    def wait(self, seconds: float) -> None:
        """Wait for answers, so long at most."""
        self._arrivals.wait(seconds)

    def replies(self, now_s: float) -> list[tuple[PendingMessage, Arrival]]:
        """Answers that have come, each with what it answers; those to what is forgotten are left out."""
        regions, found = self._nodes.regions, list[tuple[PendingMessage | None, Arrival]]()
        alone = {identifier: sent for identifier, sent in self._sent.items() if sent.node not in regions}
        most = {identifier: self._most_bytes(sent.request) for identifier, sent in alone.items()} | regions.most
        for arrival in self._arrivals.pull({identifier: BESIDE + nbytes for identifier, nbytes in most.items()}):
            relayed = regions.unpack(arrival, self._sent, self._aggregator, self._parcels)
            if relayed is not None:
                found += [(self._end(each.answers), each) for each in relayed if not self._again(each)]
            elif (sent := self._end(arrival.answers)) is not None and not self._is_relay(sent, arrival):
                if sent.sent_s is not None:
                    self._answer_times.answered(now_s - sent.sent_s)
                found.append((sent, arrival))
        return [(sent, arrival) for sent, arrival in found if sent is not None]

    def _again(self, answer: Relayed) -> bool:
        """Whether an answer has to be asked for once more, which is done at once."""
        if answer.again and (sent := self._sent.get(answer.answers)) is not None:
            self._sent[answer.answers] = replace(sent, ask_s=-inf)
        return answer.again

    def _is_relay(self, sent: PendingMessage, arrival: Arrival) -> bool:
        """Whether a node that was asked for the first time has said that it is a relay."""
        if arrival.content is None or not messages.is_relay(arrival.content):
            return False
        try:
            self._nodes.relay(sent.node, arrival)
        except ProtocolError as error:
            logger.warning("refused: %s", error)
            self._nodes.ask_again(sent.node)
        return True

    def read(self, sent: PendingMessage, arrival: Arrival) -> tuple[Reply, Payload | None]:
        """The reply in an answer, and the bytes beside it, uint8.

        Raises:
            ProtocolError: there is none, or the silo sent something else.
        """
        name = self._nodes.sender(sent.node)
        most = MAX_LAYOUT_TEXT if isinstance(sent.request, AskModel) else MAX_TEXT
        if isinstance(arrival, Relayed) and not arrival.problem:
            return read_reply(arrival.text, name, most), arrival.payload
        if arrival.content is None:
            if isinstance(sent.request, Describe | AskModel) and arrival.code in APP_ERRORS:
                raise AnotherApp(name, arrival.problem, arrival.code)
            raise ProtocolError(name, "answer", arrival.problem)
        (self._fetching.add if messages.fetches(arrival.content) else self._fetching.discard)(sent.node)
        reply, payload = messages.read_answer(arrival.content, name, self._most_bytes(sent.request), most)
        uploaded = messages.read_uploaded(arrival.content, name)
        if uploaded is not None:
            if self._parcels is None or sent.ticket is None:
                raise ProtocolError(name, "upload", "nobody expects it")
            payload = self._parcels.arrived(sent.node, sent.ticket, uploaded, name)
        return reply, payload

    def _most_bytes(self, request: Request) -> int:
        """Bytes that may come beside a reply."""
        match request:
            case Train(order) if self._aggregator is not None and not order.apart:
                return self._aggregator.upload_bytes
            case Train(order) if order.share:
                return self._model_bytes
            case AskSnapshot() if self._aggregator is not None:
                return self._aggregator.snapshot_bytes
            case AskModel():
                return self._model_bytes + _SMALL_ANSWER_BYTES
            case _:
                return _SMALL_ANSWER_BYTES

    def overdue(self, now_s: float) -> list[PendingMessage]:
        """Those that nobody has answered in time; an answer that still comes is not looked at."""
        late = [identifier for identifier, sent in self._sent.items() if sent.due_s <= now_s]
        return [sent for identifier in late if (sent := self._end(identifier)) is not None]

    def unanswered(self, now_s: float) -> list[PendingMessage]:
        """Those to ask for again, which they are not a second time, nor while they wait at the SuperLink."""
        soon = [identifier for identifier, sent in self._sent.items() if sent.ask_s <= now_s + _SOON_S]
        if not any(self._sent[identifier].ask_s <= now_s for identifier in soon):
            return []
        for identifier in self._arrivals.waiting(soon):
            sent = self._sent[identifier]
            self._sent[identifier] = replace(sent, ask_s=now_s + self._patience_s(sent))
        quiet = [identifier for identifier in soon if self._sent[identifier].ask_s <= now_s]
        for identifier in quiet:
            sent = self._sent[identifier]
            self._sent[identifier] = replace(sent, ask_s=inf, asked=sent.asked + 1)
        return [self._sent[identifier] for identifier in quiet]

    def _end(self, identifier: str) -> PendingMessage | None:
        """What was sent needs no answer any more, nor does what asked for the same since."""
        sent = self._sent.pop(identifier, None)
        if sent is not None and sent.asked:
            self._sent = {each: other for each, other in self._sent.items() if not sent.is_like(other)}
            self._posted = [(other, message) for other, message in self._posted if not sent.is_like(other)]
        return sent

    def forget(self, node: int) -> None:
        self._sent = {identifier: sent for identifier, sent in self._sent.items() if sent.node != node}
        self._posted = [(sent, message) for sent, message in self._posted if sent.node != node]
