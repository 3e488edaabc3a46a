"""The messages between server and silos: the only module that builds or takes apart Flower messages.

Four kinds go out, each with the run's specification: QUERY asks who a silo is, TRAIN brings an order
and the model, COLLECT asks for an order in work, EVALUATE brings a model alone. A silo answers with
JSON in a ConfigRecord and, where an order is done, its update. Everything a silo sends is checked
before anything is made of it.

How models and updates travel is in `fedsync.flower.payloads`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Annotated, Any, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from pydantic import Field, TypeAdapter, ValidationError

from fedsync.core.checks import MAX_COUNT
from fedsync.core.errors import ProtocolError
from fedsync.core.layout import Layout
from fedsync.core.orders import Evaluation, SiloFacts, WorkOrder, WorkReport
from fedsync.core.transfer import Payload
from fedsync.flower.payloads import Packed, unpack, unpack_sealed

MAX_JSON_BYTES = 65536
"""Largest JSON text accepted from a peer; a report with 64 windows takes a tenth of it."""

MAX_WHOLE = 2**64
"""Whole numbers of a peer are closer to zero than this; what they may be is checked where they are used."""

MAX_SEALED_BYTES = 2**32
"""Largest sealed payload that a silo accepts: 500 million parameters at 16 bits."""

MAX_TENSORS = 100_000
"""Most tensors of a model that a silo may send."""

MAX_GREETING_BYTES = 2**20
"""Largest greeting that the server accepts: one sealed chunk and its header."""

COLLECT = "collect"
"""Name of the query that asks for an order in work."""

MODEL_QUERY = "model"
"""Name of the query that asks for the model before any training."""

QUESTION = "question"
"""Name of the query that brings a question of the server's store."""

SNAPSHOT = "snapshot"
"""Name of the query that asks a silo for its model, sealed for other silos."""

_MODEL, _UPDATE, _TEXT = "model", "update", "fedsync"
_READ = 10_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hello:
    """A silo's first answer: its name, what it says of itself, and the version of the model that it keeps."""

    silo: str
    facts: SiloFacts
    holds: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """An order is in work: local steps and samples done so far."""

    steps: int
    samples: int


@dataclass(frozen=True, slots=True)
class Collect:
    """Ask for an order; ``halt`` ends it after its current step; answer after ``wait_s`` at the latest."""

    update_id: str
    wait_s: float
    halt: bool


_HELLO: TypeAdapter[Hello] = TypeAdapter(Hello)
_ORDER: TypeAdapter[WorkOrder] = TypeAdapter(WorkOrder)
_REPORT: TypeAdapter[WorkReport] = TypeAdapter(WorkReport)
_PROGRESS: TypeAdapter[Progress] = TypeAdapter(Progress)
_COLLECT: TypeAdapter[Collect] = TypeAdapter(Collect)
_EVALUATION: TypeAdapter[Evaluation] = TypeAdapter(Evaluation)
_SECONDS: TypeAdapter[float] = TypeAdapter(Annotated[float, Field(gt=0, allow_inf_nan=False)])


# Server to silo.


def query(node: int, spec: str, ttl_s: float) -> Message:
    """Ask a node who it is."""
    return _message(MessageType.QUERY, node, {"spec": spec}, None, ttl_s)


def query_model(node: int, spec: str, ttl_s: float) -> Message:
    """Ask a node for the model before any training."""
    return _message(f"{MessageType.QUERY}.{MODEL_QUERY}", node, {"spec": spec}, None, ttl_s)


def train(
    node: int, spec: str, order: WorkOrder, model: Packed, ttl_s: float, report_s: float | None = None
) -> Message:
    """Send an order and the model it starts from; with ``report_s``, hear of it after that many seconds."""
    texts = {"spec": spec, "order": _ORDER.dump_json(order).decode()}
    if report_s is not None:
        texts["report_s"] = repr(report_s)
    return _message(MessageType.TRAIN, node, texts, model, ttl_s)


def collect(node: int, spec: str, request: Collect, ttl_s: float) -> Message:
    """Ask for an order in work."""
    texts = {"spec": spec, "collect": _COLLECT.dump_json(request).decode()}
    return _message(f"{MessageType.QUERY}.{COLLECT}", node, texts, None, ttl_s)


def evaluate(node: int, spec: str, version: int, model: Packed, ttl_s: float) -> Message:
    """Ask for an evaluation of the model ``version``."""
    return _message(MessageType.EVALUATE, node, {"spec": spec, "version": str(version)}, model, ttl_s)


