"""A question of the server's that waits for its answer; `fedsync.server.outbox` has its states."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fedsync.core.orders import WorkOrder
from fedsync.silo.protocol import EvaluateModel, Request, Train


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """A request that waits for its reply.

    Args:
        node: that it went to.
        request: whose reply is waited for, also where a `Collect` asks for it.
        due_s: when nobody waits for it any more.
        end_s: an order has failed then, however far it is.
        steps: of an order in work, that are known to be done.
        sent_s: when it was posted; None where nobody wants to know how long its answer takes.
        ask_s: when it is asked for again.
        asked: how often it was.
        collecting: the order was asked for since it was sent.
        halt: its silo should stop and send what it has.
        again: it was sent before, with what did not fit the version of the model that the silo keeps.
        queued: its silo has another order before it, which is not over; so it is not overdue at any time.
    """

    node: int
    request: Request
    due_s: float
    end_s: float = inf
    steps: int = 0
    sent_s: float | None = None
    ask_s: float = inf
    asked: int = 0
    collecting: bool = False
    halt: bool = False
    again: bool = False
    queued: bool = False

    @property
    def order(self) -> WorkOrder | None:
        """The order that it is, or None."""
        return self.request.order if isinstance(self.request, Train) else None

    @property
    def works(self) -> bool:
        return isinstance(self.request, Train | EvaluateModel)

    def asks_for(self, update_id: str) -> bool:
        """Whether it is the order for this update."""
        return isinstance(self.request, Train) and self.request.order.update_id == update_id

    def is_like(self, other: PendingMessage) -> bool:
        """Whether both have the same answer."""
        return (self.node, self.request) == (other.node, other.request)
