"""What the server has sent and waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from flwr.app import Message
from flwr.serverapp import Grid

from fedsync.core.orders import WorkOrder
from fedsync.flower.internals.pull import BESIDE, Arrival, Arrivals


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A message that waits for its answer. ``order`` for TRAIN, ``version`` for EVALUATE, neither for a QUERY.

    ``again`` says that it was sent before, with what did not fit the version of the model that the silo keeps. A
    ``question`` is what a `Aggregator` wants to know of silos. Of an order in work ``steps`` are known to be done, and
    it has failed at ``end_s``, however far it is; ``collecting`` says that it was asked for since, and ``halt`` that
    its silo should stop and send what it has.

    A message that is not answered by ``ask_s`` is asked for again; ``asked`` counts how often it was.
    """

    node: int
    due_s: float
    end_s: float = inf
    steps: int = 0
    ask_s: float = inf
    asked: int = 0
    collecting: bool = False
    halt: bool = False
    order: WorkOrder | None = None
    version: int | None = None
    snapshot: bool = False
    question: bool = False
    again: bool = False

    @property
    def works(self) -> bool:
        """Whether a silo is at work on it."""
        return self.order is not None or self.version is not None

    def asks_for(self, update_id: str) -> bool:
        """Whether it is the order for this update."""
        return self.order is not None and self.order.update_id == update_id

    @property
    def about(self) -> tuple[int, str, int | None, bool, bool]:
        """The same for all messages that have the same answer."""
        return self.node, "" if self.order is None else self.order.update_id, self.version, self.snapshot, self.question

    def most(self, update_bytes: int, model_bytes: int) -> int:
        """Bytes that its answer may have, where an update and a model have at most so many."""
        return BESIDE + (update_bytes if self.order is not None else model_bytes if self.snapshot else 0)


class Outbox:
    """Messages on their way. They go out when told to, so that what they are made of can be put on disk before.

    Args:
        grid: of Flower.
        update_bytes: size of an update as it travels.
        model_bytes: size of the model.
    """

    def __init__(self, grid: Grid, update_bytes: int, model_bytes: int) -> None:
        self._grid = grid
        self._sizes = update_bytes, model_bytes
        self._arrivals = Arrivals(grid)
        self._outbox: list[tuple[PendingMessage, Message]] = []
        self._sent: dict[str, PendingMessage] = {}

    @property
    def waiting(self) -> Sequence[PendingMessage]:
        """All that have no answer yet."""
        return [*self._sent.values(), *(sent for sent, _ in self._outbox)]

    def post(self, sent: PendingMessage, message: Message) -> None:
        """Have a message go out with the next `flush`."""
        self._outbox.append((sent, message))

    def halt(self, update_id: str) -> bool:
        """Mark an order that has no answer yet; False if there is none."""
        found = False
        for identifier, sent in self._sent.items():
            if sent.asks_for(update_id):
                self._sent[identifier] = replace(sent, halt=True)
                found = True
        for place, (sent, message) in enumerate(self._outbox):
            if sent.asks_for(update_id):
                self._outbox[place] = replace(sent, halt=True), message
                found = True
        return found

    def flush(self) -> list[PendingMessage]:
        """Push what was posted; returns those whose node the SuperLink does not know any more."""
        lost = []
        outbox, self._outbox = self._outbox, []
        for sent, message in outbox:
            identifier = next(iter(self._grid.push_messages([message])), "")
            if identifier:
                self._sent[identifier] = sent
            else:
                lost.append(sent)
        return lost

    def replies(self) -> list[tuple[PendingMessage, Arrival]]:
        """Answers that have come, each with what it answers; those to what is forgotten are left out."""
        most = {identifier: sent.most(*self._sizes) for identifier, sent in self._sent.items()}
        answered = [(self._end(arrival.answers), arrival) for arrival in self._arrivals.pull(most)]
        return [(sent, arrival) for sent, arrival in answered if sent is not None]

    def overdue(self, now_s: float) -> list[PendingMessage]:
        """Those that nobody has answered in time; an answer that still comes is not looked at."""
        late = [identifier for identifier, sent in self._sent.items() if sent.due_s <= now_s]
        return [sent for identifier in late if (sent := self._end(identifier)) is not None]

    def unanswered(self, now_s: float) -> list[PendingMessage]:
        """Those to ask for again, which they are not a second time."""
        quiet = [identifier for identifier, sent in self._sent.items() if sent.ask_s <= now_s]
        for identifier in quiet:
            sent = self._sent[identifier]
            self._sent[identifier] = replace(sent, ask_s=inf, asked=sent.asked + 1)
        return [self._sent[identifier] for identifier in quiet]

    def _end(self, identifier: str) -> PendingMessage | None:
        """What was sent needs no answer any more, nor does what asked for the same since."""
        sent = self._sent.pop(identifier, None)
        if sent is not None and sent.asked:
            about = sent.about
            self._sent = {each: other for each, other in self._sent.items() if other.about != about}
            self._outbox = [(other, message) for other, message in self._outbox if other.about != about]
        return sent

    def forget(self, node: int) -> None:
        """A node is gone: it answers nothing."""
        self._sent = {identifier: sent for identifier, sent in self._sent.items() if sent.node != node}
        self._outbox = [(sent, message) for sent, message in self._outbox if sent.node != node]
