"""The silo's trainer as something that can be asked: orders in, answers out, while training goes on.

A `TrainerService` trains in a thread of its own, so that whoever asks gets an answer at once: the update if it is
ready, else how far it is. The same order twice trains once.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from fedsync.config.run_spec import RunSpec
from fedsync.core.errors import ConfigError
from fedsync.core.layout import Vector
from fedsync.core.orders import Evaluation, WorkOrder
from fedsync.core.transfer import OtherVersion, Payload
from fedsync.trainer.last_order import LastOrder
from fedsync.trainer.owner_policy import OwnerPolicy
from fedsync.trainer.protocol import Answer, Completed, Identity, InProgress, VersionMismatch
from fedsync.trainer.session import SiloSession


class _Job:
    """One order in work or done. Written by the training thread, read by those who ask."""

    def __init__(self, order: WorkOrder) -> None:
        self.order = order
        self.steps = 0
        self.halt = threading.Event()
        self.done = threading.Event()
        self.answer: Completed | VersionMismatch | None = None
        self.error: Exception | None = None

    @classmethod
    def over(cls, done: LastOrder) -> _Job:
        """One that was finished before."""
        job = cls(done.order)
        job.answer = done.answer
        job.done.set()
        return job

    def watch(self, steps: int, samples: int) -> bool:
        """Called after each step; False ends the order."""
        self.steps = steps
        return not self.halt.is_set()


class TrainerService:
    """Holds one silo's trainer, its place in the data, and the order in work.

    Args:
        identity: which silo.
        folder: where the last answer and the place in the data are kept, or None to keep them in memory only.

    Raises:
        ConfigError: task, data or device are not usable here.
    """

    def __init__(self, identity: Identity, folder: Path | None = None) -> None:
        owner = OwnerPolicy.here()
        spec = owner.checked(RunSpec.parse(identity.spec))
        if not 0 <= identity.index < spec.silos:
            raise ConfigError(
                "node configuration, partition-id",
                f"{identity.index}, but the run has {spec.silos} shares of data",
                "Give every silo its own number from 0 on",
            )
        session = SiloSession(identity, spec, spec.task.build(), owner=owner, folder=folder, throttled=True)
        self._session = session
        self.name, self.facts, self.layout, self.sealed = session.name, session.facts, session.layout, session.sealed
        self._job = None if session.last is None else _Job.over(session.last)
        self._evaluated: tuple[tuple[int, bytes], Evaluation] | None = None
        # The session serves one order or evaluation at a time; asking how far it is does not need it.
        self._training = threading.Lock()
        self._desk = threading.Lock()

    @property
    def holds(self) -> int:
        """Version of the model that is kept here; 0 in the clear."""
        return self._session.replica.holds

    @property
    def unrevealed(self) -> bool:
        """Whether the server has yet to ask for something that is lost with this process."""
        return self._session.replica.unrevealed

    def greeting(self) -> Payload | None:
        """What the server is to have from this silo before its first order; see `Replica.greeting`."""
        with self._training:
            return self._session.replica.greeting()

    @property
    def busy(self) -> bool:
        """Whether an order is in work."""
        return self._job is not None and not self._job.done.is_set()

    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; the same at every silo."""
        return self._session.initial_model()

    def train(self, order: WorkOrder, received: Payload, wait_s: float | None) -> Answer:
        """Begin an order, unless it has been begun before, and wait for it.

        Another order that is still in work is given up: the server has. One with the same id that says something else
        is another order: a server that was set back may come to one.

        Args:
            order: what to do.
            brought: what makes it possible to have the model to start from; see `Replica.receive`.
            wait_s: answer after this many seconds at the latest; None waits for the end.

        Raises:
            Exception: whatever training raised.
        """
        with self._desk:
            job = self._job
            if job is None or job.order != order or isinstance(job.answer, VersionMismatch):
                if job is not None:
                    job.halt.set()
                    job.done.wait()
                job = self._job = _Job(order)
                threading.Thread(target=self._work, args=(job, received), daemon=True).start()
        return self._answer(job, wait_s)

    def collect(self, update_id: str, wait_s: float | None, *, halt: bool) -> Answer:
        """Ask for an order that was begun; ``halt`` ends it after its current step.

        One that is not known was lost on its way, or with an earlier trainer: the silo lacks it.

        Raises:
            Exception: whatever training raised.
        """
        job = self._job
        if job is None or job.order.update_id != update_id:
            return VersionMismatch(self.holds)
        if halt:
            job.halt.set()
        return self._answer(job, wait_s)

    def evaluate(self, received: Payload, version: int) -> Evaluation | VersionMismatch:
        """Evaluate the model ``version``, once no order is in work; what comes twice is evaluated once."""
        what = version, hashlib.blake2b(received.tobytes()).digest()
        with self._training:
            if self._evaluated is None or self._evaluated[0] != what:
                try:
                    self._evaluated = what, self._session.evaluate(received, version)
                except OtherVersion as error:
                    return VersionMismatch(error.holds)
            return self._evaluated[1]

    def answer(self, question: Payload) -> Payload:
        """Answer what the server's store asks; see `Replica.answer`."""
        return self._session.answer(question)

    def snapshot(self) -> tuple[int, Payload]:
        """Version of the model that is kept here, and the model, sealed for other silos."""
        return self._session.snapshot()

    def _work(self, job: _Job, received: Payload) -> None:
        try:
            with self._training:
                job.answer = self._session.train(job.order, received, job.watch)
        except OtherVersion as error:
            job.answer = VersionMismatch(error.holds)
        except Exception as error:  # whoever asks gets it
            job.error = error
        finally:
            job.done.set()

    @staticmethod
    def _answer(job: _Job, wait_s: float | None) -> Answer:
        if not job.done.wait(wait_s):
            return InProgress(job.steps, job.steps * job.order.batch_size)
        if job.error is not None:
            raise job.error
        assert job.answer is not None
        return job.answer
