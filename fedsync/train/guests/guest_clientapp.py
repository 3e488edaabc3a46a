"""Trainer that calls a user's Flower ClientApp, in its own process, once per order.

This module is the only module outside ``fedsync/flower`` that imports flwr at run time; only trainers of such apps
import it. Messages stay in the process and never pass a SuperLink.

An order becomes a message of type ``train``: ``arrays`` holds the base model, ``config`` the order's settings. The
update is the reply's arrays minus the base. ``context.state`` is stored on disk together with the last order, so a
repeated order starts from the same state.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import length_hint
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message
from flwr.clientapp import ClientApp
from torch import nn

from fedsync.client.app import Scalar, Silo
from fedsync.client.work import Steps, counted, end_loop
from fedsync.common.environment import flower_ids
from fedsync.common.errors import ConfigError, RunError
from fedsync.common.rng import Stream, derive_seed
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.evaluation.metrics.metric_types import statistics_of
from fedsync.model.layout import Vector
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.privacy.release import PrivateSettings
from fedsync.train.guests.guest_code import own_code, watched_loaders
from fedsync.train.guests.guest_reply import (
    EXAMPLES,
    LOSSES,
    REPLY,
    Arrays,
    NamedArrays,
    declared,
    evaluation_of,
    figures_of,
    metrics_of,
    only,
    sums_of,
)
from fedsync.train.local_trainer import BeginPace, LocalTrainer, LoopResult
from fedsync.train.machine.device import resolve
from fedsync.train.module_parts import MOST_BYTES
from fedsync.train.options import LocalOptions
from fedsync.train.order_clock import BatchSizes, Pace

T = TypeVar("T")
_ARRAYS, _CONFIG, _PRIVATE = "arrays", "config", "fedsync.private"
"""Names of message records, and of the private arrays in a stored ``context.state``."""

_COUNTING = WorkOrder("", 0, 1, batch_size=32, max_steps=1, learning_rate=0.001, seed=0)
"""Order with which an app is asked for its number of samples; the update is discarded."""

_LARGER = replace(_COUNTING, batch_size=1024)
"""Larger batch, for apps whose reply may give the number of samples trained instead of held."""


class Counted(BaseException):
    """Signal with the number of samples; a `BaseException`, so that an app that catches `Exception` lets it pass."""

    def __init__(self, examples: int) -> None:
        super().__init__(examples)
        self.examples = examples


class OrderSteps:
    """Steps of an order, for `fedsync.client.steps`; ``begin`` is None if the app is called only to count samples."""

    def __init__(self, order: WorkOrder, begin: BeginPace | None) -> None:
        self.max_steps, self.batch_size = order.max_steps, order.batch_size
        self.sized = False
        self.pace: Pace | None = None
        self.loop: Generator[Any, None, None] | None = None  # a training code may keep its iterator
        self._begin = begin

    def counted(self, loader: object, batches: Iterator[T]) -> Iterator[T]:
        """Yield the order's batches; `Counted` if the app only counts samples, `ConfigError` for a second loop."""
        if self._begin is None:
            # A sampler may draw from a part of the data set only.
            parts = loader, getattr(loader, "batch_sampler", None)
            held = (length_hint(getattr(each, name, None)) for each in parts for name in ("dataset", "sampler"))
            if counts := list(filter(None, held)):
                raise Counted(min(counts))
            yield next(batches)
            return
        if self.pace is not None:
            problem = "there is a second loop over steps of one order"
            remedy = "Train in one loop: it has all steps of the order. Where epochs are a setting, write 1"
            raise ConfigError("fedsync.client.steps", problem, remedy)
        self.pace = self._begin()
        steps: Steps = self.pace
        self.loop = counted(batches, steps, self.max_steps, None if self.sized else self.batch_size)
        yield from self.loop

    def untimed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.pace is None else self.pace.untimed()


