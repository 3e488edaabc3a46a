"""Session of a silo: receives a model, trains, sends the update, and remembers its position in the data.

Virtual time, Flower's simulation engine and a real silo's resident trainer all use this object, so a silo does the
same everywhere. Not to be confused with `fedsync.silo.session.service.TrainerService`, which answers requests while a
session works, or with `fedsync.model.transfer.Replica`, the session's copy of the model and its encryption.
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
from fedsync.core.orders import Cursor, Evaluation, SiloFacts, Split, Subject, WorkOrder, WorkReport
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
from fedsync.silo.session.local_carryover import LocalCarryover
from fedsync.silo.session.order_results import LastOrder, LastOrders, OwnModels
from fedsync.silo.session.own_variate import StepControl
from fedsync.silo.session.replicas import TrainerFailed, encrypted_replica, plain_replica
from fedsync.silo.session.round_settings import check_settings
from fedsync.train.silo_trainer import Outcome, SiloTrainer, Watch

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring

logger = foreign.logger(__name__)

_DIGEST_BYTES = 32
_MOST_TOLD = 30_000
"""Limit of an emulated silo's reported table form [characters over all columns]."""

OWED, OWN = "owed", "own"
"""Names of vectors beside a last order: the rounding error that the next update corrects, and the vector with which the
next order may begin; see `fedsync.model.plain_replica` and `fedsync.silo.session.local_carryover`."""


