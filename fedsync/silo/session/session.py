"""Session of a silo: receives a model, trains, sends the update, and remembers its position in the data.

Simulations in virtual time, Flower's simulation engine and real silos use this object, so a silo behaves alike
everywhere. Not to be confused with `fedsync.silo.session.service.TrainerService`, which answers requests while a
session works, or with `fedsync.model.transfer.Replica`, the session's copy of the model and its encryption.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
from pydantic import TypeAdapter, ValidationError

from fedsync.common import foreign
from fedsync.common.errors import SERVER, ConfigError, IntegrityError, ProtocolError, SpoiledSum
from fedsync.config.cipher import PlainConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.training import UserConfig
from fedsync.core.orders import Cursor, Evaluation, SiloFacts, Split, Subject, WorkOrder
from fedsync.model.layout import Vector, matches
from fedsync.model.plain_replica import PlainReplica
from fedsync.model.plain_wire import FP32
from fedsync.model.running_statistics import NAMES as STATISTICS
from fedsync.model.table_columns import digest_of
from fedsync.model.tensor_parts import ModelForm
from fedsync.model.transfer import OtherVersion, Payload, Replica
from fedsync.policies.rounds.settings_by_round import RATE, Called
from fedsync.silo.owner.key_lookup import many_keys, own_ring
from fedsync.silo.owner.lockout import Lockout
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import ANSWER, Attestation, Completed, EvaluateModel, Identity
from fedsync.silo.room.process import TrainingProcess
from fedsync.silo.session.current_order import LastOrder
from fedsync.silo.session.replica_factories import TrainerFailed, encrypted_replica, plain_replica
from fedsync.train.silo_trainer import Outcome, SiloTrainer, TrainerFacts, Watch

if TYPE_CHECKING:
    from fedsync.cipher.keys.keyring import Ring
    from fedsync.extras.cross_site.own_models import OwnOrders
    from fedsync.silo.session.session_extension import SessionExtension

logger = foreign.logger(__name__)

_SETTINGS: TypeAdapter[dict[str, bool | int | float | str]] = TypeAdapter(UserConfig)
_DIGEST_BYTES = 32
_MOST_TOLD = 30_000  # characters of an emulated silo's reported table form


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
            from fedsync.extras.surveys.opened_survey import open_survey, surveyed

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
        self.layout = self._trainer.facts.layout
        plan = spec.encryption_plan(self.layout)
        noise = None if plan is None else plan.noise
        kept = None if virtual else folder
        self._file = None if folder is None else folder / ANSWER
        self.last = None if self._file is None else LastOrder.load(self._file)
        self.cursor, guard = Cursor(), None
        if private:
            guard = privacy_guard(spec, identity, ledgers, self._trainer, noise, kept, self._finished, seeded=virtual)
        self._extensions: list[SessionExtension] = [] if guard is None else [guard]
        self.tally = None if guard is None else guard.tally
        facts = self._trainer.facts
        for each in self._extensions:
            facts = each.known(facts)
        self._warn(facts.examples, spec)
        if owner is not None:
            owner.check_seal(plan)
        names = *self.layout.names, *facts.kept_names
        normed = any(matches(name, STATISTICS) for name in names)  # batch norm cannot train on a batch of one sample
        self.facts = SiloFacts(
            examples=plan.examples if plan is not None and plan.seal_metrics else facts.examples,
            memory_samples=machine.memory_samples if machine else self._trainer.find_batch_cap_on_gpu(),
            declared_speed=machine.speed if machine else identity.declared_speed,
            device=facts.device,
            validates=facts.validates,
            least_batch=max(self._owner.least_batch, 1 + normed),
            least_samples=max(self._owner.least_samples, 1),
        )
        table = facts.table
        same = bytes.fromhex(facts.frozen) + (b"" if table is None else digest_of(table))
        # A real silo keeps its column names secret, like all content of its files.
        told = table if table is None or (machine is not None and len(str(table)) < _MOST_TOLD) else ()
        self.form = ModelForm.of(self.layout, _frozen(same, spec, identity, keys), told)
        self.replica: Replica = plain_replica(spec, facts, folder)
        if plan is not None and keys is not None:
            first, own, count = self._owner.first_model, self._trainer, facts.examples
            self.replica = encrypted_replica(
                *(plan, spec, identity, own, count, self._estimated, keys, folder, first), seeded=virtual
            )
        if spec.controls:
            from fedsync.silo.session.own_variate import StepControl

            self._extensions.append(StepControl(self.name, self.layout.size, self.replica, folder))
        self._throttle = spec.throttle(identity.index) if throttled else None
        self._spec, self._folder = spec, folder
        if self.last is not None:
            if self.last.form not in ("", self.form.frozen):
                problem = "the columns of its table, or its frozen tensors, are not those of its last order in this run"
                raise ConfigError("data", problem, "Bring the data of that time back, or start another run")
            self._go_on(self.last)

    def _estimated(self, order: WorkOrder) -> int | None:
        return next(filter(None, [each.estimated(order) for each in self._extensions]), None)

    def _warn(self, held: int, spec: RunSpec) -> None:
        wanted = spec.local.batch_size
        if held < wanted:
            logger.warning(
                "silo %s holds %d training samples, fewer than local.batch_size %d: its batches have %d at most",
                *(self.name, held, wanted, held),
            )

    @property
    def _finished(self) -> int:
        return 0 if self.last is None else self.last.number

    @property
    def trainer_facts(self) -> TrainerFacts:
        return self._trainer.facts

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
        for each in self._extensions:
            order = each.allow(order)
        if order.apart:
            return self._over(order, self._own.train(order, received, watch), self.cursor)
        if order.config or self._spec.on_round is not None:
            check_settings(order, self._spec)
        begin_s = perf_counter()
        base = self.receive(received, order.base_version)
        received_s = perf_counter()
        model, cursor = self._about(order, base)
        for each in self._extensions:
            each.begins(order)
        outcome = self._run(order, model, cursor, watch)
        if self._owner.limits is not None:
            self._owner.check_done(outcome.report.samples)
        for each in self._extensions:
            outcome = each.released(order, outcome)
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
        return self._over(order, Completed(report, update), following)

    def _run(self, order: WorkOrder, model: Vector, cursor: Cursor, watch: Watch | None) -> Outcome:
        correction = None
        for each in self._extensions:
            order = each.as_trained(order)
            correction = each.correction(order) if correction is None else correction
        patient = self._patient(watch, order)
        return self._trainer.run(order, model, cursor, throttle=self._throttle, watch=patient, correction=correction)

    def _about(self, order: WorkOrder, base: Vector) -> tuple[Vector, Cursor]:
        if order.scores_only and order.split is Split.TEST and not self._trainer.facts.validates:
            raise ProtocolError(SERVER, "split", "this silo's rounds are evaluated on its test split")
        if order.scores_only and order.subject.own:
            return self._own.model(order.subject)
        best = self.replica.best_model if order.scores_only and order.subject is Subject.BEST else None
        return base if best is None else best, self.cursor

    def _over(self, order: WorkOrder, answer: Completed, cursor: Cursor) -> Completed:
        last = LastOrder(order, answer, cursor, self.replica.owed, self._finished + 1, self.form.frozen)
        if self._file is not None:
            # Saved before anybody sees the answer: after a crash the order is done, or it never happened.
            last = self.last = last.save(self._file)
        self._go_on(last)
        return last.answer

    def _go_on(self, last: LastOrder) -> None:
        self.cursor = last.cursor
        self.replica.owe(last.owed)

    @cached_property
    def _own(self) -> OwnOrders:
        from fedsync.extras.cross_site.own_models import OwnOrders

        compared, allowed = self._spec.evaluation.cross_site, self._owner.share_local
        subjects = () if compared is None else compared.build(share=False).subjects
        # An emulated silo has no owner who could allow it.
        share = not self.sealed and (self._emulated if allowed is None else allowed)
        return OwnOrders(self, self._folder, subjects, share=share)

    def run_apart(self, order: WorkOrder, base: Vector, cursor: Cursor, watch: Watch | None) -> Outcome:
        """Train a model of the silo's own, float32 [values], within the owner's limits; nothing is sent or saved."""
        outcome = self._trainer.run(order, base, cursor, throttle=self._throttle, watch=self._patient(watch, order))
        self._owner.check_done(outcome.report.samples)
        return outcome

    def _patient(self, watch: Watch | None, order: WorkOrder) -> Watch | None:
        if watch is None and not order.scores_only:
            return None
        least = self._owner.least_samples

        def go_on(steps: int, samples: int) -> bool:
            more = watch is None or watch(steps, samples)
            return samples < least or (more and not order.scores_only)

        return go_on

    def evaluate(self, received: Payload, asked: EvaluateModel) -> Evaluation | Attestation:
        """Evaluate a model for the server; raises as `train`. With sealed metrics the model is not evaluated: the
        answer is the pooled figures in the sums that came with it.
        """
        if asked.owner:
            if self.sealed:
                raise ProtocolError(SERVER, "subject", "silos of an encrypted run send no models of their own")
            FP32.check(received, self.layout.size, SERVER)
            model, cursor = FP32.decode(received, 0, self.layout.size), Cursor()
        elif asked.subject.own and self.replica.pooled is None:
            model, cursor = self._own.model(asked.subject)
        else:
            model, cursor = self.receive(received, asked.version), self.cursor
            if (pooled := self.replica.pooled) is not None:
                return Attestation(pooled)

        def judge(gains: bool) -> Evaluation:
            return self._trainer.judge(model, cursor, asked.split, asked.subject, gains=gains)

        for each in self._extensions:
            if (told := each.judged(judge, f"version {asked.version} {asked.split}")) is not None:
                return told
        return judge(not (self.sealed or asked.owner))

    def where(self, thread: int) -> str:
        return self._trainer.where(thread)

    def answer(self, question: Payload) -> Payload:
        """Answer a question of the server's aggregator. A refusal does not count as an integrity failure: a restarted
        trainer must refuse some honest questions.
        """
        with self._exchange:
            self.check_open()
            return self.replica.answer(question)

    def snapshot(self) -> tuple[int, Payload]:
        with self._exchange:
            self.check_open()
            return self.replica.holds, self.replica.snapshot()

    def check_open(self) -> None:
        if self.lockout is not None:
            self.lockout.check()

    def receive(self, received: Payload, version: int) -> Vector:
        """Bring the silo's model to a version, and return it, float32 [layout.size]; raises as `train`."""
        with self._counted():
            return self.replica.receive(received, version)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Turn every failure of sealed data within into `IntegrityError`, and count it. One class hides from the server
        which check failed. Faults of the machine do not count. Authentic data that a silo spoiled does not count
        either: one silo must not lock all others.
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
    """Return the digest of frozen tensors and columns, by which the server compares silos of a run. With keys the
    digest is concealed: the server cannot guess weights or names, nor compare runs.
    """
    digest = digest if len(digest) <= _DIGEST_BYTES else hashlib.sha256(digest).digest()
    if not digest or keys is None:
        return digest.hex()
    run = hashlib.sha256(spec.origin.encode()).digest() + identity.text.lasting
    return keys.group.conceal(hashlib.sha256(b"fedsync frozen 1\0" + run + digest).digest()).hex()


def check_settings(order: WorkOrder, spec: RunSpec) -> None:
    """Raise `ProtocolError` if an order's settings differ from the specification's for its round. Where a function of
    the server decides, any settings are valid.
    """
    if order.scores_only and not order.config:
        return
    if spec.on_round is None:
        raise ProtocolError(SERVER, "order", "it has settings of its own, and the run has none by round")
    try:
        told = _SETTINGS.validate_json(order.config or "{}")
    except ValidationError as error:
        raise ProtocolError(SERVER, "order", f"its settings are invalid: {error.errors()[0]['msg']}") from error
    if isinstance(spec.on_round, Called):
        return
    expected = dict(spec.on_round.settings(order.base_version + 1, spec.local.learning_rate))
    expected.pop(RATE, None)
    if told != expected:
        raise ProtocolError(SERVER, "order", "its settings are not those that the run has for its round")