class OrderConfig(ConfigRecord):
    """``config`` record of a message that notes which keys an app reads."""

    def __init__(self, values: Mapping[str, Scalar], order: OrderSteps) -> None:
        super().__init__(dict(values))
        self.order = order
        self.has_read: set[str] = set()

    def __getitem__(self, item: str) -> Any:
        self.has_read.add(item)
        return super().__getitem__(item)

    def items(self) -> Any:
        self.has_read |= self.keys()
        return super().items()


@dataclass(frozen=True, slots=True)
class FirstModel:
    """Source of an app's first model: ``make``, or names, types and shapes in ``tensors`` if silos cannot make it."""

    make: Callable[[], object] | None = None
    tensors: Sequence[tuple[str, str, tuple[int, ...]]] = field(default=())

    def arrays(self, seed: int, run: PartPatterns = UNSAID) -> NamedArrays:
        """Return the model, zeros if silos cannot make it; `ConfigError` without one, `RunError` if ``make`` failed."""
        if self.make is None:
            if not self.tensors:
                problem = "the strategy names no initial model"
                remedy = "Write model: package.module:Net, or give FedSync.start the initial_arrays"
                raise ConfigError("task.model", problem, remedy)
            described = NamedArrays({name: np.zeros(shape, dtype) for name, dtype, shape in self.tensors}, run)
            if described.parts.kept:
                problem = f"{min(described.parts.kept)} does not travel, and silos cannot make it"
                raise ConfigError("task.model", problem, "Write model: package.module:Net, which makes it at each silo")
            return described
        with own_code(torch.device("cpu"), derive_seed(seed, Stream.MODEL)):
            made = self.make()
        if isinstance(made, nn.Module):
            return NamedArrays.of_module(made, run)
        if isinstance(made, list | tuple):
            made = ArrayRecord([np.asarray(each) for each in made])
        if not isinstance(made, ArrayRecord):
            problem = f"it makes {type(made).__name__}"
            raise ConfigError("task.model", problem, "Name what makes a module, an ArrayRecord or a list of arrays")
        return NamedArrays({name: array.numpy() for name, array in made.items()}, run)


