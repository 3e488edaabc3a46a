"""Initial model (version 0) and its layout: built by the task, or by a silo if the server lacks the data or code."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Array, ArrayRecord

from fedsync.common import foreign
from fedsync.common.errors import ConfigError, ProtocolError, RunError
from fedsync.config.cipher import PlainConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower import payloads
from fedsync.model.layout import Layout, Vector
from fedsync.server.nodes import Admission, Nodes, make_regions
from fedsync.server.outbox import Outbox
from fedsync.server.timeouts import Timeouts
from fedsync.silo.owner.refusals import explained
from fedsync.silo.protocol import AskModel, InitialModel, Refused
from fedsync.transport.port import Transport

if TYPE_CHECKING:
    from fedsync.train.weights import TaskModel

logger = foreign.logger(__name__)

_SMALL_BYTES = 2**24
"""Maximum size of a model that stays in memory between two exports [bytes]."""


def task_model(config: StrategyConfig) -> TaskModel:
    """Return the task's model; raises `ConfigError` if only silos have the data or the code that it needs."""
    task = config.task.build()
    from fedsync.train.weights import TaskModel  # torch takes seconds to import, so only after `build` has succeeded

    return TaskModel(task, config.seed, config.model.build())


def given_by(config: StrategyConfig, *, resumed: bool) -> ArrayRecord | None:
    """Return the first model that a strategy file names; None if it names none.

    A ``resumed`` run in the clear has its model in the checkpoint. In a resumed encrypted run, silos without a model
    begin with the first model again. Raises `ConfigError` if the file is missing, or no state dict.
    """
    if config.initial_model is None or (resumed and isinstance(config.cipher, PlainConfig)):
        return None
    from fedsync.train.weights import read_arrays

    arrays = read_arrays(Path(config.initial_model))
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def model_writer(config: StrategyConfig, layout: Layout) -> Callable[[Path, Vector], None]:
    """Return a function that writes a model, float32 [layout.size], as a state dict; `ConfigError` if it cannot.

    Tensors that do not travel are written as the task builds them. If the task needs data that the server lacks, the
    file has only tensors that travel, and integer buffers stay float32. A small model is built once per run.
    """
    kept: TaskModel | None = None

    def write(path: Path, model: Vector) -> None:
        nonlocal kept
        try:
            built = kept or task_model(config)
        except ConfigError:
            from fedsync.train.weights import save_tensors

            save_tensors(path, layout.split(model))
            return
        kept = built if layout.nbytes <= _SMALL_BYTES else None
        built.save_model(path, model)

    return write


def ask_for_model(
    transport: Transport, spec: str, timing: Timeouts, admission: Admission | None = None, *, values: bool = True
) -> tuple[Vector, InitialModel]:
    """Return the untrained model, float32 [layout.size], and its description, from the first silo that sends it.

    Without ``values``, silos send the description alone, and the model is empty. A silo with an invalid answer is asked
    again after a growing pause. Raises `RunError` if no silo sent a model in time, or all silos refuse the run.
    """
    begin_s = time.monotonic()
    nodes = Nodes(transport, admission, timing.look_s, partial(make_regions, hold_s=timing.hold_s))
    last = "nobody answered"
    outbox = Outbox(transport, nodes, spec, timing, report_s=0.0)
    while (now_s := time.monotonic() - begin_s) < timing.join_timeout_s:
        gone, fresh = nodes.look()
        for node in gone:
            outbox.forget(node)
            nodes.forget(node)
        for node in fresh:
            outbox.ask(node, AskModel(values=values), now_s)
        for sent in outbox.unanswered(now_s):
            logger.warning("%s has not answered a message; asking for the answer again", nodes.sender(sent.node))
            outbox.ask_again(sent, now_s)
        for sent in [*outbox.overdue(now_s), *outbox.flush()]:
            nodes.ask_again(sent.node)
        for sent, answer in outbox.replies(now_s):
            name, why = nodes.sender(sent.node), None
            try:
                match outbox.read(sent, answer):
                    case InitialModel() as about, payload:
                        if values:
                            return payloads.read_model(about.layout, payload, name)[0], about
                        payloads.check_names(about.layout, name)
                        return np.zeros(0, dtype=np.float32), about
                    case Refused() as refused, _:
                        last = explained(name, refused)
                        nodes.refuses(sent.node, refused)
                    case reply, _:
                        raise ProtocolError(name, "message", f"it answers {type(reply).__name__}")
            except ProtocolError as error:
                last, why = str(error), error
            nodes.ask_again(sent.node, why or last)
        time.sleep(timing.poll_s)
    raise RunError(f"no silo sent a model in {timing.join_timeout_s:g} s; {last}")
