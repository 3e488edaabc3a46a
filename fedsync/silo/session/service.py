"""Request handler of a silo's trainer process: answers the server's requests while training goes on.

A `TrainerService` carries out each order in a separate thread (`fedsync.silo.session.current_order`). So each request
gets an answer within the time limit that it names: the update if it is ready, else the progress. A repeated order is
trained only once. An order has these states:

| state | `Train` of this order | `Collect` | `Train` of another order | goes to |
|---|---|---|---|---|
| unknown | begins it | `VersionMismatch`: send it again | nothing | in work, waiting |
| waiting | waits, then `InProgress` | the same | drops this order | in work, unknown |
| in work | waits, then `InProgress` | the same; may halt it | halts this order | done, mismatched, failed, unknown |
| done | `WorkReport` and the update | the same | forgets this order | unknown |
| mismatched | begins it, with the new payload | `VersionMismatch` | forgets this order | in work, unknown |
| failed | `Refused` | the same | forgets this order | unknown |

*Waiting*: the order before it was halted, and its current step is not over. *Mismatched*: the order's payload did not
continue the silo's model version. A service has one order at a time: another order makes it unknown. A new service
loads the last *done* order from disk (`fedsync.silo.session.current_order`).
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
from fedsync.config.tasks.survival_task import SurveyConfig
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.model.chunked_arrays import digest
from fedsync.model.transfer import MAX_SEALED_BYTES, OtherVersion, Payload, VersionMismatch
from fedsync.silo import protocol
from fedsync.silo.owner.approvals import check_approved
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.protocol import Completed, Identity, Reply, Request
from fedsync.silo.session.current_order import CurrentOrder, OrderJob
from fedsync.silo.session.liveness import hang_watch
from fedsync.silo.session.session import SiloSession

logger = foreign.logger(__name__)


class TrainerService:
    """Service of one silo's trainer, with the silo's position in its data and its orders. ``folder`` keeps the last
    answer and the position; None keeps them in memory. `ConfigError` if task, data or device are not usable here, or
    the owner has not confirmed the run; `SiloLocked` after integrity failures.
    """

    def __init__(self, identity: Identity, folder: Path | None = None, *, confined: bool = False) -> None:
        check_approved(identity)
        owner = OwnerPolicy.here()
        spec = owner.checked(RunSpec.parse(identity.spec), identity.index)
        if identity.index < 0 or (identity.index >= spec.silos and (spec.emulate or spec.task.deals_data)):
            problem = f"{identity.index}, but the run has {spec.silos} shares of data"
            raise ConfigError("node configuration, partition-id", problem, "Give every silo its own number from 0 on")
        self._identity, self._owner = identity, owner
        self._surveys = isinstance(spec.task, SurveyConfig)
        self._versions = spec.versions or (None if spec.stop is None else spec.stop.rounds)
        self._waits = bool(spec.emulate) or spec.task.own_loop
        self.hangs = False  # whether a task hangs, so that this process is of no further use
        self.on_hang: Callable[[], None] = lambda: None  # called on a hang, before any reply
        session = SiloSession(identity, spec, owner=owner, folder=folder, throttled=True, confined=confined)
        self._session = session
        self.name, self.facts = session.name, session.facts
        self._current = CurrentOrder(self._carry_out, session.last)
        self._evaluated: tuple[tuple[protocol.EvaluateModel, bytes], Evaluation | protocol.Attestation] | None = None
        self._mismatched: protocol.EvaluateModel | None = None
        # The session serves one order or evaluation at a time; progress requests do not take the lock.
        self._training = threading.Lock()

    @property
    def holds(self) -> int:
        return self._session.replica.holds

    @property
    def unrevealed(self) -> bool:
        return self._session.replica.unrevealed

    @property
    def busy(self) -> bool:
        return self._current.busy

    def ask(self, text: str, payload: Payload | None = None) -> tuple[str, Payload | None]:
        """Return text and payload (uint8) of the reply to a request; every error becomes a `Refused`."""
        try:
            check_approved(self._identity)
            self._session.check_open()
            reply, answer = self._handle(protocol.read_request(text), payload)
            if isinstance(reply, WorkReport) and self._owner.presence is not None:
                reply = replace(reply, presence=self._owner.present())
            return protocol.write_reply(reply), None if answer is None else np.ascontiguousarray(answer).view(np.uint8)
        except Exception as error:  # the server must not see the error's text
            return protocol.write_reply(refuse(error)), None

    def _handle(self, request: Request, payload: Payload | None) -> tuple[Reply, Payload | None]:
        session = self._session
        match request:
            case protocol.Describe():
                with self._training:
                    greeting = session.replica.greeting()
                facts = replace(self.facts, presence=self._owner.present())
                return protocol.Hello(self.name, facts, self.holds, session.form), greeting
            case protocol.AskModel(values):
                made = session.trainer_facts
                model = protocol.InitialModel(made.layout, made.kept_names, session.form.frozen, made.ties)
                return model, session.initial_model() if values else None
            case protocol.Train(order, report_s):
                return self._current.enter(order, _received(payload), partial(self._allow, order)).reply(report_s)
            case protocol.Collect(update_id, wait_s, halt):
                job = self._current.find(update_id)
                if job is None:
                    return VersionMismatch(self.holds), None
                if halt:
                    job.halt.set()
                return job.reply(wait_s)
            case protocol.EvaluateModel():
                return self._evaluate(_received(payload), request), None
            case protocol.Question():
                return protocol.Answer(), session.answer(_received(payload))
            case protocol.AskSnapshot():
                version, snapshot = session.snapshot()
                return protocol.Snapshot(version), snapshot

    def _allow(self, order: WorkOrder, again: bool) -> None:
        self._owner.begin(order, survey=self._surveys, versions=self._versions, counted=again)

    def _evaluate(
        self, received: Payload, request: protocol.EvaluateModel
    ) -> Evaluation | protocol.Attestation | VersionMismatch:
        what = request, digest(received, hashlib.blake2b)
        # The payload continues the model version that the current order brings.
        self._current.wait()
        with self._training:
            if self._evaluated is None or self._evaluated[0] != what:
                if request != self._mismatched:  # the same again, with another payload, was counted before
                    self._owner.begin_evaluation()
                self._mismatched = None
                try:
                    self._evaluated = what, self._judge(received, request)
                except OtherVersion as error:
                    self._mismatched = request
                    return error.mismatch
            return self._evaluated[1]

    def _carry_out(self, job: OrderJob, received: Payload) -> Completed:
        def found(error: Hanging) -> None:
            self._give_up()
            self._current.hang(job, error, self.holds)

        what, steps, unwanted = f"order {job.order.update_id!r}", lambda: job.steps, lambda: job.given_up
        with self._training, hang_watch(what, steps, unwanted, found, self._session.where, waits=self._waits):
            return self._session.train(job.order, received, job.watch)

    def _judge(self, received: Payload, request: protocol.EvaluateModel) -> Evaluation | protocol.Attestation:
        def found(error: Hanging) -> None:
            logger.warning("%s", error)
            self._give_up()

        what = f"the evaluation of version {request.version}"
        with hang_watch(what, lambda: 0, lambda: self.busy, found, self._session.where, waits=self._waits):
            return self._session.evaluate(received, request)

    def _give_up(self) -> None:
        """Mark this process as unusable: the hanging thread never ends, and holds locks that other threads need."""
        self.on_hang()
        self.hangs = True


def _received(payload: Payload | None) -> Payload:
    if payload is None:
        raise ProtocolError(SERVER, "message", "it brings no payload")
    if payload.nbytes > MAX_SEALED_BYTES:
        raise ProtocolError(SERVER, "length", f"{payload.nbytes} bytes, at most {MAX_SEALED_BYTES}")
    return payload