class ClientAppTrainer(LocalTrainer):
    """Trainer that calls a Flower ClientApp; ``partitions`` silos divide the data among them.

    ``folder`` is that of the app's ``pyproject.toml``. Raises `ConfigError` if there is no such device, no ClientApp,
    or no first model, and `RunError` if making the model failed.
    """

    _evaluates_in_place = False
    _steps_by_itself = False

    def __init__(
        self,
        app: object,
        first: FirstModel,
        silo: Silo,
        partitions: int,
        options: LocalOptions,
        folder: Path,
        run: PartPatterns = UNSAID,
    ) -> None:
        device = resolve(options.device)
        if not isinstance(app, ClientApp):
            raise ConfigError("task.app", f"it is a {type(app).__name__}, no ClientApp", "Name a ClientApp")
        if getattr(app, "_call", None) is not None:
            problem = "it is made of a client_fn, whose clients take no messages"
            raise ConfigError("task.app", problem, "Write functions under @app.train() and @app.evaluate()")
        self._app = app
        self._silo = silo
        self._sizes = BatchSizes(silo.name)
        self._knows_first = first.make is not None
        self._arrays = first.arrays(silo.seed, run)
        arrays = self._arrays
        super().__init__(silo.name, arrays, device, options, arrays.frozen_digest, arrays.parts.kept)
        self.private_names = arrays.parts.private
        self._known = statistics_of(options.measured.metrics(lambda: ()))
        self._initial = self._arrays.read()
        self._node_config = {"partition-id": silo.index, "num-partitions": partitions, **silo.node_config}
        self._run_config = {**declared(folder / "pyproject.toml"), **silo.run_config}
        self._round = 1
        self._recall(Cursor())
        self._examples: int | None = None

    @property
    def examples(self) -> int:
        """Training samples of the silo; the app is asked once. Raises `ConfigError` or `RunError` if that fails."""
        self._examples = self._examples or self._count()
        return self._examples

    def initial_model(self) -> Vector:
        if not self._knows_first:
            problem = "the server gave this run's first model, and silos cannot make it"
            raise ConfigError("task.model", problem, "Write model: package.module:Net")
        return self._initial

    def make_private(self, settings: PrivateSettings) -> int:
        problem = "the steps of a Flower ClientApp are its own, so FedSync cannot make them private"
        raise ConfigError("privacy", problem, "Write a SiloApp with work.private, or leave privacy out")

    def _recall(self, cursor: Cursor) -> None:
        state = read_state(cursor.private)
        kept = state.array_records.pop(_PRIVATE, ArrayRecord())
        self._arrays.restore({name: array.numpy() for name, array in kept.items()})
        run_id, node_id = flower_ids(self._silo.index)
        self._context = Context(
            run_id=run_id, node_id=node_id, node_config=self._node_config, state=state, run_config=self._run_config
        )

    def _begin(self, order: WorkOrder) -> None:
        self._round = order.base_version

    def _train(self, order: WorkOrder, cursor: Cursor, begin: BeginPace) -> LoopResult:
        self._round = order.base_version + 1
        steps = OrderSteps(order, begin)
        config = OrderConfig(self._asked(order), steps)
        message = self._message(MessageType.TRAIN, config)
        with own_code(self._device, order.seed):
            whole = begin()
            content = self._call(message)
        end_loop(steps.loop)
        pace = steps.pace or whole
        if steps.pace is None:
            pace.jump(order.max_steps)
            pace.finish()
            missized = self._sizes.check(
                pace,
                {"batch-size", "max-steps"} <= config.has_read,
                "the app does not read batch-size and max-steps of config, so what it does is not what is balanced: "
                "have it read both, or loop over fedsync.client.steps(msg, loader)",
            )
        elif not pace.steps:
            raise ConfigError("fedsync.client.steps", "the app took no batch of the order", "Loop over the steps")
        else:
            missized = self._sizes.check(
                pace,
                steps.sized or (pace.follows and "batch-size" in config.has_read),
                "the app's loader is no plain DataLoader, and its batches do not have the batch-size of config, so "
                'balancing does not reach them: give them the size that msg.content["config"]["batch-size"] says',
            )
        arrays = only(list(content.array_records.values()), "arrays")
        self._arrays.take({name: array.numpy() for name, array in arrays.items()}, REPLY)
        figures = figures_of(content)
        loss = next((figures[name] for name in LOSSES if name in figures), None)
        # An order that only evaluates changes no stored state.
        if private := self._arrays.private:
            self._context.state[_PRIVATE] = _record(private)
        kept = cursor.private if order.scores_only else write_state(self._context.state)
        return LoopResult(pace, loss, Cursor(private=kept), {**metrics_of(figures), **missized})

    def _evaluate(self, split: Split) -> Evaluation:
        config = ConfigRecord({**self._silo.evaluate_config, "server-round": self._round})
        message = self._message(MessageType.EVALUATE, config)
        with own_code(self._device, self._silo.seed):
            try:
                content = self._call(message)
            except ValueError as error:
                if str(error).startswith("No evaluate function registered"):
                    return Evaluation(0.0, 0.0, 0)
                raise
        return replace(evaluation_of(figures_of(content)), sums=sums_of(content, self._known))

    def _asked(self, order: WorkOrder) -> dict[str, Scalar]:
        """Settings of an order for the app; the run's own settings may replace ``lr``, the key that most apps read."""
        asked: dict[str, Scalar] = {"lr": order.learning_rate, **self._silo.told(order)}
        asked |= {
            "batch-size": order.batch_size,
            "max-steps": order.max_steps,
            "learning-rate": order.learning_rate,
            "server-round": order.base_version + 1,
        }
        return asked if order.budget_s is None else {**asked, "deadline-s": order.budget_s}

    def _message(self, kind: str, config: ConfigRecord) -> Message:
        metadata = Metadata(
            run_id=self._context.run_id,
            message_id="1",
            src_node_id=0,
            dst_node_id=self._context.node_id,
            reply_to_message_id="",
            group_id=str(self._round),
            created_at=time.time(),
            ttl=86_400.0,
            message_type=kind,
        )
        arrays = ArrayRecord({name: Array(array) for name, array in self._arrays.arrays.items()})
        return make_message(metadata, RecordDict({_ARRAYS: arrays, _CONFIG: config}))

    def _call(self, message: Message) -> RecordDict:
        reply = self._app(message, self._context)
        if not isinstance(reply, Message):
            raise ConfigError("task.app", f"it answers {type(reply).__name__}", "Return Message(content, reply_to=msg)")
        if reply.has_error():
            raise RunError(f"the app answers an error: {reply.error.reason}")
        return reply.content

    def _ask(self, order: WorkOrder) -> tuple[Any, list[tuple[int, int]]]:
        """Return the sample count of the app's reply, and (samples, batches) of each loader that the app used."""
        message = self._message(MessageType.TRAIN, OrderConfig(self._asked(order), OrderSteps(order, None)))
        with watched_loaders() as held, own_code(self._device, self._silo.seed):
            try:
                told: Any = figures_of(self._call(message)).get(EXAMPLES)
            except Counted as counted_samples:
                told = counted_samples.examples
        return told, held

    def _count(self) -> int:
        """Number of the site's samples: from the node configuration, or from the app's reply to a training request."""
        told = self._silo.node_config.get(EXAMPLES)
        if told is None:
            told, held = self._ask(_COUNTING)
            if held and told == held[0][1]:
                told = held[0][0]  # an app that reports len(loader) counts batches
            elif isinstance(told, int | float) and told <= _COUNTING.batch_size:
                # May be the number trained in one step: trust the loader, or ask again with a larger batch.
                told = max(told, *(samples for samples, _ in held)) if held else self._ask(_LARGER)[0]
        self._recall(Cursor())
        if not isinstance(told, int | float) or not float(told).is_integer() or told < 1:
            problem = f"the number of this silo's samples is {told}"
            remedy = f"Have the app's metrics say {EXAMPLES}, or the node's configuration"
            raise ConfigError(EXAMPLES, problem, remedy)
        return int(told)


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def packed_private(arrays: Arrays) -> bytes:
    """Serialise private arrays as a cursor of a `ClientAppTrainer` has them; raises as `write_state`."""
    return write_state(RecordDict({_PRIVATE: _record(arrays)}))


