"""Training process of a silo as its session sees it. The process has the data, but neither keys nor a network.

The session (`fedsync.silo.session.session`) has the keys, the state and the last order, and imports no user's code. The
session distrusts every message of the process: it checks the form, the length, and that all values are finite.

| process | on a request | next state |
|---|---|---|
| runs | gets the request; the session waits as long as the process lives | runs, ended |
| ended, for any reason | a new process starts and builds task, data and model again | runs |
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedsync.common import foreign
from fedsync.common.environment import FLOWER_IDS
from fedsync.common.errors import ConfigError, Diverged, PolicyError, RunError
from fedsync.config.run_spec import RunSpec
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.model.chunked_arrays import spans
from fedsync.model.layout import Vector
from fedsync.privacy.release import PrivateSettings
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import Identity
from fedsync.silo.room.checked import checked_order, checked_progress, checked_trainer
from fedsync.silo.room.failures import raise_failure
from fedsync.silo.room.process_start import StartedProcess
from fedsync.silo.room.room_messages import (
    MOST_PRIVATE,
    AskCurrentLine,
    BuildInitialModel,
    BuildTrainer,
    CurrentLine,
    EvaluateGiven,
    HaltOrder,
    InitialModelBuilt,
    MadePrivate,
    MakePrivate,
    ModelEvaluated,
    OrderDone,
    OrderProgress,
    Part,
    RoomChannel,
    RoomFailure,
    RoomReply,
    RoomRequest,
    TrainerBuilt,
    TrainOrder,
)
from fedsync.silo.session.trainer_folder import HOME
from fedsync.train.machine.throttle import Throttle
from fedsync.train.silo_trainer import Outcome, TrainerFacts, Watch

logger = foreign.logger(__name__)

_LOOK_S = 0.02
_LINE_S, _LAST_S = 2.0, 1.0

_Reply = TypeVar("_Reply", OrderDone, ModelEvaluated, InitialModelBuilt, MadePrivate)


class TrainingProcess:
    """A `SiloTrainer` in a separate process; see `SiloTrainer` for the undocumented methods.

    Args:
        spec: the run as the owner allows it, with the paths of the silo's data.
        folder: of the resident trainer.

    Raises:
        ConfigError: task, data or device are not usable, or this system cannot confine a process.
    """

    def __init__(self, identity: Identity, spec: RunSpec, owner: OwnerPolicy, folder: Path) -> None:
        self._home = folder / HOME
        self._set_up = BuildTrainer(identity.dump(), spec.dump(), owner.least_samples)
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
        return self._vector(self._ask(InitialModelBuilt, BuildInitialModel(), (), (self.facts.layout.nbytes,))[1])

    def save_model(self, path: Path, model: Vector) -> None:
        """Always raise: the owner exports a real silo's models with a command."""
        raise PolicyError("a training process writes no models")

    def make_private(self, settings: PrivateSettings) -> int:
        units = self._ask(MadePrivate, MakePrivate(settings), (), ())[0].units
        self._private = settings
        if not 1 <= units <= self.facts.examples:
            raise RunError(f"the training process says that {self.facts.examples} rows are of {units} units")
        return units

    def run(
        self,
        order: WorkOrder,
        base: Vector,
        cursor: Cursor,
        throttle: Throttle | None = None,
        watch: Watch | None = None,
        correction: Vector | None = None,
    ) -> Outcome:
        """Run an order as `SiloTrainer.run` does.

        ``watch`` is called about every 20 ms. The order ends after the next step once ``watch`` returns False.

        Raises:
            RunError: the process ended.
            Diverged: the update is not finite.
        """
        asked = TrainOrder(order, replace(cursor, private=b""), throttle is not None, _ids())
        beside = (base, cursor.private, *(() if correction is None else (correction,)))
        told, parts = self._ask(OrderDone, asked, beside, (self.facts.layout.nbytes, MOST_PRIVATE), watch)
        checked_order(order, told, len(parts), self.facts.examples)
        update = self._vector(parts)
        for start, stop in spans(update.size, update.itemsize):
            if not np.isfinite(update[start:stop]).all():
                raise Diverged("task", "the training process sends values that are not finite", "Train slower")
        return Outcome(update, told.report, Cursor(told.epoch, told.position, told.state, parts[1].tobytes()))

    def try_evaluate(self, model: Vector, cursor: Cursor, split: Split) -> Evaluation | None:
        return self._judge(EvaluateGiven(replace(cursor, private=b""), split, "", False, True, _ids()), model, cursor)

    def judge(self, model: Vector, cursor: Cursor, split: Split, subject: str, *, gains: bool) -> Evaluation:
        asked = EvaluateGiven(replace(cursor, private=b""), split, subject, gains, False, _ids())
        found = self._judge(asked, model, cursor)
        if found is None:
            raise RunError("the training process finds nothing of a model")
        return found

    def where(self, thread: int) -> str:
        """Return the code line as `SiloTrainer.where` does; always of the process's main thread."""
        with self._stands:
            self._at = ""
            try:
                self._started.channel.send(AskCurrentLine())
                self._stands.wait_for(lambda: self._at, _LINE_S)
            except OSError:
                return "a process that has ended"
            return self._at or "a call that lets no other thread run"

    @property
    def pid(self) -> int:
        """Id of the process, which may have ended."""
        return self._started.pid

    def end(self) -> None:
        """Kill the process; the next request starts a new process."""
        self._started.end()

    def _judge(self, asked: EvaluateGiven, model: Vector, cursor: Cursor) -> Evaluation | None:
        return self._ask(ModelEvaluated, asked, (model, cursor.private), ())[0].found

    def _vector(self, parts: Sequence[Part]) -> Vector:
        if not parts or parts[0].nbytes != self.facts.layout.nbytes:
            raise RunError("the training process sends a model of another length")
        return parts[0].view(np.float32)

    # The process.

    def _ask(
        self,
        kind: type[_Reply],
        asked: RoomRequest,
        parts: Sequence[Vector | bytes],
        most: Sequence[int],
        watch: Watch | None = None,
    ) -> tuple[_Reply, list[Part]]:
        """Return the reply of this kind; start a new process if the old process has ended."""
        with self._asking:
            channel = self._living()
            try:
                channel.send(asked, *parts)
                told, beside = self._answer(channel, most, watch, asked)
            except (EOFError, OSError) as error:
                raise self._gone(error) from error
            except BaseException:
                self.end()
                raise
        if isinstance(told, RoomFailure):
            raise_failure(told)
        if not isinstance(told, kind):
            self.end()
            raise RunError(f"the training process answers {type(told).__name__} to {type(asked).__name__}")
        return told, beside

    def _answer(
        self, channel: RoomChannel, most: Sequence[int], watch: Watch | None, asked: RoomRequest
    ) -> tuple[RoomReply, list[Part]]:
        """Wait for the reply, and pass progress to ``watch`` meanwhile."""
        steps, halted = OrderProgress(0, 0), False
        while True:
            if channel.poll(_LOOK_S):
                told, parts = channel.receive(most)
                match told:
                    case OrderProgress():
                        steps = checked_progress(asked, told)
                    case CurrentLine(at):
                        with self._stands:
                            self._at = at
                            self._stands.notify_all()
                    case _:
                        return told, parts  # type: ignore[return-value]  # the channel receives nothing else
            elif self._started.exit_code() is not None:
                raise EOFError  # a child of the ended process may still hold the channel open
            if watch is not None and isinstance(asked, TrainOrder) and steps.steps > 0 and not halted:
                halted = not watch(steps.steps, steps.samples)
                if halted:
                    channel.send(HaltOrder(asked.order.update_id))

    def _living(self) -> RoomChannel:
        if self._started.exit_code() is not None:
            logger.warning("the training process ended, and another is started")
            self._started.end()
            self._started = StartedProcess(self._home, self._owner)
            built = self._build()
            device = self.facts.device  # another device trains the same model
            if replace(built.facts, device=device) != self.facts:
                self.end()
                problem = "model or data are others than when the run began here"
                raise ConfigError("task", problem, "Put back what was there, or begin another run")
            if self._private is not None:
                self._make_private_again(self._private)
        return self._started.channel

    def _make_private_again(self, settings: PrivateSettings) -> None:
        self._started.channel.send(MakePrivate(settings))
        told, _ = self._started.channel.receive()
        if isinstance(told, RoomFailure):
            raise_failure(told)

    def _build(self) -> TrainerBuilt:
        try:
            self._started.channel.send(self._set_up)
            told, _ = self._started.channel.receive()
            if isinstance(told, RoomFailure):
                raise_failure(told)
            return checked_trainer(told)  # type: ignore[arg-type]  # the channel receives nothing else
        except (EOFError, OSError) as error:
            raise self._gone(error) from error
        except BaseException:
            self.end()
            raise

    def _gone(self, error: Exception) -> RunError:
        code = self._started.exit_code(_LAST_S)
        self.end()
        if code is None:
            return RunError(f"the training process said what it may not ({error}), and was ended")
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        return RunError(f"the training process ended {how}. The next order starts another")


def _ids() -> str:
    return os.environ.get(FLOWER_IDS, "")
