"""Main loop of a silo's training process: one request at a time, with a second thread that listens.

The listening thread halts an order, reports the current code line, and ends the process when its session ends. The
session trusts nothing from this process, because a user's code runs here.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedsync.common import codec, foreign
from fedsync.common.errors import ConfigError
from fedsync.common.output import guard_output, output_may_be_lost
from fedsync.config.run_spec import RunSpec
from fedsync.silo.protocol import Identity, InProgress
from fedsync.silo.room import room_messages as messages
from fedsync.silo.room.room_messages import MOST_PRIVATE, Part, RoomChannel, RoomReply, RoomRequest, failure_of
from fedsync.silo.session.silo_setup import local_keeper, local_trainer
from fedsync.train.batches import hand_over_by_value
from fedsync.train.guests.guest_code import guarded
from fedsync.train.weights import read_state, values_of

logger = foreign.logger(__name__)

_Questions = queue.SimpleQueue[tuple[RoomRequest, list[Part]]]

_TELL_S = 0.02  # pause between two progress messages of an order


class _Work:
    def __init__(self, channel: RoomChannel, asked: messages.BuildTrainer, *, alone: bool) -> None:
        identity, spec = _described(asked)
        if not alone and spec.local.workers:
            problem = "this system gives a process no namespaces of its own, so that it trains without helpers"
            raise ConfigError("local.workers", problem, "Write workers: 0, or let this user make namespaces")
        self._channel, self._least, self._throttle = channel, asked.least_samples, spec.throttle(identity.index)
        self.trainer = local_trainer(spec, identity)
        self.built = messages.TrainerBuilt(self.trainer.facts, self.trainer.find_batch_cap_on_gpu())
        self.halted = ""

    def do(self, asked: RoomRequest, parts: list[Part]) -> None:
        match asked:
            case messages.TrainOrder():
                self._train(asked, *parts)
            case messages.EvaluateGiven(cursor, split, subject, gains):
                model, at = parts[0].view(np.float32), replace(cursor, private=parts[1].tobytes())
                self._channel.send(self.trainer.judge(model, at, split, subject, gains=gains))
            case messages.MakePrivate(settings):
                self._channel.send(messages.MadePrivate(self.trainer.make_private(settings)))
            case messages.BuildInitialModel():
                self._channel.send(messages.InitialModelBuilt(), self.trainer.initial_model())

    def _train(self, asked: messages.TrainOrder, base: Part, private: Part, correction: Part | None = None) -> None:
        order, told_s = asked.order, 0.0

        def watch(steps: int, samples: int) -> bool:
            nonlocal told_s
            now_s = time.monotonic()
            if now_s - told_s > _TELL_S:
                told_s = now_s
                self._channel.send(InProgress(steps, samples))
            return samples < self._least or not (order.scores_only or self.halted == order.update_id)

        throttle = self._throttle if asked.throttled else None
        corrected = None if correction is None else correction.view(np.float32)
        cursor = replace(asked.cursor, private=private.tobytes())
        outcome = self.trainer.run(
            order, base.view(np.float32), cursor, throttle=throttle, watch=watch, correction=corrected
        )
        after = outcome.cursor
        done = messages.OrderDone(outcome.report, after.epoch, after.position, after.state)
        self._channel.send(done, outcome.update, after.private)


def serve(end: socket.socket, *, alone: bool, failure: ConfigError | None) -> None:
    """Build the trainer, then answer requests until the session ends. ``alone``: the process has namespaces of its own.
    ``failure``: error of entering the room, then the only reply.
    """
    guard_output()
    output_may_be_lost()
    hand_over_by_value()
    channel = RoomChannel(end, RoomReply, RoomRequest, trusted=True)
    asked, _ = channel.receive()
    assert isinstance(asked, messages.BuildTrainer | messages.BuildKeeper)
    try:
        if failure is not None:
            raise failure
        if isinstance(asked, messages.BuildKeeper):
            _keep(channel, asked)
            return
        work, questions = _Work(channel, asked, alone=alone), _Questions()
    except Exception as error:
        _tell_failure(channel, error)
        return
    channel.send(work.built)
    model_bytes = work.built.facts.layout.nbytes
    most = (model_bytes, MOST_PRIVATE, model_bytes)
    threading.Thread(target=_listen, args=(channel, most, work, questions), daemon=True).start()
    while True:
        question, parts = questions.get()
        try:
            work.do(question, parts)
        except Exception as error:  # the session must get a reply
            _tell_failure(channel, error)
        del question, parts


def _listen(channel: RoomChannel, most: tuple[int, ...], work: _Work, questions: _Questions) -> None:
    main = threading.main_thread().ident or 0
    while True:
        try:
            asked, parts = channel.receive(most)
            match asked:
                case messages.HaltOrder(update_id):
                    work.halted = update_id
                case messages.AskCurrentLine():
                    channel.send(messages.CurrentLine(foreign.shown(work.trainer.where(main))))
                case _:
                    if isinstance(asked, messages.TrainOrder):
                        work.halted = ""  # messages arrive in order: a later halt belongs to this order
                    questions.put((asked, parts))  # type: ignore[arg-type]  # the channel receives nothing else
        except (EOFError, OSError):
            os._exit(0)


def _keep(channel: RoomChannel, asked: messages.BuildKeeper) -> None:
    identity, spec = _described(asked)
    keeper, file = local_keeper(spec, identity), Path("model.pt")
    channel.send(keeper.layout)
    while True:
        try:
            _, parts = channel.receive((keeper.layout.nbytes, MOST_PRIVATE))
        except EOFError:
            return
        with guarded():
            keeper.save_model(file, parts[0].view(np.float32), parts[1].tobytes())
        places, values = values_of(read_state(file))
        channel.send(messages.ModelFilled(places), values)


def _described(asked: messages.BuildTrainer | messages.BuildKeeper) -> tuple[Identity, RunSpec]:
    return codec.loads(Identity, asked.identity, own=True), RunSpec.parse(asked.spec)


def _tell_failure(channel: RoomChannel, error: Exception) -> None:
    logger.warning("%s", error, exc_info=error)
    channel.send(failure_of(error))