def ask(node: int, spec: str, question: Packed, ttl_s: float) -> Message:
    """Ask a silo what the server needs to know of all of them; see `Aggregator.questions`."""
    return _message(f"{MessageType.QUERY}.{QUESTION}", node, {"spec": spec}, question, ttl_s)


def query_snapshot(node: int, spec: str, ttl_s: float) -> Message:
    """Ask a silo for the model that it keeps, sealed for other silos."""
    return _message(f"{MessageType.QUERY}.{SNAPSHOT}", node, {"spec": spec}, None, ttl_s)


def _message(kind: str, node: int, texts: dict[str, str], model: Packed | None, ttl_s: float) -> Message:
    return Message(_content(texts, _MODEL, model), message_type=kind, dst_node_id=node, ttl=ttl_s)


def _content(texts: dict[str, str], key: str, packed: Packed | None) -> RecordDict:
    """Texts and a payload; one a message, for a shared one would be changed under the feet of the others."""
    if isinstance(packed, bytes):
        return RecordDict({_TEXT: ConfigRecord({**texts, key: packed})})
    records: dict[str, Any] = {_TEXT: ConfigRecord({**texts})}
    if packed is not None:
        records[key] = packed
    return RecordDict(records)


# At the silo.


def spec_text(message: Message) -> str:
    """The run's specification as JSON."""
    return _text(message, "spec", "server")


def read_order(message: Message) -> WorkOrder:
    """The order of a TRAIN message."""
    return _parse(_ORDER, _text(message, "order", "server"), "server")


def read_report_s(message: Message) -> float | None:
    """Seconds after which the server wants to hear of an order; None for its end."""
    if "report_s" not in message.content.config_records[_TEXT]:
        return None
    return _parse(_SECONDS, _text(message, "report_s", "server"), "server")


def read_collect(message: Message) -> Collect:
    """What a COLLECT message asks for."""
    return _parse(_COLLECT, _text(message, "collect", "server"), "server")


def read_received(message: Message, layout: Layout | None) -> Payload:
    """What a TRAIN or EVALUATE message brings: a model with this layout, or sealed bytes where there is none."""
    packed = _payload(message, _MODEL, "server")
    return unpack_sealed(packed, MAX_SEALED_BYTES, "server") if layout is None else unpack(packed, layout, "server")


def read_version(message: Message) -> int:
    """Version of the model that an EVALUATE message brings."""
    text = _text(message, "version", "server")
    if not text.isdecimal() or len(text) > 18:
        raise ProtocolError("server", "message", f"version {text[:20]!r}")
    return int(text)


def answer_hello(message: Message, hello: Hello, greeting: Packed | None = None) -> Message:
    """Say who this silo is; a greeting is what the server needs before the silo's first order."""
    return _reply(message, "hello", _HELLO.dump_json(hello), greeting)


def answer_model(message: Message, model: ArrayRecord) -> Message:
    """Send the model before any training."""
    return Message(RecordDict({_MODEL: model}), reply_to=message)


def answer_update(message: Message, report: WorkReport, update: Packed) -> Message:
    """Send an update and the report."""
    return _reply(message, "report", _REPORT.dump_json(report), update)


def answer_progress(message: Message, progress: Progress) -> Message:
    """Say how far the order is."""
    return _reply(message, "progress", _PROGRESS.dump_json(progress), None)


def answer_lacking(message: Message, holds: int) -> Message:
    """Say which version of the model is kept here, for what came continues another."""
    return _reply(message, "holds", str(holds).encode(), None)


def answer_snapshot(message: Message, version: int, snapshot: Packed) -> Message:
    """Send the model that is kept here, sealed, and say which version it is."""
    return _reply(message, "holds", str(version).encode(), snapshot)


def answer_question(message: Message, answer: Packed) -> Message:
    """Answer what the server's store asked."""
    return Message(_content({}, _UPDATE, answer), reply_to=message)


def answer_evaluation(message: Message, evaluation: Evaluation) -> Message:
    """Send an evaluation."""
    return _reply(message, "evaluation", _EVALUATION.dump_json(evaluation), None)


def _reply(message: Message, key: str, text: bytes, update: Packed | None) -> Message:
    return Message(_content({key: text.decode()}, _UPDATE, update), reply_to=message)


# At the server.


def read_initial_model(reply: Message, sender: str) -> ArrayRecord:
    """Answer to the query for the model; its layout is the sender's say, its size is bounded."""
    record = reply.content.array_records.get(_MODEL)
    if record is None:
        raise ProtocolError(sender, "message", "it brings no model")
    nbytes = sum(len(array.data) for array in record.values())
    if nbytes > MAX_SEALED_BYTES or len(record) > MAX_TENSORS:
        raise ProtocolError(sender, "length", f"a model of {len(record)} tensors and {nbytes} bytes")
    return record


