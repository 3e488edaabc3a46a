"""The silo's trainer as something that can be asked: orders in, answers out, while training goes on.

A `TrainerService` trains in a thread of its own, so that whoever asks gets an answer at once: the update if it is
ready, else how far it is. The same order twice trains once.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.config.cluster import SiloConfig
from fedsync.config.run_spec import RunSpec
from fedsync.core.errors import ConfigError
from fedsync.core.layout import Layout, Vector
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder
from fedsync.core.transfer import OtherVersion, Payload, PlainReplica, Replica
from fedsync.tasks.protocol import SiloSlot
from fedsync.train.device import resolve
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions
from fedsync.train.sample import likely_update
from fedsync.train.sampler import Cursor
from fedsync.train.throttle import Throttle
from fedsync.trainer.key_lookup import own_ring
from fedsync.trainer.last_order import LastOrder
from fedsync.trainer.owner_policy import OwnerPolicy
from fedsync.trainer.protocol import ANSWER, COPY, Answer, Completed, Identity, InProgress, VersionMismatch

if TYPE_CHECKING:
    from fedsync.cipher.keys.material import GroupKey
    from fedsync.cipher.plan import EncryptionPlan
    from fedsync.cipher.silo.sealing import Pipeline

_SEALERS = 4
"""Most processes that seal for one silo."""

_LARGE = 256
"""Chunks from which on several processes are worth starting: two million parameters at 16 bits."""


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
        allowed = OwnerPolicy.here()
        spec = allowed.checked(RunSpec.parse(identity.spec))
        if not 0 <= identity.index < spec.silos:
            raise ConfigError(
                "node configuration, partition-id",
                f"{identity.index}, but the run has {spec.silos} shares of data",
                "Give every silo its own number from 0 on",
            )
        machine = spec.emulate[identity.index] if spec.emulate else None
        self.name = machine.name if machine else identity.name
        self._throttle = _throttle(spec, machine)
        slot = SiloSlot(self.name, identity.index, spec.silos, spec.seed)
        self._trainer = Trainer(spec.task.build(), slot, _options(spec, identity, machine))
        self.facts = SiloFacts(
            examples=self._trainer.examples,
            memory_samples=machine.memory_samples if machine else self._trainer.find_batch_cap_on_gpu(),
            declared_speed=machine.speed if machine else identity.declared_speed,
            device=self._trainer.device,
        )
        self._replica = self._make_port(spec, folder, allowed)
        self._done_file = folder / ANSWER if folder is not None else None
        done = LastOrder.load(self._done_file) if self._done_file is not None else None
        self._cursor = Cursor() if done is None else done.cursor
        self._job = None if done is None else _Job.over(done)
        self._evaluated: tuple[tuple[int, bytes], Evaluation] | None = None
        # The trainer serves one thread at a time; asking does not need it.
        self._training = threading.Lock()
        self._desk = threading.Lock()
        # A snapshot may be asked for while an order is in work, but not while the model changes.
        self._exchange = threading.Lock()

    def _make_port(self, spec: RunSpec, folder: Path | None, allowed: OwnerPolicy) -> Replica:
        plan = spec.encryption_plan(self._trainer.layout)
        allowed.check_seal(plan)
        if plan is None:
            return PlainReplica()
        from fedsync.cipher.silo.replica import EncryptedReplica
        from fedsync.cipher.suites import open_suite

        trainer, local, ring = self._trainer, spec.local, own_ring(self.name)
        return EncryptedReplica(
            plan,
            ring,
            open_suite(plan.kind, ring.group),
            trainer.examples,
            trainer.initial_model,
            lambda: likely_update(trainer, local.batch_size, local.steps, local.learning_rate, spec.seed),
            None if folder is None else folder / COPY,
            spec.run,
            _pipeline(spec, plan, ring.group),
        )

    @property
    def layout(self) -> Layout:
        """Of the model."""
        return self._trainer.layout

    @property
    def sealed(self) -> bool:
        """Whether what travels is sealed."""
        return not isinstance(self._replica, PlainReplica)

    @property
    def holds(self) -> int:
        """Version of the model that is kept here; 0 in the clear."""
        return self._replica.holds

    @property
    def unrevealed(self) -> bool:
        """Whether the server has yet to ask for something that is lost with this process."""
        return self._replica.unrevealed

    def greeting(self) -> Payload | None:
        """What the server is to have from this silo before its first order; see `Replica.greeting`."""
        with self._training:
            return self._replica.greeting()

    @property
    def busy(self) -> bool:
        """Whether an order is in work."""
        return self._job is not None and not self._job.done.is_set()

    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; the same at every silo."""
        return self._trainer.initial_model()

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
                    model = self._replica.receive(received, version)
                except OtherVersion as error:
                    return VersionMismatch(error.holds)
                self._evaluated = what, self._replica.reported(self._trainer.evaluate(model))
            return self._evaluated[1]

    def answer(self, question: Payload) -> Payload:
        """Answer what the server's store asks; see `Replica.answer`."""
        with self._exchange:
            return self._replica.answer(question)

    def snapshot(self) -> tuple[int, Payload]:
        """Version of the model that is kept here, and the model, sealed for other silos."""
        with self._exchange:
            return self._replica.holds, self._replica.snapshot()

    def _work(self, job: _Job, received: Payload) -> None:
        try:
            with self._training:
                job.answer = self._trained(job, received)
        except OtherVersion as error:
            job.answer = VersionMismatch(error.holds)
        except Exception as error:  # whoever asks gets it
            job.error = error
        finally:
            job.done.set()

    def _trained(self, job: _Job, received: Payload) -> Completed:
        """Receive, train, send; what the two ends take counts as overhead."""
        begin_s = time.perf_counter()
        with self._exchange:
            base = self._replica.receive(received, job.order.base_version)
        received_s = time.perf_counter()
        outcome = self._trainer.run(job.order, base, self._cursor, self._throttle, job.watch)
        trained_s = time.perf_counter()
        update = self._replica.send(outcome.update, job.order, outcome.report)
        sent_s = time.perf_counter()
        report = outcome.report
        if report.evaluation is not None:
            report = replace(report, evaluation=self._replica.reported(report.evaluation))
        if self.sealed:
            cost_s = {**report.overhead_s, "open": received_s - begin_s, "seal": sent_s - trained_s}
            report = replace(report, overhead_s=cost_s)
        answer = Completed(report, update)
        if self._done_file is not None:
            LastOrder(job.order, answer, outcome.cursor).save(self._done_file)
        self._cursor = outcome.cursor
        return answer

    @staticmethod
    def _answer(job: _Job, wait_s: float | None) -> Answer:
        if not job.done.wait(wait_s):
            return InProgress(job.steps, job.steps * job.order.batch_size)
        if job.error is not None:
            raise job.error
        assert job.answer is not None
        return job.answer


def _pipeline(spec: RunSpec, plan: EncryptionPlan, group: GroupKey) -> Pipeline | None:
    """Several processes that seal and open, where the update is large and the machine has processors to spare."""
    processes = min((os.cpu_count() or 1) // 2, _SEALERS)
    if spec.emulate or plan.masked or processes < 2 or plan.chunks < _LARGE:
        return None
    from fedsync.cipher.silo.sealing import Pool

    return Pool(plan.kind, group, processes)


def _throttle(spec: RunSpec, machine: SiloConfig | None) -> Throttle | None:
    return None if machine is None else Throttle(machine.build_curve(), spec.fastest / machine.speed)


def _options(spec: RunSpec, identity: Identity, machine: SiloConfig | None) -> LocalOptions:
    """How to train: as the run says, where the silo's owner has not decided otherwise."""
    options = spec.local.build()
    if machine is not None:
        # Emulated silos share one machine: a thread each.
        options = replace(options, threads=options.threads or 1)
    if identity.device is not None:
        resolve(identity.device, "node configuration, device")
        options = replace(options, device=identity.device)
    return replace(options, resources=options.resources and identity.resources)
