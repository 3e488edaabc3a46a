"""The silo's trainer as something that can be asked: requests in, replies out, while training goes on.

A `TrainerService` carries out orders in threads of their own (`fedsync.silo.session.order_queue`), so that whoever asks gets
an answer at once: the update if it is ready, else how far it is. Whatever is asked twice is done once. An order goes
through these states:

| state | `Train` of the same order | `Collect` | `Train` of one queued behind it | of another | goes to |
|---|---|---|---|---|---|
| unknown | begins it | `VersionMismatch`: send it again | begins it | begins it | in work, queued |
| queued | waits, then `InProgress` | the same | refuses it | gives this up | in work |
| in work | waits, then `InProgress` | the same; may halt it | queues it | halts this | done, refused, failed |
| done | `WorkReport` and the update | the same | begins it | begins it | unknown |
| refused | begins it, with what came now | `VersionMismatch` | begins it | begins it | in work, unknown |
| failed | `Refused` | the same | begins it | begins it | unknown |

*Refused* is an order whose model did not continue the version that the silo holds. A service that starts knows the last
order that is *done* on disk (`fedsync.silo.session.last_order`), and the one before it if they were queued; every other one
is unknown to it. There are two orders at most, one queued behind the other: with the next, the one before is unknown.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fedsync.common import foreign
from fedsync.common.errors import SERVER, ConfigError, Hanging, ProtocolError
from fedsync.config.run_spec import RunSpec
from fedsync.config.tasks.task_kinds import SurveyConfig
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.model.chunked_arrays import digest
from fedsync.model.transfer import MAX_SEALED_BYTES, OtherVersion, Payload, VersionMismatch
from fedsync.silo.owner.approvals import check_approved
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.protocol import (
    Answer,
    AskModel,
    AskSnapshot,
    Attestation,
    Collect,
    Completed,
    Describe,
    EvaluateModel,
    Hello,
    Identity,
    InitialModel,
    Question,
    Reply,
    Request,
    Snapshot,
    Train,
    read_request,
    write_reply,
)
from fedsync.silo.session.hangs import HangWatch
from fedsync.silo.session.order_queue import OrderJob, OrderQueue
from fedsync.silo.session.session import SiloSession

logger = foreign.logger(__name__)

_Reply = tuple[Reply, Payload | None]


class TrainerService:
    """Holds one silo's trainer, its place in the data, and the order in work.

    Args:
        identity: which silo.
        folder: where the last answer and the place in the data are kept, or None to keep them in memory only.
        confined: as of `SiloSession`.

    Raises:
        ConfigError: task, data or device are not usable here, or the owner has not confirmed the run.
        SiloLocked: too much that was sealed was forged; see `fedsync.silo.owner.lockout`.
    """

    def __init__(self, identity: Identity, folder: Path | None = None, *, confined: bool = False) -> None:
        check_approved(identity)
        owner = OwnerPolicy.here()
        spec = owner.checked(RunSpec.parse(identity.spec), identity.index)
        if identity.index < 0 or (identity.index >= spec.silos and (spec.emulate or spec.task.deals_data)):
            raise ConfigError(
                "node configuration, partition-id",
                f"{identity.index}, but the run has {spec.silos} shares of data",
                "Give every silo its own number from 0 on",
            )
        self._identity, self._owner = identity, owner
        self._surveys = isinstance(spec.task, SurveyConfig)
        self._rounds = None if spec.stop is None else spec.stop.rounds
        self._waits = bool(spec.emulate) or spec.task.own_loop
        self.hangs = False
        """Whether something was found to hang, so that nothing more can be done here."""
        self.on_hang: Callable[[], None] = lambda: None
        """Called then, before anybody is told."""
        session = SiloSession(identity, spec, owner=owner, folder=folder, throttled=True, confined=confined)
        self._session = session
        self.name, self.facts = session.name, session.facts
        self._orders = OrderQueue(self._carry_out, session.done)
        self._evaluated: tuple[tuple[EvaluateModel, bytes], Evaluation | Attestation] | None = None
        # The session serves one order or evaluation at a time; asking how far it is does not need it.
        self._training = threading.Lock()

    @property
    def holds(self) -> int:
        """Version of the model that is kept here; 0 in the clear."""
        return self._session.replica.holds

    @property
    def unrevealed(self) -> bool:
        """Whether the server has yet to ask for something that is lost with this process."""
        return self._session.replica.unrevealed

    @property
    def busy(self) -> bool:
        return self._orders.busy

    def ask(self, text: str, payload: Payload | None = None) -> tuple[str, Payload | None]:
        """Reply to the server's request, whatever it is: both as text, with bytes (uint8) beside it. Raises nothing."""
        try:
            check_approved(self._identity)
            self._session.check_open()
            reply, answer = self._handle(read_request(text), payload)
            if isinstance(reply, WorkReport) and self._owner.presence is not None:
                reply = replace(reply, presence=self._owner.present())
            return write_reply(reply), None if answer is None else np.ascontiguousarray(answer).view(np.uint8)
        except Exception as error:  # what it says is not for the server
            return write_reply(refuse(error)), None

    def _handle(self, request: Request, payload: Payload | None) -> _Reply:
        session = self._session
        match request:
            case Describe():
                with self._training:
                    greeting = session.replica.greeting()
                facts = replace(self.facts, presence=self._owner.present())
                return Hello(self.name, facts, self.holds, session.form), greeting
            case AskModel(values):
                model = InitialModel(session.layout, session.kept_names, session.form.frozen)
                return model, session.initial_model() if values else None
            case Train(order, report_s):
                return self._train(order, _received(payload), report_s)
            case Collect(update_id, wait_s, halt):
                return self._collect(update_id, wait_s, halt)
            case EvaluateModel():
                return self._evaluate(_received(payload), request), None
            case Question():
                return Answer(), session.answer(_received(payload))
            case AskSnapshot():
                version, snapshot = session.snapshot()
                return Snapshot(version), snapshot

    def _train(self, order: WorkOrder, received: Payload, wait_s: float | None) -> _Reply:
        """Begin an order or queue it, unless that was done before, and wait for it.

        What its owner allows is asked as it is taken, also where it is to wait.
        """
        allowed = partial(self._owner.begin, order, survey=self._surveys, rounds=self._rounds)
        job = self._orders.enter(order, received, allowed)
        return job.reply(wait_s)

    def _collect(self, update_id: str, wait_s: float | None, halt: bool) -> _Reply:
        """An order that is not known was lost on its way, or with an earlier trainer: the silo lacks it."""
        job = self._orders.find(update_id)
        if job is None:
            return VersionMismatch(self.holds), None
        if halt:
            job.halt.set()
        return job.reply(wait_s)

    def _evaluate(self, received: Payload, request: EvaluateModel) -> Evaluation | Attestation | VersionMismatch:
        """Evaluate a model, once no order is in work or queued; what comes twice is evaluated once."""
        what = request, digest(received, hashlib.blake2b)
        # What comes with it continues what they bring the silo.
        self._orders.wait()
        with self._training:
            if self._evaluated is None or self._evaluated[0] != what:
                self._owner.begin_evaluation()
                try:
                    self._evaluated = what, self._judge(received, request)
                except OtherVersion as error:
                    return error.mismatch
            return self._evaluated[1]

    def _carry_out(self, job: OrderJob, received: Payload) -> Completed:
        def found(error: Hanging) -> None:
            self._give_up()
            self._orders.hang(job, error, self.holds)

        what, steps, unwanted = f"order {job.order.update_id!r}", lambda: job.steps, lambda: job.given_up
        with self._training, HangWatch(what, steps, unwanted, found, self._session.where, waits=self._waits):
            return self._session.train(job.order, received, job.watch)

    def _give_up(self) -> None:
        """A thread does what it will never end, and has what others would need."""
        self.on_hang()
        self.hangs = True

    def _judge(self, received: Payload, request: EvaluateModel) -> Evaluation | Attestation:
        def found(error: Hanging) -> None:
            logger.warning("%s", error)
            self._give_up()

        what = f"the evaluation of version {request.version}"
        with HangWatch(what, lambda: 0, lambda: self.busy, found, self._session.where, waits=self._waits):
            return self._session.evaluate(received, request)


def _received(payload: Payload | None) -> Payload:
    """The server's bytes, as many as a silo takes."""
    if payload is None:
        raise ProtocolError(SERVER, "message", "it brings no payload")
    if payload.nbytes > MAX_SEALED_BYTES:
        raise ProtocolError(SERVER, "length", f"{payload.nbytes} bytes, at most {MAX_SEALED_BYTES}")
    return payload
