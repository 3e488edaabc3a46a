"""A silo's session: it receives a model, trains, sends the update and remembers where it is in its data.

Virtual time, Flower's simulation engine and a real silo's resident trainer all use this object, so a silo does the
same everywhere. Not to be confused with `fedsync.silo.session.service.TrainerService`, which answers questions while a
session is at work, or with `fedsync.model.transfer.Replica`, the session's copy of the model and its encryption.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from fedsync.common import foreign
from fedsync.common.errors import SERVER, ConfigError, IntegrityError, ProtocolError, SpoiledSum
from fedsync.config.cipher import PlainConfig
from fedsync.config.run_spec import RunSpec
from fedsync.core.cursor import Cursor
from fedsync.core.orders import Evaluation, SiloFacts, Split, Subject, WorkOrder, WorkReport
from fedsync.model.layout import Layout, Vector
from fedsync.model.plain_replica import PlainReplica
from fedsync.model.plain_wire import FP32
from fedsync.model.table_columns import digest_of
from fedsync.model.tensor_parts import ModelForm
from fedsync.model.transfer import NO_PAYLOAD, OtherVersion, Payload, Replica
from fedsync.silo.owner.key_lookup import many_keys, own_ring
from fedsync.silo.owner.lockout import Lockout
from fedsync.silo.owner.opened_survey import open_survey, surveyed
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import Attestation, Completed, EvaluateModel, Identity
from fedsync.silo.room.process import TrainingProcess
from fedsync.silo.session.last_order import LastOrder, LastOrders
from fedsync.silo.session.local_carryover import OwnProgress
from fedsync.silo.session.own_models import OwnModels
from fedsync.silo.session.own_variate import StepControl
from fedsync.silo.session.replicas import TrainerFailed, encrypted_replica, plain_replica
from fedsync.silo.session.round_settings import check_settings
from fedsync.train.silo_trainer import Outcome, SiloTrainer, Watch

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring

logger = foreign.logger(__name__)

_DIGEST_BYTES = 32
_MOST_TOLD = 30_000
"""Characters of all columns that an emulated silo tells of its table."""

OWED, OWN = "owed", "own"
"""Beside a last order: what the next update makes up for, and what the next order may begin with; see
`fedsync.model.plain_replica` and `fedsync.silo.session.local_carryover`."""


class SiloSession:
    """One silo's part of a run. Orders come one after the other; snapshots and answers may be asked for meanwhile.

    Args:
        identity: which silo of the run this is.
        spec: the run.
        ring: finds the silo's keys by its name; asked only if the run is encrypted.
        owner: what the silo's owner allows; None allows everything.
        folder: where the last order and the replica are kept, or None to keep them in memory only.
        throttled: slow the training down to the speed of the machine that the silo emulates.
        confined: train in a process of its own, without keys and network, where the owner ships no code.

    Raises:
        ConfigError: data, device or keys are not usable here, or the owner does not allow the run.
        SiloLocked: too much that was sealed was forged.
    """

    def __init__(
        self,
        identity: Identity,
        spec: RunSpec,
        ring: Callable[[str], Ring] = own_ring,
        owner: OwnerPolicy | None = None,
        folder: Path | None = None,
        *,
        throttled: bool = False,
        confined: bool = False,
    ) -> None:
        machine = spec.emulate[identity.index] if spec.emulate else None
        self.name = machine.name if machine else identity.name
        keys = None if isinstance(spec.cipher, PlainConfig) else ring(self.name)
        self._owner, self._emulated = owner or OwnerPolicy(), machine is not None
        # An emulated silo has no owner who could unlock it, so its count ends with the process.
        self.lockout = None if keys is None else Lockout(replace(keys, folder=None) if many_keys() else keys)
        self.check_open()
        # A snapshot may be asked for while an order is in work, but not while the model changes.
        self._exchange = threading.Lock()
        if spec.survey is not None and keys is not None:
            with self._counted():
                sums = open_survey(spec.survey, identity, keys, self._owner)
            spec = surveyed(spec, sums, folder)
        if confined and self._owner.confines and folder is not None:
            self._trainer: SiloTrainer = TrainingProcess(identity, spec, self._owner, folder)
        else:
            from fedsync.silo.session.silo_setup import local_trainer

            self._trainer = local_trainer(spec, identity, many=machine is not None and not throttled)
        self._warn(spec)
        plan = spec.encryption_plan(self._trainer.layout)
        if owner is not None:
            owner.check_seal(plan)
        self.facts = SiloFacts(
            examples=plan.examples if plan is not None and plan.seal_metrics else self._trainer.examples,
            memory_samples=machine.memory_samples if machine else self._trainer.find_batch_cap_on_gpu(),
            declared_speed=machine.speed if machine else identity.declared_speed,
            device=self._trainer.device,
            validates=self._trainer.validates,
            least_batch=self._owner.least_batch,
            least_samples=max(self._owner.least_samples, 1),
        )
        table = self._trainer.table
        same = self._trainer.frozen_digest + (b"" if table is None else digest_of(table))
        # What columns are called stays at a real silo, like all that is in its files.
        told = table if table is None or (machine is not None and len(str(table)) < _MOST_TOLD) else ()
        self.form = ModelForm.of(self._trainer.layout, _frozen(same, spec, identity, keys), told)
        self.replica: Replica = plain_replica(spec, self._trainer, folder)
        if plan is not None and keys is not None:
            self.replica = encrypted_replica(plan, spec, identity, self._trainer, keys, folder, self._owner.first_model)
        self._control = StepControl(self.name, self.layout.size, self.replica, folder) if spec.controls else None
        self._throttle = spec.throttle(identity.index) if throttled else None
        compared = spec.evaluation.cross_site
        self._compared = () if compared is None else compared.build(share=False).subjects
        self._spec, self._own = spec, OwnModels(folder)
        as_it_is = not self.sealed and spec.wire.formats.up is FP32
        self._progress = OwnProgress(folder, sent_as_it_is=as_it_is)
        self._done, self.cursor = LastOrders(folder), Cursor()
        if self._done.last is not None:
            self._go_on(self._done.last)

    def _warn(self, spec: RunSpec) -> None:
        """Say in the silo's own log what keeps its batches from following its speed."""
        held, wanted = self._trainer.examples, spec.local.batch_size
        if held < wanted:
            logger.warning(
                "silo %s holds %d training samples, fewer than local.batch_size %d: its batches have %d at most",
                *(self.name, held, wanted, held),
            )

    @property
    def done(self) -> tuple[LastOrder, ...]:
        """Orders whose answers are kept, the last one last."""
        return self._done.kept

    @property
    def layout(self) -> Layout:
        return self._trainer.layout

    @property
    def kept_names(self) -> tuple[str, ...]:
        """Names of the model's tensors that do not travel."""
        return self._trainer.kept_names

    def initial_model(self) -> Vector:
        """The model before any training, float32 [layout.size]; the same at every silo."""
        return self._trainer.initial_model()

    def save_model(self, path: Path, model: Vector) -> None:
        """As `SiloTrainer.save_model`."""
        self._trainer.save_model(path, model)

    @property
    def sealed(self) -> bool:
        """Whether what travels is sealed."""
        return not isinstance(self.replica, PlainReplica)

    def train(self, order: WorkOrder, received: Payload, watch: Watch | None = None) -> Completed:
        """Carry out an order. What encryption takes counts as overhead.

        Args:
            order: what to do.
            received: what makes it possible to have the model to start from; see `Replica.receive`.
            watch: called after each step; False ends the order there.

        Raises:
            OtherVersion: what came does not continue the model that is here; nothing was changed.
            IntegrityError: what came is not what silos of the group sealed, or not for this place.
            SiloLocked: too much of that came.
            ProtocolError: the server sent something else.
            Exception: whatever training raised.
        """
        if order.apart:
            self._check_apart(order.subject)
            report = self._own.report(order) or self._train_apart(order, received, watch)
            shared = self._own.model(order.subject)[0] if order.share and self._shares else NO_PAYLOAD
            return self._over(order, Completed(report, shared), self.cursor)
        if order.config or self._spec.on_round is not None:
            check_settings(order, self._spec)
        begin_s = perf_counter()
        base = self._receive(received, order.base_version)
        received_s = perf_counter()
        model, cursor = self._about(order, base)
        outcome = self._run(order, model, cursor, watch)
        if self._owner.limits is not None:
            self._owner.check_done(outcome.report.samples)
        own = self._progress.of(order, outcome.update) if order.carry else None
        if self._control is not None:
            self._control.trained(order, outcome.update, outcome.report)
        trained_s = perf_counter()
        # Not even statistics of the data, such as a model's running means, change.
        change = np.zeros_like(outcome.update) if order.scores_only else outcome.update
        update = self.replica.send(change, order, outcome.report)
        sent_s = perf_counter()
        report = self.replica.disclosed(outcome.report)
        if self.sealed:
            cost_s = {**report.overhead_s, "open": received_s - begin_s, "seal": sent_s - trained_s}
            report = replace(report, overhead_s=cost_s)
        following = outcome.cursor if order.subject is Subject.LAST else self.cursor
        return self._over(order, Completed(report, update), following, own)

    def _run(self, order: WorkOrder, model: Vector, cursor: Cursor, watch: Watch | None) -> Outcome:
        """Train from the model, or from further on; what is evaluated is the model in any case."""
        watch, carried = self._patient(watch, order), order.behind or order.carry
        start = self._progress.start(order, model) if carried else model
        correction = None if self._control is None else self._control.correction(order)
        if start is model:
            return self._trainer.run(order, model, cursor, self._throttle, watch, correction)
        begin_s = perf_counter()
        found = self._trainer.try_evaluate(model, cursor, order.split) if order.evaluate else None
        cost_s = perf_counter() - begin_s
        outcome = self._trainer.run(replace(order, evaluate=False), start, cursor, self._throttle, watch)
        overhead_s = {**outcome.report.overhead_s, "evaluate": outcome.report.overhead_s.get("evaluate", 0.0) + cost_s}
        return replace(outcome, report=replace(outcome.report, evaluation=found, overhead_s=overhead_s))

    def _about(self, order: WorkOrder, base: Vector) -> tuple[Vector, Cursor]:
        """The model that an order is about, float32 [values], and what else it left at the silo.

        One that only scores may be about another than the newest.

        Raises:
            ProtocolError: it asks for figures of the test split that this silo does not tell.
        """
        if order.scores_only and order.split is Split.TEST and not self._trainer.validates:
            raise ProtocolError(SERVER, "split", "this silo's rounds are evaluated on its test split")
        if order.scores_only and order.subject.own:
            self._check_apart(order.subject)
            return self._own.model(order.subject)
        best = self.replica.best_model if order.scores_only and order.subject is Subject.BEST else None
        return base if best is None else best, self.cursor

    def _over(self, order: WorkOrder, answer: Completed, cursor: Cursor, own: Vector | None = None) -> Completed:
        """An order is done, and the next begins there in the data; what the silo says of it."""
        beside = {name: each for name, each in ((OWED, self.replica.owed), (OWN, own)) if each is not None}
        # Before anybody hears of it: after a crash the order is done, or it never happened.
        last = self._done.add(LastOrder(order, answer, cursor, beside))
        self._go_on(last)
        return last.answer

    def _go_on(self, last: LastOrder) -> None:
        """The next order is the one after this."""
        self.cursor = last.cursor
        self.replica.owe(last.beside.get(OWED))
        if last.order.behind or last.order.carry:
            self._progress.keep(last.order, last.beside.get(OWN))

    def _train_apart(self, order: WorkOrder, received: Payload, watch: Watch | None) -> WorkReport:
        """Bring on a model of the silo's own.

        In the federation orders begin where the last one ended in the data. Alone a silo begins at the beginning, as it
        did there; so do the parts of the model that stay. Tuning goes on with both.
        """
        before = self._own.before(order)
        if before is None:
            alone = order.subject is Subject.LOCAL
            before = self._first(order, received), Cursor() if alone else self.cursor
        base, cursor = before
        outcome = self._trainer.run(order, base, cursor, self._throttle, self._patient(watch, order))
        self._owner.check_done(outcome.report.samples)
        report = self.replica.disclosed(outcome.report)
        self._own.keep(order, base + outcome.update, report, outcome.cursor)
        return report

    def _first(self, order: WorkOrder, received: Payload) -> Vector:
        """The model that the first order apart begins with, float32 [values]: in the clear it came with the order.

        Raises:
            ProtocolError: this silo keeps no best model, or another than the order means, as who has missed sums does.
        """
        if not self.sealed:
            return self._receive(received, order.base_version)
        if order.subject is Subject.LOCAL:
            return self.initial_model()
        best, version = self.replica.best_model, self.replica.best_version
        if best is None:
            raise ProtocolError(SERVER, "subject", "there is no best model yet")
        if version != order.base_version:
            detail = f"the best model here is version {version}, not {order.base_version}"
            raise ProtocolError(SERVER, "subject", detail)
        return best

    def _patient(self, watch: Watch | None, order: WorkOrder) -> Watch | None:
        """``watch``, which may not end an order before the samples that the owner demands are behind it.

        They are enough for one that only scores.
        """
        if watch is None and not order.scores_only:
            return None
        least = self._owner.least_samples

        def go_on(steps: int, samples: int) -> bool:
            more = watch is None or watch(steps, samples)
            return samples < least or (more and not order.scores_only)

        return go_on

    def _check_apart(self, subject: Subject) -> None:
        """See that a run may ask for a model of the silo's own.

        Raises:
            ProtocolError: it is encrypted, and says in what silos know of it that it has no use for one.
        """
        if self.sealed and subject not in self._compared:
            raise ProtocolError(SERVER, "subject", f"this run asks for no {subject} model")

    @property
    def _shares(self) -> bool:
        """Whether the local model may leave the silo; under encryption none does. Emulated silos have no owner."""
        allowed = self._owner.share_local
        return not self.sealed and (self._emulated if allowed is None else allowed)

    def evaluate(self, received: Payload, asked: EvaluateModel) -> Evaluation | Attestation:
        """What the server is told of a model; raises as `train`.

        Where figures are sealed, the model is not even looked at: the server hears what the sums say that came with it.
        """
        if asked.owner:
            if self.sealed:
                raise ProtocolError(SERVER, "subject", "under encryption no silo's own model travels")
            FP32.check(received, self.layout.size, SERVER)
            model, cursor = FP32.decode(received, 0, self.layout.size), Cursor()
        elif asked.subject.own and self.replica.pooled is None:
            self._check_apart(asked.subject)
            model, cursor = self._own.model(asked.subject)
        else:
            model, cursor = self._receive(received, asked.version), self.cursor
            if (pooled := self.replica.pooled) is not None:
                return Attestation(pooled)
        gains = not (self.sealed or asked.owner)
        return self._trainer.judge(model, cursor, asked.split, asked.subject, gains=gains)

    def where(self, thread: int) -> str:
        """As `SiloTrainer.where`."""
        return self._trainer.where(thread)

    def answer(self, question: Payload) -> Payload:
        """Answer what the server's aggregator asks; see `Replica.answer`.

        What is refused here does not count: a trainer that was restarted has to refuse an honest question, and why it
        does, the server knows.
        """
        with self._exchange:
            self.check_open()
            return self.replica.answer(question)

    def snapshot(self) -> tuple[int, Payload]:
        """Version of the model that is kept here, and the model, sealed for other silos."""
        with self._exchange:
            self.check_open()
            return self.replica.holds, self.replica.snapshot()

    def check_open(self) -> None:
        """See that this silo takes part.

        Raises:
            SiloLocked: it does not, because of failures of integrity in this run or another.
        """
        if self.lockout is not None:
            self.lockout.check()

    def _receive(self, received: Payload, version: int) -> Vector:
        """Have the replica take what came."""
        with self._counted():
            return self.replica.receive(received, version)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Whatever fails within, in what was sealed, is one class of error, and counts.

        One class, so that the server cannot tell a check from another. What befalls the machine does not count: a full
        disk, memory that ran out, a process that was killed. Nor does what was authentic, and spoiled by a silo: that
        tells nobody of the key who has it not, and one silo must not lock all others.
        """
        with self._exchange, nullcontext() if self.lockout is None else self.lockout.alone():
            try:
                yield
            except (OtherVersion, ConfigError, OSError, MemoryError, BrokenExecutor):
                raise
            except TrainerFailed as error:  # nobody forged anything
                raise error.reason from error
            except Exception as error:
                if self.lockout is None:
                    raise
                if isinstance(error, SpoiledSum):
                    raise IntegrityError(error.sender, error.check, error.detail) from error
                failure = error if isinstance(error, ProtocolError) else ProtocolError(SERVER, "payload", repr(error))
                self.lockout.count(str(failure))
                raise IntegrityError(failure.sender, failure.check, failure.detail) from error


def _frozen(digest: bytes, spec: RunSpec, identity: Identity, keys: Ring | None) -> str:
    """Digests of frozen tensors and columns for the server: the same at two silos of a run, or not.

    Where silos have keys it cannot try what the weights or names may be, nor tell whether another run has the same.
    """
    digest = digest if len(digest) <= _DIGEST_BYTES else hashlib.sha256(digest).digest()
    if not digest or keys is None:
        return digest.hex()
    run = hashlib.sha256(spec.origin.encode()).digest() + identity.text.lasting
    return keys.group.conceal(hashlib.sha256(b"fedsync frozen 1\0" + run + digest).digest()).hex()
