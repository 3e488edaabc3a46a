"""Request that waits for its reply; `fedsync.server.outbox` defines its states."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fedsync.core.orders import WorkOrder
from fedsync.silo.protocol import EvaluateModel, Request, Train


@dataclass(frozen=True, slots=True)
class PendingMessage:
    """Request that waits for its reply.

    Args:
        node: destination node.
        request: the original request, also if a `Collect` asks for its reply.
        due_s: time at which the request is overdue.
        end_s: time at which an order has failed, even if it makes progress.
        steps: steps of an order that are reported as done.
        sent_s: time of sending; None if the response time is not measured.
        ask_s: time of the next retry.
        asked: number of retries.
        collecting: whether the order was asked for after it was sent.
        halt: whether the silo should stop and send its update.
        again: whether the request is a retry after its payload did not fit the silo's version of the model.
        queued: whether the silo has an unfinished order before this order; then the request is never overdue.
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
        return self.request.order if isinstance(self.request, Train) else None

    @property
    def works(self) -> bool:
        return isinstance(self.request, Train | EvaluateModel)

    def asks_for(self, update_id: str) -> bool:
        """Whether the request is the order for this update."""
        return isinstance(self.request, Train) and self.request.order.update_id == update_id

    def is_like(self, other: PendingMessage) -> bool:
        """Whether both requests have the same reply."""
        return (self.node, self.request) == (other.node, other.request)
