"""The silo's side of Flower: a thin client of the silo's resident trainer.

Flower may start a process for every message, and serves one message at a time. So nothing heavy is
imported here, and an order that the server wants to hear of before it ends (``report_s``) is handed
over: TRAIN and every later COLLECT answer after that time at the latest, with the update or with how
far the silo is, and the next COLLECT may bring the word to stop.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedsync.core.errors import ConfigError
from fedsync.flower import messages, payloads
from fedsync.trainer.client import TrainerClient
from fedsync.trainer.protocol import RESOURCES, Answer, Completed, Identity, InProgress, TrainerLink, VersionMismatch

app = ClientApp()

_YES, _NO = ("on", "true", "yes", "1"), ("off", "false", "no", "0")

_MOST_LINKS = 64
_links: OrderedDict[tuple[str, int], TrainerLink] = OrderedDict()


def connect(identity: Identity) -> TrainerLink:
    """The way to the trainer of a silo; tests put a trainer of this process in its place."""
    return TrainerClient(identity)


@app.query()
def _query(message: Message, context: Context) -> Message:
    link = _link(message, context)
    greeting = link.greeting() if link.sealed else None
    packed = None if greeting is None else payloads.pack(greeting)
    return messages.answer_hello(message, messages.Hello(link.name, link.facts, link.holds), packed)


@app.query(messages.MODEL_QUERY)
def _model(message: Message, context: Context) -> Message:
    link = _link(message, context)
    return messages.answer_model(message, payloads.to_arrays(link.initial_model(), link.layout))


@app.train()
def _train(message: Message, context: Context) -> Message:
    link = _link(message, context)
    received = messages.read_received(message, None if link.sealed else link.layout)
    return _answer(message, link.train(messages.read_order(message), received, messages.read_report_s(message)))


@app.query(messages.COLLECT)
def _collect(message: Message, context: Context) -> Message:
    link, request = _link(message, context), messages.read_collect(message)
    return _answer(message, link.collect(request.update_id, request.wait_s, halt=request.halt))


@app.evaluate()
def _evaluate(message: Message, context: Context) -> Message:
    link = _link(message, context)
    received = messages.read_received(message, None if link.sealed else link.layout)
    found = link.evaluate(received, messages.read_version(message))
    if isinstance(found, VersionMismatch):
        return messages.answer_lacking(message, found.holds)
    return messages.answer_evaluation(message, found)


@app.query(messages.QUESTION)
def _question(message: Message, context: Context) -> Message:
    answer = _link(message, context).answer(messages.read_received(message, None))
    return messages.answer_question(message, payloads.pack(answer))


@app.query(messages.SNAPSHOT)
def _snapshot(message: Message, context: Context) -> Message:
    version, snapshot = _link(message, context).snapshot()
    return messages.answer_snapshot(message, version, payloads.pack(snapshot))


def _answer(message: Message, answer: Answer) -> Message:
    match answer:
        case Completed(report, update):
            return messages.answer_update(message, report, payloads.pack(update))
        case VersionMismatch(holds):
            return messages.answer_lacking(message, holds)
        case InProgress(steps, samples):
            return messages.answer_progress(message, messages.Progress(steps, samples))


def _link(message: Message, context: Context) -> TrainerLink:
    """The trainer of the silo that this node is; Flower's number of the run is another one after a restart."""
    spec, node = messages.spec_text(message), context.node_config
    key = (spec, int(node.get("partition-id", 0)))
    if key not in _links:
        _links[key] = connect(identify(spec, node, os.environ))
        if len(_links) > _MOST_LINKS:
            _links.popitem(last=False)
    _links.move_to_end(key)
    return _links[key]


def identify(spec: str, node: Mapping[str, bool | int | float | str], environment: Mapping[str, str]) -> Identity:
    """Which silo a node is, and what its owner has decided.

    The owner decides by the node's configuration, ``partition-id=0 silo-name="clinic-a" device="cuda:1"
    resources="off" declared-speed=200.0``, and by the environment variable ``FEDSYNC_RESOURCES=off``. To
    tell of the machine takes the consent of all.

    Args:
        spec: the run's specification as JSON.
        node: configuration of the node.
        environment: variables of this process.

    Raises:
        ConfigError: a value means nothing.
    """
    index, declared, device = int(node.get("partition-id", 0)), node.get("declared-speed"), node.get("device")
    return Identity(
        spec=spec,
        index=index,
        name=str(node.get("silo-name", f"silo-{index}")),
        declared_speed=None if declared is None else float(declared),
        device=None if device is None else str(device),
        resources=_consents("node configuration, resources", node.get("resources", True))
        and _consents(RESOURCES, environment.get(RESOURCES) or "on"),
    )


def _consents(place: str, value: bool | float | str) -> bool:
    word = str(value).strip().lower()
    if word not in (*_YES, *_NO):
        raise ConfigError(place, f"{value!r} is neither on nor off", "Write on or off")
    return word in _YES
