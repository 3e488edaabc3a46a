"""The silo's side of Flower: answers queries, trains, evaluates.

The process keeps trainers between messages, so that where Flower keeps the process (its simulation
engine, the resident executor) model and data stay hot; where Flower starts a process a message, the
cursor in the context is all that has to survive.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from fedsync.config.cluster import SiloConfig
from fedsync.core.errors import ConfigError
from fedsync.core.orders import SiloFacts
from fedsync.runtime import messages
from fedsync.runtime.spec import RunSpec
from fedsync.tasks.protocol import SiloSlot
from fedsync.train.loop import Trainer
from fedsync.train.sampler import Cursor
from fedsync.train.throttle import Throttle

app = ClientApp()

_MOST_TRAINERS = 16
_CURSOR = "fedsync.cursor"


@dataclass(frozen=True, slots=True)
class Silo:
    """One silo in this process: who it is and what trains for it."""

    name: str
    machine: SiloConfig | None
    trainer: Trainer
    throttle: Throttle | None


_silos: OrderedDict[tuple[str, int], Silo] = OrderedDict()


@app.query()
def _query(message: Message, context: Context) -> Message:
    silo = _silo(message, context)
    facts = SiloFacts(
        examples=silo.trainer.examples,
        memory_samples=silo.machine.memory_samples if silo.machine else None,
        declared_speed=silo.machine.speed if silo.machine else _declared_speed(context),
        device=silo.trainer.device,
    )
    return messages.answer_hello(message, messages.Hello(silo.name, facts))


@app.train()
def _train(message: Message, context: Context) -> Message:
    silo = _silo(message, context)
    trainer = silo.trainer
    base = messages.read_model(message, trainer.layout)
    outcome = trainer.run(messages.read_order(message), base, _load_cursor(context), silo.throttle)
    context.state[_CURSOR] = ConfigRecord({"epoch": outcome.cursor.epoch, "position": outcome.cursor.position})
    return messages.answer_update(message, outcome.report, messages.to_arrays(outcome.update, trainer.layout))


@app.evaluate()
def _evaluate(message: Message, context: Context) -> Message:
    trainer = _silo(message, context).trainer
    model = messages.read_model(message, trainer.layout)
    return messages.answer_evaluation(message, trainer.evaluate(model))


def _silo(message: Message, context: Context) -> Silo:
    """The silo that this node is, made on first use."""
    text = messages.spec_text(message)
    index = int(context.node_config.get("partition-id", 0))
    key = (text, index)
    if key not in _silos:
        _silos[key] = _build(RunSpec.parse(text), index, context)
        if len(_silos) > _MOST_TRAINERS:
            _silos.popitem(last=False)
    _silos.move_to_end(key)
    return _silos[key]


def _build(spec: RunSpec, index: int, context: Context) -> Silo:
    if not 0 <= index < spec.silos:
        raise ConfigError(
            "node configuration, partition-id",
            f"{index}, but the run has {spec.silos} shares of data",
            "Give every silo its own number from 0 on",
        )
    machine = spec.emulate[index] if spec.emulate else None
    name = machine.name if machine else str(context.node_config.get("silo-name", f"silo-{index}"))
    options = spec.local.build()
    throttle = None
    if machine is not None:
        # Emulated silos share one machine: a thread each.
        options = replace(options, threads=options.threads or 1)
        throttle = Throttle(machine.build_curve(), spec.fastest / machine.speed)
    trainer = Trainer(spec.task.build(), SiloSlot(name, index, spec.silos, spec.seed), options)
    return Silo(name, machine, trainer, throttle)


def _declared_speed(context: Context) -> float | None:
    declared = context.node_config.get("declared-speed")
    return None if declared is None else float(declared)


def _load_cursor(context: Context) -> Cursor:
    record = context.state.config_records.get(_CURSOR)
    if record is None:
        return Cursor()
    epoch, position = record["epoch"], record["position"]
    assert isinstance(epoch, int) and isinstance(position, int)
    return Cursor(epoch, position)
