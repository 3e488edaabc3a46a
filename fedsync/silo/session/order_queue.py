"""The orders that a trainer has: one in work, one queued behind it at most, and those whose answers may be asked for.

An order says behind which other one its silo is to train it (`WorkOrder.behind`). So each order tells what the server
knows of its silo: it has this order, and the one that it is behind. Both stay, whichever of them comes first; any other
one was given up by the server, and is ended here. What comes first begins first: nothing waits for an order that may
have been lost on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.model.transfer import OtherVersion, Payload, VersionMismatch
from fedsync.silo.protocol import Completed, InProgress
from fedsync.silo.session.last_order import LastOrder


class OrderJob:
    """One order: queued, in work, or over. Written by the thread that trains it, read by those who ask.

    Args:
        order: what to do.
        before: what came before it, and is over before it begins.
    """

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
        """One that an earlier trainer has done."""
        job = cls(done.order)
        job.outcome = done.answer
        job.over.set()
        return job

    @property
    def refused(self) -> bool:
        """Whether what came with it was of no use, so that it may come again."""
        return isinstance(self.outcome, VersionMismatch)

    def watch(self, steps: int, samples: int) -> bool:
        """Called after each step; False ends the order."""
        self.steps = steps
        return not self.halt.is_set()

    def give_up(self) -> None:
        """End it after its step, or before it begins."""
        self.given_up = True
        self.halt.set()

    def end(self, outcome: Completed | VersionMismatch | None = None, error: Exception | None = None) -> None:
        """It is over; what still comes of one that was found to hang counts for nothing."""
        with self._ending:
            if not self.over.is_set():
                self.outcome, self.error = outcome, error
                self.over.set()

    def reply(self, wait_s: float | None) -> tuple[WorkReport | VersionMismatch | InProgress, Payload | None]:
        """What there is after so many seconds at the latest; raises whatever training raised."""
        if not self.over.wait(wait_s):
            return InProgress(self.steps, self.steps * self.order.batch_size), None
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        if isinstance(self.outcome, Completed):
            return self.outcome.report, self.outcome.update
        return self.outcome, None


class OrderQueue:
    """Trains orders one after the other, each in a thread of its own.

    Args:
        train: carries out the order of a job.
        done: orders that were done before, the last one last.
    """

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
        """Wait until all that is here now is over."""
        for job in self._jobs:
            job.over.wait()

    def hang(self, job: OrderJob, error: Exception, holds: int) -> None:
        """One is found to hang: what waits for it was never begun here, so its server sends it again.

        Args:
            job: that hangs.
            error: that whoever asks for it gets.
            holds: version of the model that this silo keeps.
        """
        with self._entrance:
            job.end(error=error)
            for other in self._jobs:
                other.end(VersionMismatch(holds))

    def enter(self, order: WorkOrder, received: Payload, accept: Callable[[], None]) -> OrderJob:
        """Begin an order, or queue it, unless it is here already; one that was refused begins anew.

        Args:
            order: what to do. One with a known id that says something else is another order: a server that was set back
                may come to one.
            received: what came with it.
            accept: raises if the silo does not take it.

        Raises:
            ProtocolError: two are here already that belong together.
        """
        with self._entrance:
            known = self.find(order.update_id)
            if known is not None and known.order == order and not known.refused:
                return known
            kept = self._beside(order)
            accept()
            for other in self._jobs:
                if other not in kept:
                    other.give_up()
            job = OrderJob(order, self._jobs[-1] if self._jobs else None)
            self._jobs = [*kept, job]
            threading.Thread(target=self._work, args=(job, received), daemon=True).start()
            return job

    def _beside(self, order: WorkOrder) -> list[OrderJob]:
        """The job that the server knows of beside this order, if it is here.

        Raises:
            ProtocolError: it means to have three: one has another queued behind it, or both before it and behind.
        """
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
                job.before = None  # whose own one, and so on, would never go
            if job.given_up:
                raise ProtocolError(SERVER, "order", f"{job.order.update_id!r} was given up before it began")
            job.end(self._train(job, received))
        except OtherVersion as error:
            job.end(error.mismatch)
        except Exception as error:  # whoever asks gets it
            job.end(error=error)