def read_hello(reply: Message, sender: str) -> Hello:
    """Name and facts of a silo."""
    return _parse(_HELLO, _text(reply, "hello", sender), sender)


def read_greeting(reply: Message, sender: str) -> Payload | None:
    """What came with a silo's name, uint8, or None."""
    packed = _found(reply, _UPDATE)
    return None if packed is None else unpack_sealed(packed, MAX_GREETING_BYTES, sender)


def read_progress(reply: Message, sender: str) -> Progress | None:
    """How far an order is, if that is what the silo answered."""
    record = reply.content.config_records.get(_TEXT)
    if record is None or "progress" not in record:
        return None
    progress = _parse(_PROGRESS, _text(reply, "progress", sender), sender)
    if not (0 <= progress.steps <= MAX_COUNT and 0 <= progress.samples <= MAX_COUNT):
        raise ProtocolError(sender, "progress", f"{progress.steps} steps, {progress.samples} samples")
    return progress


def read_holds(reply: Message, sender: str) -> int | None:
    """Version of the model that the silo keeps, -1 for none, if that is what it answered."""
    record = reply.content.config_records.get(_TEXT)
    if record is None or "holds" not in record:
        return None
    text = _text(reply, "holds", sender)
    if text == "-1":
        return -1
    if not text.isdecimal() or len(text) > 18:
        raise ProtocolError(sender, "message", f"holds {text[:20]!r}")
    return int(text)


def read_report(reply: Message, sender: str) -> WorkReport:
    """Report that comes with an update; its figures are not checked here."""
    return _parse(_REPORT, _text(reply, "report", sender), sender)


def read_update(reply: Message, layout: Layout | None, most: int, sender: str) -> Payload:
    """Update, float32 [layout.size], its values unchecked; without a layout at most ``most`` sealed bytes."""
    packed = _payload(reply, _UPDATE, sender)
    return unpack_sealed(packed, most, sender) if layout is None else unpack(packed, layout, sender)


def read_evaluation(reply: Message, sender: str) -> Evaluation:
    """Answer to EVALUATE."""
    return _parse(_EVALUATION, _text(reply, "evaluation", sender), sender)


def shortened(reason: str | None) -> str:
    """A peer's reason, without the middle of a long stack trace, and without what a terminal would obey."""
    text = reason or ""
    if len(text) > 2 * _READ:
        text = f"{text[:_READ]} ... {text[-_READ:]}"
    text = " ".join(text.split())
    text = text if len(text) <= 600 else f"{text[:200]} ... {text[-400:]}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _text(message: Message, key: str, sender: str) -> str:
    record = message.content.config_records.get(_TEXT)
    text = record.get(key) if record is not None else None
    if not isinstance(text, str):
        raise ProtocolError(sender, "message", f"it brings no {key!r}")
    if len(text) > MAX_JSON_BYTES:
        raise ProtocolError(sender, "message", f"{key!r} has {len(text)} characters, at most {MAX_JSON_BYTES}")
    return text


def _payload(message: Message, key: str, sender: str) -> Packed:
    packed = _found(message, key)
    if packed is None:
        raise ProtocolError(sender, "message", f"it brings no {key!r}")
    return packed


def _found(message: Message, key: str) -> Packed | None:
    beside = message.content.config_records.get(_TEXT)
    data = beside.get(key) if beside is not None else None
    return data if isinstance(data, bytes) else message.content.array_records.get(key)


def _parse(adapter: TypeAdapter[T], text: str, sender: str) -> T:
    try:
        value = adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        found = shortened(f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        raise ProtocolError(sender, "message", found) from error
    if not _plain(value):
        raise ProtocolError(sender, "message", "a number that is none or far too large, or a text that does not print")
    return value


def _plain(value: object) -> bool:
    """Whether all numbers in a value are finite and fit eight bytes, and all texts print and so can be written."""
    match value:
        case None | bool():
            return True
        case str():
            return value.isprintable()
        case int():
            return -MAX_WHOLE < value < MAX_WHOLE
        case float():
            return math.isfinite(value)
        case Mapping():
            return all(_plain(key) and _plain(each) for key, each in value.items())
        case tuple():
            return all(map(_plain, value))
        case _:
            return is_dataclass(value) and all(_plain(getattr(value, each.name)) for each in fields(value))
