"""Outbox of the server: requests to silos that are posted or wait for replies, with retries and timeouts.

| message | until | then |
|---|---|---|
| posted | `flush` | waiting; or lost at once, if its node is unknown |
| waiting | its reply arrives | answered; retries of the same request are forgotten |
| waiting | ``ask_s``, and at least twice the usual response time | waiting, and retried, with a longer wait each time |
| waiting | ``ask_s``, but the transport cannot have lost it | waiting for the same time again |
| waiting | ``due_s`` | overdue; a late reply is ignored |
| any | its node is gone | forgotten |

A retry of an order (training request) is a `Collect`, repeated until the order is done. Any other request is sent
again. Requests to silos behind a relay are bundled (`fedsync.extras.relays.region_clients`), but each waits for its own
reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Literal

from fedsync.common.errors import PolicyError, ProtocolError
from fedsync.core.orders import Subject, WorkOrder
from fedsync.model.transfer import MAX_SEALED_BYTES, NO_PAYLOAD, DurableAggregator, Payload
from fedsync.server.nodes import APP_ERRORS, AnotherApp, Nodes
from fedsync.server.timeouts import AnswerTimes, Timeouts
from fedsync.silo import protocol
from fedsync.transport.port import SiloAnswer, SiloQuestion, Transport

if TYPE_CHECKING:
    from fedsync.extras.relays.region_clients import RelayedRequest


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """Request that waits for its reply; the module has its states. Times are seconds by the driver's clock.

    Args:
        request: the original request, also if a `Collect` asks for its reply.
        due_s: time at which the request is overdue; at ``end_s``, an order has failed even if it makes progress.
        steps: steps of an order that are reported as done.
        sent_s: time of sending; None if the response time is not measured.
        ask_s: time of the next retry; ``asked`` is the number of retries so far.
        collecting: whether the order was asked for after it was sent.
        halt: whether the silo should stop and send its update.
        again: whether the request is a retry after its payload did not fit the silo's version of the model.
    """

    node: int
    request: protocol.Request
    due_s: float
    end_s: float = inf
    steps: int = 0
    sent_s: float | None = None
    ask_s: float = inf
    asked: int = 0
    collecting: bool = False
    halt: bool = False
    again: bool = False

    @property
    def order(self) -> WorkOrder | None:
        return self.request.order if isinstance(self.request, protocol.Train) else None

    def is_like(self, other: PendingMessage) -> bool:
        return (self.node, self.request) == (other.node, other.request)


_QUESTION_S = 60.0
_LEAST_S = 1.0
_SOON_S = 5.0
"""Time [s]: retries that are due this soon are made together with retries that are due now."""

_SMALL_ANSWER_BYTES = 2**20
"""Maximum payload of a reply without a model: an encrypted chunk and its header, or a silo's share of masks."""


