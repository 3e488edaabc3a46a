"""Queue of a trainer's orders (training requests): one running, at most one queued, and finished orders with results.

An order names the order that it is queued behind (`WorkOrder.behind`). So each order shows that the server expects two
orders: this order and the order before it. The queue keeps these two orders, whichever arrives first. It ends all other
orders, which the server no longer expects. The first order to arrive starts first: the other order may have been lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.model.transfer import OtherVersion, Payload, VersionMismatch
from fedsync.silo.protocol import Completed, InProgress
from fedsync.silo.session.order_results import LastOrder


class OrderJob:
    """One order: queued behind ``before``, running, or finished. Its thread writes it; request threads read it."""

    def __init__(self, order: WorkOrder, before: OrderJob | None = None) -> None:
        self.order = order
        self.before = before
        self.steps = 0
        self.halt = threading.Event()
        self.over = threading.Event()
        self.given_up = False
        self._ending = threading.Lock()
        self.outcome: Completed | VersionMismatch | None = None
        self.error: Exception | None = None

    @classmethod
    def of(cls, done: LastOrder) -> OrderJob:
        job = cls(done.order)
        job.outcome = done.answer
        job.over.set()
        return job

    @property
    def refused(self) -> bool:
        return isinstance(self.outcome, VersionMismatch)

    def watch(self, steps: int, samples: int) -> bool:
        if self.error is not None:  # clients know it as failed, so it must not end as done, nor give privacy back
            raise self.error
        self.steps = steps
        return not self.halt.is_set()

    def give_up(self) -> None:
        self.given_up = True
        self.halt.set()

    def end(self, outcome: Completed | VersionMismatch | None = None, error: Exception | None = None) -> None:
        with self._ending:
            if not self.over.is_set():
                self.outcome, self.error = outcome, error
                self.over.set()

    def reply(self, wait_s: float | None) -> tuple[WorkReport | VersionMismatch | InProgress, Payload | None]:
        """Return the result, or the progress after ``wait_s`` [s]; raise the error of the training."""
        if not self.over.wait(wait_s):
            return InProgress(self.steps, self.steps * self.order.batch_size), None
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        if isinstance(self.outcome, Completed):
            return self.outcome.report, self.outcome.update
        return self.outcome, None


class OrderQueue:
    """Queue that trains orders one after the other, each in its own thread; ``done`` has the newest order last."""

    def __init__(self, train: Callable[[OrderJob, Payload], Completed], done: Iterable[LastOrder]) -> None:
        self._train = train
        self._jobs = [OrderJob.of(last) for last in done]
        self._entrance = threading.Lock()

    @property
    def busy(self) -> bool:
        return any(not job.over.is_set() for job in self._jobs)

    def find(self, update_id: str) -> OrderJob | None:
        return next((job for job in self._jobs if job.order.update_id == update_id), None)

    def wait(self) -> None:
        for job in self._jobs:
            job.over.wait()

    def hang(self, job: OrderJob, error: Exception, holds: int) -> None:
        """End a hanging job with an error for its clients. The server repeats the queued orders, which never began."""
        with self._entrance:
            job.end(error=error)
            for other in self._jobs:
                other.end(VersionMismatch(holds))

    def enter(self, order: WorkOrder, received: Payload, accept: Callable[[bool], None]) -> OrderJob:
        """Begin or queue an order, unless the queue already has it; a refused order begins again.

        An order with a known id but other content counts as new: a restored server may reuse an id. ``accept`` raises
        if the silo's owner does not allow the order; its argument says whether the order was accepted before, and
        refused for its payload. `ProtocolError` if the silo would have three orders.
        """
        with self._entrance:
            known = self.find(order.update_id)
            again = known is not None and known.order == order
            if known is not None and again and not known.refused:
                return known
            kept = self._beside(order)
            accept(again)
            for other in self._jobs:
                if other not in kept:
                    other.give_up()
            job = OrderJob(order, self._jobs[-1] if self._jobs else None)
            self._jobs = [*kept, job]
            threading.Thread(target=self._work, args=(job, received), daemon=True).start()
            return job

    def _beside(self, order: WorkOrder) -> list[OrderJob]:
        others = [job for job in self._jobs if job.order.update_id != order.update_id]
        kept = [job for job in others if order.update_id == job.order.behind or job.order.update_id == order.behind]
        rivals = [job for job in others if order.behind and job.order.behind == order.behind and not job.over.is_set()]
        if len(kept) > 1 or rivals:
            raise ProtocolError(SERVER, "order", f"{order.update_id!r} would be the third that this silo has")
        return kept

    def _work(self, job: OrderJob, received: Payload) -> None:
        try:
            if job.before is not None:
                job.before.over.wait()
                job.before = None  # else the chain of all earlier jobs would stay in memory
            if job.given_up:
                raise ProtocolError(SERVER, "order", f"{job.order.update_id!r} was given up before it began")
            job.end(self._train(job, received))
        except OtherVersion as error:
            job.end(error.mismatch)
        except Exception as error:  # raised again in the requesting thread
            job.end(error=error)