def write_state(state: RecordDict) -> bytes:
    """Serialise ``context.state``: a line of JSON, then the bytes of all arrays; `ConfigError` if it is too large."""
    about: dict[str, Any] = {}
    parts: list[bytes] = []
    for name, record in state.items():
        if isinstance(record, ArrayRecord):
            parts += [each.data for each in record.values()]
            arrays = {key: [each.dtype, list(each.shape), each.stype, len(each.data)] for key, each in record.items()}
            about[name] = {"arrays": arrays}
        else:
            kind = "metrics" if isinstance(record, MetricRecord) else "config"
            about[name] = {kind: {key: _kept(value) for key, value in record.items()}}
    whole = b"".join([json.dumps(about, separators=(",", ":")).encode() + b"\n", *parts]) if about else b""
    if len(whole) > MOST_BYTES:
        problem = f"it takes {len(whole)} bytes, at most {MOST_BYTES}"
        raise ConfigError("context.state", problem, "Keep less in it, or files of your own")
    return whole


def read_state(kept: bytes) -> RecordDict:
    text, _, values = kept.partition(b"\n")
    state, position = RecordDict(), 0
    for name, about in json.loads(text or b"{}").items():
        ((kind, entries),) = about.items()
        if kind == "arrays":
            arrays = ArrayRecord()
            for key, (dtype, shape, stype, length) in entries.items():
                arrays[key] = Array(dtype, tuple(shape), stype, values[position : position + length])
                position += length
            state[name] = arrays
        else:
            told = {key: _read(value) for key, value in entries.items()}
            state[name] = MetricRecord(told) if kind == "metrics" else ConfigRecord(told)
    return state


def _kept(value: Any) -> Any:
    if isinstance(value, list):
        return [_kept(each) for each in value]
    return {"bytes": b64encode(value).decode()} if isinstance(value, bytes) else value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(each) for each in value]
    return b64decode(value["bytes"]) if isinstance(value, dict) else value