class Outbox:
    """Outbox of one run: makes requests, and keeps them until they are answered.

    Requests are sent only by `flush`, so that the state on which they depend can be written to disk before. ``spec`` is
    the run's specification as JSON, ``report_s`` the interval of progress reports; ``aggregator`` is None before there
    is a model; ``model_bytes`` is the size of the model.
    """

    def __init__(
        self,
        transport: Transport,
        nodes: Nodes,
        spec: str,
        timing: Timeouts,
        report_s: float,
        aggregator: DurableAggregator | None = None,
        model_bytes: int = MAX_SEALED_BYTES,
    ) -> None:
        self._transport, self._nodes, self._spec = transport, nodes, spec
        self._timing, self._report_s = timing, report_s
        self._aggregator, self._model_bytes = aggregator, model_bytes
        self._answer_times = AnswerTimes(timing.ask_s)
        self._posted: list[tuple[PendingMessage, SiloQuestion | RelayedRequest]] = []
        self._sent: dict[str, PendingMessage] = {}
        self._snapshots = 0

    # Requests.

    def ask(self, node: int, request: protocol.Request, now_s: float) -> None:
        self._post(PendingMessage(node, request, now_s + self._timing.order_timeout_s), request, None, now_s)

    def train(self, silo: str, order: WorkOrder, now_s: float) -> None:
        due_s, end_s = self._timing.order_until(now_s)
        node, request = self._nodes.by_name[silo], protocol.Train(order, self._report_s)
        self._send(PendingMessage(node, request, due_s, end_s), silo, now_s)

    def evaluate(self, silo: str, request: protocol.EvaluateModel, now_s: float) -> None:
        due_s = now_s + self._timing.order_timeout_s
        self._send(PendingMessage(self._nodes.by_name[silo], request, due_s), silo, now_s)

    def repeat(self, sent: PendingMessage, silo: str, now_s: float) -> None:
        """Send an order or an evaluation again, with the payload that the aggregator now knows the silo needs."""
        self._send(replace(sent, again=True), silo, now_s)

    def collect(self, sent: PendingMessage, order: WorkOrder, now_s: float) -> None:
        """Ask for the result of an order in progress; the request also carries a halt."""
        request = protocol.Collect(order.update_id, self._report_s, sent.halt)
        self._post(replace(sent, collecting=True), request, None, now_s)

    def snapshot(self, now_s: float) -> None:
        """Request an encrypted model if wanted and not pending, from each silo in turn: a silo may send one that no
        joining silo accepts.
        """
        here, asked = self._nodes.by_name, protocol.AskSnapshot()
        if self._aggregator is None or not self._aggregator.wants_snapshot or not here:
            return
        if not any(sent.request == asked for sent in self.waiting):
            self._snapshots += 1
            self.ask(here[sorted(here)[self._snapshots % len(here)]], asked, now_s)

    def questions(self, now_s: float) -> None:
        """Post the aggregator's questions to silos, which block the last commit; each is asked once."""
        if self._aggregator is None:
            return
        while questions := self._aggregator.questions():
            for silo, question in questions.items():
                node = self._nodes.by_name.get(silo)
                if node is None:
                    self._aggregator.give_up(silo)  # the aggregator may ask other silos instead
                    continue
                timeout_s = min(_QUESTION_S, self._timing.order_timeout_s)
                sent = PendingMessage(node, protocol.Question(), now_s + timeout_s)
                self._posted.append((sent, self._message(sent, protocol.Question(), question, timeout_s)))

    def ask_again(self, sent: PendingMessage, now_s: float) -> None:
        """Retry a request: a message on a broken connection is lost, although it counted as delivered."""
        match sent.request:
            case protocol.Train(order):
                self.collect(sent, order, now_s)
            case protocol.EvaluateModel():
                self._send(sent, self._nodes.sender(sent.node), now_s)
            case request:
                self._post(sent, request, None, now_s)

    def _send(self, sent: PendingMessage, silo: str, now_s: float) -> None:
        if self._aggregator is None:
            raise PolicyError("a silo is to train before there is a model")
        before = [other.order for other in self.waiting if other.node == sent.node and other.request != sent.request]
        rounds = {order.round: order.base_version for order in before if order is not None and not order.apart}
        if rounds and not sent.again:
            # The silo will hold this version when it reaches the new request.
            self._aggregator.holds(silo, rounds[max(rounds)])
        self._post(sent, sent.request, self._payload(self._aggregator, sent.request, silo), now_s)

    @staticmethod
    def _payload(aggregator: DurableAggregator, request: protocol.Request, silo: str) -> Payload:
        match request:
            case protocol.Train(order) if order.apart:
                return aggregator.apart(order)
            case protocol.EvaluateModel(owner=owner) if owner:
                return aggregator.own(owner)
            case protocol.EvaluateModel(subject=subject) if subject.own and not aggregator.seals_figures:
                return NO_PAYLOAD
            case protocol.EvaluateModel(subject=subject):
                return aggregator.outgoing(silo, subject)
            case _:
                return aggregator.outgoing(silo, Subject.LAST)

    def _post(self, sent: PendingMessage, request: protocol.Request, payload: Payload | None, now_s: float) -> None:
        """Post a request that is retried if unanswered; for an order, a progress report also counts as an answer."""
        sent = replace(sent, ask_s=now_s + self._patience_s(sent), sent_s=now_s)
        left_s = max(sent.due_s - now_s, _LEAST_S)
        self._posted.append((sent, self._message(sent, request, payload, left_s)))

    def _patience_s(self, sent: PendingMessage) -> float:
        patience_s = self._timing.patience_s(sent.asked) + (0.0 if sent.order is None else self._report_s)
        return max(patience_s, self._answer_times.patience_s)

    def _message(
        self, sent: PendingMessage, request: protocol.Request, payload: Payload | None, left_s: float
    ) -> SiloQuestion | RelayedRequest:
        """Return a question with its payload; for a silo behind a relay, as a part of the relay's bundle."""
        if not self._nodes.is_relayed(sent.node):
            most = self._most_bytes(sent.request)
            return SiloQuestion(protocol.write_request(request), payload, most, self._spec, kind_of(request), left_s)
        from fedsync.extras.relays.region_clients import RelayedRequest

        letter = RelayedRequest(protocol.write_request(request), payload, self._most_bytes(sent.request), left_s)
        if sent.order is None or sent.order.apart or self._aggregator is None:
            return letter
        examples = self._nodes.examples.get(self._nodes.sender(sent.node), 1)
        in_sum = -(-self._aggregator.sum_bytes(2) // 2)
        return replace(letter, update_id=sent.order.update_id, examples=examples, in_sum=in_sum)

    # Replies.

    @property
    def waiting(self) -> Sequence[PendingMessage]:
        return [*self._sent.values(), *(sent for sent, _ in self._posted)]

    def halt(self, update_id: str) -> bool:
        def halted(sent: PendingMessage) -> PendingMessage:
            return replace(sent, halt=True) if sent in asked else sent

        asked = [sent for sent in self.waiting if sent.order is not None and sent.order.update_id == update_id]
        self._sent = {identifier: halted(sent) for identifier, sent in self._sent.items()}
        self._posted = [(halted(sent), message) for sent, message in self._posted]
        return bool(asked)

    def flush(self) -> list[PendingMessage]:
        """Send posted messages; return those whose node is unknown."""
        regions = self._nodes.regions
        self._transport.keep(set(self._sent) if regions is None else {*self._sent, *regions.bundles})
        posted, self._posted = self._posted, []
        letters = [(sent, each) for sent, each in posted if not isinstance(each, SiloQuestion)]
        alone = [(sent, each) for sent, each in posted if isinstance(each, SiloQuestion)]
        named = list[str | None]()
        if regions is not None:
            named += regions.push(self._transport, self._spec, [(sent.node, letter) for sent, letter in letters])
        named += self._transport.send([(sent.node, question) for sent, question in alone])
        lost = []
        for (sent, _), name in zip([*letters, *alone], named, strict=True):
            if name is None:
                lost.append(sent)
            else:
                self._sent[name] = sent
        return lost

    def wait(self, seconds: float) -> None:
        self._transport.wait(seconds)

    def replies(self, now_s: float) -> list[tuple[PendingMessage, SiloAnswer]]:
        regions, found = self._nodes.regions, list[tuple[PendingMessage | None, SiloAnswer]]()
        for answer in self._transport.receive():
            relayed = None if regions is None else regions.unpack(answer, self._sent, self._aggregator)
            if relayed is not None:
                found += [(self._end(each.name), each) for each in relayed if not self._again(each)]
            elif (sent := self._end(answer.name)) is not None and not self._is_relay(sent, answer):
                if sent.sent_s is not None:
                    self._answer_times.answered(now_s - sent.sent_s)
                found.append((sent, answer))
        return [(sent, answer) for sent, answer in found if sent is not None]

    def _again(self, answer: SiloAnswer) -> bool:
        if answer.again and (sent := self._sent.get(answer.name)) is not None:
            self._sent[answer.name] = replace(sent, ask_s=-inf)
        return answer.again

    def _is_relay(self, sent: PendingMessage, answer: SiloAnswer) -> bool:
        if not answer.relay:
            return False
        try:
            self._nodes.relay(sent.node, answer)
        except ProtocolError as error:
            self._nodes.ask_again(sent.node, error)
        return True

    def read(self, sent: PendingMessage, answer: SiloAnswer) -> tuple[protocol.Reply, Payload | None]:
        """Parse an answer; return the reply and its payload, uint8; `ProtocolError` if it is an error or invalid."""
        name = self._nodes.sender(sent.node)
        if answer.problem:
            if isinstance(sent.request, protocol.Describe | protocol.AskModel) and answer.code in APP_ERRORS:
                raise AnotherApp(name, answer.problem, answer.code)
            raise ProtocolError(name, answer.check, answer.problem)
        return protocol.read_reply(answer.text, name, protocol.most_text(sent.request)), answer.payload

    def _most_bytes(self, request: protocol.Request) -> int:
        match request:
            case protocol.Train(order) if self._aggregator is not None and not order.apart:
                return self._aggregator.upload_bytes
            case protocol.Train(order) if order.share:
                return self._model_bytes
            case protocol.AskSnapshot() if self._aggregator is not None:
                return self._aggregator.snapshot_bytes
            case protocol.AskModel():
                return self._model_bytes + _SMALL_ANSWER_BYTES
            case _:
                return _SMALL_ANSWER_BYTES

    def overdue(self, now_s: float) -> list[PendingMessage]:
        """Remove and return the requests that are overdue; later answers to them are ignored."""
        late = [identifier for identifier, sent in self._sent.items() if sent.due_s <= now_s]
        return [sent for identifier in late if (sent := self._end(identifier)) is not None]

    def unanswered(self, now_s: float) -> list[PendingMessage]:
        """Return requests to retry, each once, and none that the transport still holds."""
        soon = [identifier for identifier, sent in self._sent.items() if sent.ask_s <= now_s + _SOON_S]
        if not any(self._sent[identifier].ask_s <= now_s for identifier in soon):
            return []
        for identifier in self._transport.waiting(soon):
            sent = self._sent[identifier]
            self._sent[identifier] = replace(sent, ask_s=now_s + self._patience_s(sent))
        quiet = [identifier for identifier in soon if self._sent[identifier].ask_s <= now_s]
        for identifier in quiet:
            sent = self._sent[identifier]
            self._sent[identifier] = replace(sent, ask_s=inf, asked=sent.asked + 1)
        return [self._sent[identifier] for identifier in quiet]

    def _end(self, identifier: str) -> PendingMessage | None:
        """Remove a request that needs no reply any more, and the retries of the same request."""
        sent = self._sent.pop(identifier, None)
        if sent is not None and sent.asked:
            self._sent = {each: other for each, other in self._sent.items() if not sent.is_like(other)}
            self._posted = [(other, message) for other, message in self._posted if not sent.is_like(other)]
        return sent

    def forget(self, node: int) -> None:
        self._sent = {identifier: sent for identifier, sent in self._sent.items() if sent.node != node}
        self._posted = [(sent, message) for sent, message in self._posted if sent.node != node]


_KINDS: dict[type, Literal["train", "evaluate"]] = {protocol.Train: "train", protocol.EvaluateModel: "evaluate"}


def kind_of(request: protocol.Request) -> Literal["query", "train", "evaluate"]:
    return _KINDS.get(type(request), "query")
