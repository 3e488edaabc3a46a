"""Proxy for a silo's training process, in the session. The process has the data, but neither keys nor a network.

The session (`fedsync.silo.session.session`) has the keys, the state and the last order, and imports no user's code. The
session distrusts every message of the process: it checks the form, the length, and that all values are finite.

| process | on a request | next state |
|---|---|---|
| runs | gets the request; the session waits as long as the process lives | runs, ended |
| ended, for any reason | a new process starts and builds task, data and model again | runs |
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedsync.common import foreign
from fedsync.common.errors import ConfigError, Diverged, PolicyError, RunError
from fedsync.config.run_spec import RunSpec
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.model.chunked_arrays import spans
from fedsync.model.layout import Vector
from fedsync.privacy.release import PrivateSettings
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import Identity, InProgress
from fedsync.silo.room import room_messages as messages
from fedsync.silo.room.process_start import StartedProcess
from fedsync.silo.room.room_messages import MOST_PRIVATE, Part, RoomChannel, RoomReply, RoomRequest, raise_failure
from fedsync.silo.session.trainer_folder import HOME
from fedsync.train.silo_trainer import Outcome, Throttle, TrainerFacts, Watch

logger = foreign.logger(__name__)

_LOOK_S = 0.02
_LINE_S, _LAST_S = 2.0, 1.0

_Reply = TypeVar("_Reply", messages.OrderDone, Evaluation, messages.InitialModelBuilt, messages.MadePrivate)


class TrainingProcess:
    """A `SiloTrainer` in a separate process, for a run as the owner allows it; ``folder`` is the resident trainer's.
    `ConfigError` if task, data or device are not usable, or this system cannot confine a process.
    """

    def __init__(self, identity: Identity, spec: RunSpec, owner: OwnerPolicy, folder: Path) -> None:
        self._home = folder / HOME
        self._set_up = messages.BuildTrainer(identity.dump(), spec.dump(), owner.least_samples)
        self._owner = owner
        self._asking = threading.Lock()
        self._stands = threading.Condition()
        self._at = ""
        self._started = StartedProcess(self._home, owner)
        self._built = self._build()
        self._private: PrivateSettings | None = None

    @property
    def facts(self) -> TrainerFacts:
        return self._built.facts

    def find_batch_cap_on_gpu(self) -> int | None:
        return self._built.batch_cap

    def initial_model(self) -> Vector:
        return self._vector(
            self._ask(messages.InitialModelBuilt, messages.BuildInitialModel(), most=(self.facts.layout.nbytes,))[1]
        )

    def save_model(self, path: Path, model: Vector) -> None:
        raise PolicyError("a training process writes no models")

    def make_private(self, settings: PrivateSettings) -> int:
        units = self._ask(messages.MadePrivate, messages.MakePrivate(settings))[0].units
        self._private = settings
        if not 1 <= units <= self.facts.examples:
            raise RunError(f"the training process reports {units} privacy units in {self.facts.examples} rows")
        return units

    def run(
        self,
        order: WorkOrder,
        base: Vector,
        cursor: Cursor,
        *,
        throttle: Throttle | None = None,
        watch: Watch | None = None,
        correction: Vector | None = None,
    ) -> Outcome:
        """Run an order, with ``watch`` about every 20 ms; `RunError` if the process ends."""
        asked = messages.TrainOrder(order, replace(cursor, private=b""), throttle is not None)
        beside = (base, cursor.private, *(() if correction is None else (correction,)))
        told, parts = self._ask(messages.OrderDone, asked, beside, (self.facts.layout.nbytes, MOST_PRIVATE), watch)
        messages.checked_order(order, told, len(parts), self.facts.examples)
        update = self._vector(parts)
        for start, stop in spans(update.size, update.itemsize):
            if not np.isfinite(update[start:stop]).all():
                raise Diverged("task", "the training process sends values that are not finite", "Train slower")
        return Outcome(update, told.report, Cursor(told.epoch, told.position, told.state, parts[1].tobytes()))

    def judge(self, model: Vector, cursor: Cursor, split: Split, subject: str, *, gains: bool) -> Evaluation:
        asked = messages.EvaluateGiven(replace(cursor, private=b""), split, subject, gains)
        return self._ask(Evaluation, asked, (model, cursor.private))[0]

    def where(self, thread: int) -> str:
        """Return the code line as `SiloTrainer.where`, but always of the process's main thread."""
        with self._stands:
            self._at = ""
            try:
                self._started.channel.send(messages.AskCurrentLine())
                self._stands.wait_for(lambda: self._at, _LINE_S)
            except OSError:
                return "a process that has ended"
            return self._at or "a call that lets no other thread run"

    def end(self) -> None:
        self._started.end()

    def _vector(self, parts: Sequence[Part]) -> Vector:
        if not parts or parts[0].nbytes != self.facts.layout.nbytes:
            raise RunError("the training process sends a model of another length")
        return parts[0].view(np.float32)

    # The process.

    def _ask(
        self,
        kind: type[_Reply],
        asked: RoomRequest,
        parts: Sequence[Vector | bytes] = (),
        most: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> tuple[_Reply, list[Part]]:
        with self._asking:
            self._revive()
            told, beside = self._exchange(asked, parts, most, watch)
        if not isinstance(told, kind):
            self.end()
            raise RunError(f"the training process answers {type(told).__name__} to {type(asked).__name__}")
        return told, beside

    def _exchange(
        self,
        asked: RoomRequest,
        parts: Sequence[Vector | bytes] = (),
        most: Sequence[int] = (),
        watch: Watch | None = None,
    ) -> tuple[RoomReply, list[Part]]:
        try:
            self._started.channel.send(asked, *parts)
            told, beside = self._answer(self._started.channel, most, watch, asked)
        except (EOFError, OSError) as error:
            raise self._gone(error) from error
        except BaseException:
            self.end()
            raise
        if isinstance(told, messages.RoomFailure):
            raise_failure(told)
        return told, beside

    def _answer(
        self, channel: RoomChannel, most: Sequence[int], watch: Watch | None, asked: RoomRequest
    ) -> tuple[RoomReply, list[Part]]:
        steps, halted = InProgress(0, 0), False
        while True:
            if channel.poll(_LOOK_S):
                told, parts = channel.receive(most)
                match told:
                    case InProgress():
                        steps = messages.checked_progress(asked, told)
                    case messages.CurrentLine(at):
                        with self._stands:
                            self._at = at
                            self._stands.notify_all()
                    case _:
                        return told, parts  # type: ignore[return-value]  # the channel receives nothing else
            elif self._started.exit_code() is not None:
                raise EOFError  # a child of the ended process may still hold the channel open
            if watch is not None and isinstance(asked, messages.TrainOrder) and steps.steps > 0 and not halted:
                halted = not watch(steps.steps, steps.samples)
                if halted:
                    channel.send(messages.HaltOrder(asked.order.update_id))

    def _revive(self) -> None:
        if self._started.exit_code() is None:
            return
        logger.warning("the training process ended, and another is started")
        self._started.end()
        self._started = StartedProcess(self._home, self._owner)
        built = self._build()
        device = self.facts.device  # another device trains the same model
        if replace(built.facts, device=device) != self.facts:
            self.end()
            problem = "model or data have changed since the run began here"
            raise ConfigError("task", problem, "Restore them, or begin another run")
        if self._private is not None:
            self._exchange(messages.MakePrivate(self._private))

    def _build(self) -> messages.TrainerBuilt:
        try:
            return messages.checked_trainer(self._exchange(self._set_up)[0])
        except BaseException:
            self.end()
            raise

    def _gone(self, error: Exception) -> RunError:
        code = self._started.exit_code(_LAST_S)
        self.end()
        if code is None:
            return RunError(f"the training process sent an invalid message ({error}), and was ended")
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return RunError(f"the training process ended {how}. The next order starts another")
