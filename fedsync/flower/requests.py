"""What the server asks of silos, and until when it waits for an answer."""

from __future__ import annotations

from dataclasses import replace

from flwr.app import Message

from fedsync.core.orders import WorkOrder
from fedsync.core.transfer import DurableAggregator, Payload
from fedsync.flower import messages, payloads
from fedsync.flower.nodes import Nodes
from fedsync.flower.outbox import Outbox, PendingMessage
from fedsync.flower.timeouts import Timeouts

_QUESTION_S = 60.0
_LEAST_S = 1.0
_MOST_DOUBLINGS = 6


class Requests:
    """Makes the messages of one run and posts them; times are those of the driver's clock, in seconds.

    Args:
        mail: takes them.
        nodes: which node is which silo.
        store: knows what each silo needs to have the current model, and what it wants to know of silos.
        spec: the run's specification as JSON, for the silos.
        timing: how long to wait.
        report_s: after so long silos say how far an order in work is.
    """

    def __init__(
        self, mail: Outbox, nodes: Nodes, aggregator: DurableAggregator, spec: str, timing: Timeouts, report_s: float
    ) -> None:
        self._mail = mail
        self._nodes = nodes
        self._aggregator = aggregator
        self._spec = spec
        self._timing = timing
        self._report_s = report_s
        self._packed: tuple[Payload, payloads.Packed] | None = None

    def greet(self, node: int, now_s: float) -> None:
        """Ask a node who it is."""
        self._query(PendingMessage(node, now_s + self._timing.order_timeout_s), now_s)

    def train(self, silo: str, order: WorkOrder, now_s: float) -> None:
        """Have a silo train."""
        due_s, end_s = self._timing.order_until(now_s)
        self._send(PendingMessage(self._nodes.by_name[silo], due_s, end_s, order=order), silo, now_s)

    def evaluate(self, silo: str, version: int, now_s: float) -> None:
        """Have a silo score the current model, which is ``version``."""
        self._send(
            PendingMessage(self._nodes.by_name[silo], now_s + self._timing.order_timeout_s, version=version),
            silo,
            now_s,
        )

    def repeat(self, sent: PendingMessage, silo: str, now_s: float) -> None:
        """Send an order or an evaluation once more, with what the store now knows that the silo needs."""
        self._send(replace(sent, again=True), silo, now_s)

    def collect(self, sent: PendingMessage, order: WorkOrder, now_s: float) -> None:
        """Ask for an order in work, which is also the way for the word to stop."""
        sent, request = replace(sent, collecting=True), messages.Collect(order.update_id, self._report_s, sent.halt)
        self._post(sent, messages.collect(sent.node, self._spec, request, max(sent.due_s - now_s, _LEAST_S)), now_s)

    def ask_again(self, sent: PendingMessage, silo: str, now_s: float) -> None:
        """Ask for the answer to what was sent: where a line breaks, a message is lost that was taken for delivered."""
        if sent.order is not None:
            self.collect(sent, sent.order, now_s)
        elif sent.version is not None:
            self._send(sent, silo, now_s)
        else:
            self._query(sent, now_s)

    def snapshot(self, answered: str, now_s: float) -> None:
        """Ask for a sealed model if the store wants one and none is under way: ``answered`` if it is here, else any."""
        if not self._aggregator.wants_snapshot or any(sent.snapshot for sent in self._mail.waiting):
            return
        if not self._nodes.by_name:
            return
        node = self._nodes.by_name.get(answered) or next(iter(self._nodes.by_name.values()))
        self._query(PendingMessage(node, now_s + self._timing.order_timeout_s, snapshot=True), now_s)

    def questions(self, now_s: float) -> None:
        """Ask what the store wants to know of silos before the last commit counts."""
        for silo, question in self._aggregator.questions().items():
            node = self._nodes.by_name.get(silo)
            if node is None:
                self._aggregator.give_up(silo)
                return
            timeout_s = min(_QUESTION_S, self._timing.order_timeout_s)
            sent = PendingMessage(node, now_s + timeout_s, question=True)
            self._mail.post(sent, messages.ask(node, self._spec, payloads.pack(question), timeout_s))

    def _send(self, sent: PendingMessage, silo: str, now_s: float) -> None:
        """Post an order or an evaluation, with what its silo needs to have the current model."""
        left_s, received = max(sent.due_s - now_s, _LEAST_S), self._outgoing(silo)
        if sent.order is not None:
            message = messages.train(sent.node, self._spec, sent.order, received, left_s, self._report_s)
        else:
            message = messages.evaluate(sent.node, self._spec, sent.version or 0, received, left_s)
        self._post(sent, message, now_s)

    def _query(self, sent: PendingMessage, now_s: float) -> None:
        """Post the question who a node is, or for its snapshot."""
        query = messages.query_snapshot if sent.snapshot else messages.query
        self._post(sent, query(sent.node, self._spec, max(sent.due_s - now_s, _LEAST_S)), now_s)

    def _post(self, sent: PendingMessage, message: Message, now_s: float) -> None:
        """Post what is asked for again if it has no answer; an order has one when its silo reports at the latest."""
        patience_s = self._timing.ask_s * 2.0 ** min(sent.asked, _MOST_DOUBLINGS)
        if sent.order is not None:
            patience_s += self._report_s
        self._mail.post(replace(sent, ask_s=now_s + patience_s), message)

    def _outgoing(self, silo: str) -> payloads.Packed:
        """For the wire; made once where it is the same for all."""
        payload = self._aggregator.outgoing(silo)
        if self._packed is None or self._packed[0] is not payload:
            self._packed = payload, payloads.pack(payload)
        return self._packed[1]
