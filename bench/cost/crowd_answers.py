"""Answers of the silos of `bench/cost/crowd_silos.py`: a real silo's session, whose trainer trains nothing."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from bench.cost import crowd_shared
from fedsync.config.run_spec import RunSpec
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder, WorkReport
from fedsync.evaluation.metrics.named import Wanted
from fedsync.model.layout import Layout, Vector
from fedsync.model.transfer import NO_PAYLOAD, OtherVersion, Payload
from fedsync.silo.owner.refusals import refuse
from fedsync.silo.protocol import (
    Answer,
    AskModel,
    AskSnapshot,
    Collect,
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
from fedsync.silo.session import silo_setup
from fedsync.silo.session.session import SiloSession
from fedsync.tasks.metrics.measurement import Measuring
from fedsync.train.silo_trainer import Outcome, TrainerFacts
from fedsync.train.weights import TaskModel

EXAMPLES = 64
IDLE = "no device"


class Idle:
    """`fedsync.train.silo_trainer.SiloTrainer` without data: an update is noise, and a score is drawn."""

    def __init__(self, spec: RunSpec, identity: Identity, *, many: bool) -> None:
        self._text, self._wanted = identity.spec, spec.evaluation.wanted
        layout, self._first = _model(self._text)
        self._random = np.random.default_rng(identity.index)
        self.facts = TrainerFacts(layout, "", (), None, IDLE, EXAMPLES, validates=False)

    def initial_model(self) -> Vector:
        return self._first.copy()

    def find_batch_cap_on_gpu(self) -> None: ...

    def try_evaluate(self, model: Vector, cursor: Cursor, split: Split) -> Evaluation:
        return _guesses(self._text, self._wanted)

    def judge(self, model: Vector, cursor: Cursor, split: Split, subject: str, *, gains: bool) -> Evaluation:
        return _guesses(self._text, self._wanted)

    def run(self, order: WorkOrder, base: Vector, cursor: Cursor, **_: object) -> Outcome:
        update = self._random.normal(0.0, 1e-3, self.facts.layout.size).astype(np.float32)
        found = self.try_evaluate(base, cursor, order.split) if order.evaluate else None
        samples = order.max_steps * order.batch_size
        report = WorkReport(order.base_version, order.max_steps, samples, 1e-3, 1.0, evaluation=found)
        return Outcome(update, report, cursor)


@lru_cache(maxsize=2)
def _model(text: str) -> tuple[Layout, Vector]:
    """Layout and values of the first model of a run."""
    spec = RunSpec.parse(text)
    model = TaskModel(spec.task.build(), spec.seed, spec.model.build())
    return model.layout, model.initial()


@lru_cache(maxsize=2)
def _guesses(text: str, wanted: Wanted) -> Evaluation:
    """What is found where outputs and targets are drawn: sums of all that the run measures."""
    task, (layout, _) = RunSpec.parse(text).task.build(), _model(text)
    (classes,) = layout.shapes[-1]
    drawn = torch.Generator().manual_seed(0)
    outputs = torch.randn(EXAMPLES, classes, generator=drawn)
    targets = torch.randint(classes, (EXAMPLES,), generator=drawn)
    measuring = Measuring(wanted.metrics(task.metrics), torch.device("cpu"))
    measured = measuring.begin()
    measured.add(measuring.of(outputs, targets, torch.arange(EXAMPLES)))
    loss, correct = (float(each) for each in task.assess(outputs, targets))
    return Evaluation(loss, correct, EXAMPLES, sums=measured.sums(EXAMPLES))


class Silo:
    """One of the silos: its answers.

    Args:
        name: of it.
        index: its number.
        folder: of all silos' files.
    """

    def __init__(self, name: str, index: int, folder: Path) -> None:
        self.name, self._index, self._folder = name, index, folder
        self._session: SiloSession | None = None

    def answer(self, spec: str, text: str, payload: Payload | None) -> tuple[str, Payload | None]:
        """The answer to a question, as `fedsync.silo.agent.answers` and the trainer behind it give it."""
        try:
            reply, answer = self._reply(self._opened(spec), read_request(text), payload)
        except Exception as error:
            print(f"{self.name}: {error!r}", flush=True)
            reply, answer = refuse(error), None
        return write_reply(reply), answer

    def _opened(self, text: str) -> SiloSession:
        if self._session is None:
            spec = crowd_shared.specification(text)
            keys = self._folder / "keys" / "silos"
            identity = Identity(text, self._index, self.name, resources=False)
            silo_setup.local_trainer = Idle  # type: ignore[assignment]
            self._session = SiloSession(identity, spec, lambda name: crowd_shared.ring(keys / name))
            if self._session.facts.device != IDLE:
                raise SystemExit("the session has another trainer: silo_setup.local_trainer does not build it any more")
            crowd_shared.share(self._session.replica)
        return self._session

    @staticmethod
    def _reply(session: SiloSession, request: Request, payload: Payload | None) -> tuple[Reply, Payload | None]:
        given = NO_PAYLOAD if payload is None else payload
        try:
            match request:
                case Describe():
                    greeting = session.replica.greeting()
                    return Hello(session.name, session.facts, session.replica.holds, session.form), greeting
                case AskModel(values):
                    model = InitialModel(session.layout, session.trainer_facts.kept_names, session.form.frozen)
                    return model, session.initial_model().view(np.uint8) if values else None
                case Train(order):
                    done = session.train(order, given)
                    return done.report, np.ascontiguousarray(done.update).view(np.uint8)
                case Collect(update_id):
                    kept = session.last
                    if kept is None or kept.order.update_id != update_id:
                        raise LookupError(f"{update_id} was lost on its way")
                    return kept.answer.report, np.ascontiguousarray(kept.answer.update).view(np.uint8)
                case EvaluateModel():
                    return session.evaluate(given, request), None
                case Question():
                    return Answer(), session.answer(given)
                case AskSnapshot():
                    version, snapshot = session.snapshot()
                    return Snapshot(version), snapshot
        except OtherVersion as error:
            return error.mismatch, None
