"""Current order (training request) of a trainer: running, finished with its result, or about to begin.

A new order supersedes the order before it, whose result the server no longer expects: the older order ends after its
current step, and the new order begins then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.model.transfer import OtherVersion, Payload, VersionMismatch
from fedsync.silo.protocol import Completed, InProgress
from fedsync.silo.session.order_results import LastOrder


class OrderJob:
    """One order, which begins when ``before`` is over. Its thread writes it; request threads read it."""

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


class CurrentOrder:
    """Newest order of a trainer, and its thread; initially the order that was ``done`` last, if any."""

    def __init__(self, train: Callable[[OrderJob, Payload], Completed], done: LastOrder | None) -> None:
        self._train = train
        self._job = None if done is None else OrderJob.of(done)
        self._entrance = threading.Lock()

    @property
    def busy(self) -> bool:
        job = self._job
        return job is not None and not job.over.is_set()

    def find(self, update_id: str) -> OrderJob | None:
        job = self._job
        return job if job is not None and job.order.update_id == update_id else None

    def wait(self) -> None:
        job = self._job
        if job is not None:
            job.over.wait()

    def hang(self, job: OrderJob, error: Exception, holds: int) -> None:
        """End a hanging job with an error for its clients. The server repeats an order that waits for its end."""
        with self._entrance:
            job.end(error=error)
            if self._job is not None:
                self._job.end(VersionMismatch(holds))

    def enter(self, order: WorkOrder, received: Payload, accept: Callable[[bool], None]) -> OrderJob:
        """Begin an order, unless it is the current order; a refused order begins again. End the order before it.

        An order with a known id but other content counts as new: a restored server may reuse an id. ``accept`` raises
        if the silo's owner does not allow the order; its argument says whether the order was accepted before, and
        refused for its payload.
        """
        with self._entrance:
            before = self._job
            again = before is not None and before.order == order
            if before is not None and again and not before.refused:
                return before
            accept(again)
            if before is not None:
                before.give_up()
            job = self._job = OrderJob(order, before)
            threading.Thread(target=self._work, args=(job, received), daemon=True).start()
            return job

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