class SiloSession:
    """One silo's part of a run. It trains one order at a time; snapshots and answers may be requested meanwhile.

    Args:
        ring: finds the silo's keys by its name; called only if the run is encrypted.
        owner: rules of the silo's owner; None allows everything.
        folder: keeps the last order and the replica; without it, only position and replica are kept, in memory.
        throttled: slow the training down to the speed of the emulated machine.
        confined: train in a separate process without keys and network, where the owner admits no code of the server.

    Raises `ConfigError` if the run cannot be done or is not allowed here, and `SiloLocked` after integrity failures.
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
        # A snapshot may be requested while an order is in work, but not while the model changes.
        self._exchange = threading.Lock()
        if spec.survey is not None and keys is not None:
            with self._counted():
                sums = open_survey(spec.survey, identity, keys, self._owner)
            spec = surveyed(spec, sums, folder)
        private = spec.privacy is not None or self._owner.privacy or (machine is not None and machine.privacy)
        if private:
            from fedsync.silo.owner.privacy_guard import check_budgets, privacy_guard

            ledgers = check_budgets(spec, identity, self._owner)
        virtual = machine is not None and not throttled
        if confined and self._owner.confines and folder is not None:
            self._trainer: SiloTrainer = TrainingProcess(identity, spec, self._owner, folder)
        else:
            from fedsync.silo.session.silo_setup import local_trainer

            self._trainer = local_trainer(spec, identity, many=virtual)
        plan = spec.encryption_plan(self._trainer.facts.layout)
        noise = None if plan is None else plan.noise
        self._guard = privacy_guard(spec, identity, ledgers, self._trainer, noise, seeded=virtual) if private else None
        self.tally = None if self._guard is None else self._guard.tally
        self._warn(spec)
        if owner is not None:
            owner.check_seal(plan)
        self.facts = SiloFacts(
            examples=plan.examples if plan is not None and plan.seal_metrics else self._examples,
            memory_samples=machine.memory_samples if machine else self._trainer.find_batch_cap_on_gpu(),
            declared_speed=machine.speed if machine else identity.declared_speed,
            device=self._trainer.facts.device,
            validates=self._trainer.facts.validates,
            least_batch=self._owner.least_batch,
            least_samples=max(self._owner.least_samples, 1),
        )
        table = self._trainer.facts.table
        same = bytes.fromhex(self._trainer.facts.frozen) + (b"" if table is None else digest_of(table))
        # A real silo keeps its column names secret, like all content of its files.
        told = table if table is None or (machine is not None and len(str(table)) < _MOST_TOLD) else ()
        self.form = ModelForm.of(self._trainer.facts.layout, _frozen(same, spec, identity, keys), told)
        trainer = self._trainer if self._guard is None else self._guard.estimating()
        self.replica: Replica = plain_replica(spec, trainer, folder)
        if plan is not None and keys is not None:
            first = self._owner.first_model
            self.replica = encrypted_replica(plan, spec, identity, trainer, keys, folder, first, seeded=virtual)
        self._control = StepControl(self.name, self.layout.size, self.replica, folder) if spec.controls else None
        self._throttle = spec.throttle(identity.index) if throttled else None
        compared = spec.evaluation.cross_site
        self._compared = () if compared is None else compared.build(share=False).subjects
        self._spec, self._own = spec, OwnModels(folder)
        self._progress = LocalCarryover(folder, sent_as_it_is=not self.sealed and spec.wire.formats.up is FP32)
        self._done, self.cursor = LastOrders(folder), Cursor()
        if self._done.last is not None:
            self._go_on(self._done.last)

    @property
    def _examples(self) -> int:
        return self._trainer.facts.examples if self._guard is None else self._guard.settings.units

    def _warn(self, spec: RunSpec) -> None:
        held, wanted = self._examples, spec.local.batch_size
        if held < wanted:
            logger.warning(
                "silo %s holds %d training samples, fewer than local.batch_size %d: its batches have %d at most",
                *(self.name, held, wanted, held),
            )

    @property
    def done(self) -> tuple[LastOrder, ...]:
        return self._done.kept

    @property
    def layout(self) -> Layout:
        return self._trainer.facts.layout

    @property
    def kept_names(self) -> tuple[str, ...]:
        return self._trainer.facts.kept_names

    def initial_model(self) -> Vector:
        """Return the model before any training, float32 [layout.size]; the same at every silo."""
        return self._trainer.initial_model()

    def save_model(self, path: Path, model: Vector) -> None:
        self._trainer.save_model(path, model)

    @property
    def sealed(self) -> bool:
        return not isinstance(self.replica, PlainReplica)

    def train(self, order: WorkOrder, received: Payload, watch: Watch | None = None) -> Completed:
        """Carry out an order; time for encryption counts as overhead. Errors of the training pass through.

        Args:
            received: brings the silo's model to the base version; see `Replica.receive`.
            watch: called after each step; False ends the order there.

        Raises:
            OtherVersion: the payload does not continue the held model; nothing was changed.
            IntegrityError: silos of the group did not seal the payload, or sealed it for another place in the chain.
            SiloLocked: too many integrity checks failed.
            ProtocolError: the order or its payload is invalid.
        """
        if self._guard is not None:
            order = self._guard.allow(order)
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
        with nullcontext() if self._guard is None else self._guard.spending(order):
            outcome = self._run(order, model, cursor, watch)
        if self._owner.limits is not None:
            self._owner.check_done(outcome.report.samples)
        if self._guard is not None:
            outcome = self._guard.released(order, outcome)
        own = self._progress.of(order, outcome.update) if order.carry else None
        if self._control is not None:
            self._control.trained(order, outcome.update, outcome.report)
        trained_s = perf_counter()
        # A scoring order changes nothing, not even statistics of the data such as a model's running means.
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
        """Train from the model, or from the carried-over position; the evaluation always uses the model itself."""
        order = order if self._guard is None else self._guard.as_trained(order)
        watch, carried = self._patient(watch, order), order.behind or order.carry
        start = self._progress.start(order, model) if carried else model
        correction = None if self._control is None else self._control.correction(order)
        if start is model:
            return self._trainer.run(order, model, cursor, throttle=self._throttle, watch=watch, correction=correction)
        begin_s = perf_counter()
        found = self._trainer.try_evaluate(model, cursor, order.split) if order.evaluate else None
        cost_s = perf_counter() - begin_s
        outcome = self._trainer.run(replace(order, evaluate=False), start, cursor, throttle=self._throttle, watch=watch)
        overhead_s = {**outcome.report.overhead_s, "evaluate": outcome.report.overhead_s.get("evaluate", 0.0) + cost_s}
        return replace(outcome, report=replace(outcome.report, evaluation=found, overhead_s=overhead_s))

    def _about(self, order: WorkOrder, base: Vector) -> tuple[Vector, Cursor]:
        """Return the model of an order, float32 [values], and its cursor; a scoring order may mean an older model."""
        if order.scores_only and order.split is Split.TEST and not self._trainer.facts.validates:
            raise ProtocolError(SERVER, "split", "this silo's rounds are evaluated on its test split")
        if order.scores_only and order.subject.own:
            self._check_apart(order.subject)
            return self._own.model(order.subject)
        best = self.replica.best_model if order.scores_only and order.subject is Subject.BEST else None
        return base if best is None else best, self.cursor

    def _over(self, order: WorkOrder, answer: Completed, cursor: Cursor, own: Vector | None = None) -> Completed:
        """Finish an order, save its answer and the start of the next order, and return the answer."""
        beside = {name: each for name, each in ((OWED, self.replica.owed), (OWN, own)) if each is not None}
        # Saved before anybody sees the answer: after a crash the order is done, or it never happened.
        last = self._done.add(LastOrder(order, answer, cursor, beside))
        self._go_on(last)
        return last.answer

    def _go_on(self, last: LastOrder) -> None:
        self.cursor = last.cursor
        self.replica.owe(last.beside.get(OWED))
        if last.order.behind or last.order.carry:
            self._progress.keep(last.order, last.beside.get(OWN))

    def _train_apart(self, order: WorkOrder, received: Payload, watch: Watch | None) -> WorkReport:
        """Train one of the silo's own models further.

        A local model begins at the start of the data, with initial private parts. A tuned model begins with the run's
        cursor and private parts.
        """
        before = self._own.before(order)
        if before is None:
            alone = order.subject is Subject.LOCAL
            before = self._first(order, received), Cursor() if alone else self.cursor
        base, cursor = before
        outcome = self._trainer.run(order, base, cursor, throttle=self._throttle, watch=self._patient(watch, order))
        self._owner.check_done(outcome.report.samples)
        report = self.replica.disclosed(outcome.report)
        self._own.keep(order, base + outcome.update, report, outcome.cursor)
        return report

    def _first(self, order: WorkOrder, received: Payload) -> Vector:
        """Return the start model of the first own-model order, float32 [values]; in the clear, the order brings it.

        Raises `ProtocolError` without a best model of the order's version: a silo that missed sums has another.
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
        if watch is None and not order.scores_only:
            return None
        least = self._owner.least_samples

        def go_on(steps: int, samples: int) -> bool:
            more = watch is None or watch(steps, samples)
            return samples < least or (more and not order.scores_only)

        return go_on

    def _check_apart(self, subject: Subject) -> None:
        """Check that a run may ask for an own model; an encrypted run must declare it, else raise `ProtocolError`."""
        if self.sealed and subject not in self._compared:
            raise ProtocolError(SERVER, "subject", f"this run asks for no {subject} model")

    @property
    def _shares(self) -> bool:
        """Whether the local model may leave the silo; never under encryption. Emulated silos have no owner."""
        allowed = self._owner.share_local
        return not self.sealed and (self._emulated if allowed is None else allowed)

    def evaluate(self, received: Payload, asked: EvaluateModel) -> Evaluation | Attestation:
        """Evaluate a model for the server; raises as `train`.

        With sealed metrics the model is not evaluated: the answer is the pooled figures in the sums that came with it.
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
        if self._guard is None:
            return self._trainer.judge(model, cursor, asked.split, asked.subject, gains=gains)
        found = None
        if self._guard.tells:
            found = self._trainer.judge(model, cursor, asked.split, asked.subject, gains=False)
        return self._guard.evaluated(found, f"version {asked.version} {asked.split}")

    def where(self, thread: int) -> str:
        return self._trainer.where(thread)

    def answer(self, question: Payload) -> Payload:
        """Answer a question of the server's aggregator; see `Replica.answer`.

        A refusal does not count as an integrity failure: a restarted trainer must refuse some honest questions.
        """
        with self._exchange:
            self.check_open()
            return self.replica.answer(question)

    def snapshot(self) -> tuple[int, Payload]:
        with self._exchange:
            self.check_open()
            return self.replica.holds, self.replica.snapshot()

    def check_open(self) -> None:
        """Raise `SiloLocked` if integrity failures, in this run or another, have locked the silo."""
        if self.lockout is not None:
            self.lockout.check()

    def _receive(self, received: Payload, version: int) -> Vector:
        with self._counted():
            return self.replica.receive(received, version)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Turn every failure of sealed data within into `IntegrityError`, and count it.

        One class hides from the server which check failed. Faults of the machine do not count. Authentic data that a
        silo spoiled does not count either: one silo must not lock all others.
        """
        with self._exchange, nullcontext() if self.lockout is None else self.lockout.alone():
            try:
                yield
            except (OtherVersion, ConfigError, OSError, MemoryError, BrokenExecutor):
                raise
            except TrainerFailed as error:  # an error of the training, not a forgery
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
    """Return the digest of frozen tensors and columns, by which the server compares silos of a run.

    With keys the digest is concealed: the server cannot guess weights or names, nor compare runs.
    """
    digest = digest if len(digest) <= _DIGEST_BYTES else hashlib.sha256(digest).digest()
    if not digest or keys is None:
        return digest.hex()
    run = hashlib.sha256(spec.origin.encode()).digest() + identity.text.lasting
    return keys.group.conceal(hashlib.sha256(b"fedsync frozen 1\0" + run + digest).digest()).hex()
