"""Flower messages between server and silos; only this module builds and parses them.

A message is a text, with bytes beside it if arrays are sent. A message to a silo also has the run's specification, by
which the silo finds its trainer. All data of a peer is checked against size limits before it is parsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.common.foreign import shown
from fedsync.flower.payloads import SMALL_BYTES, pack, unpack
from fedsync.model.transfer import MAX_SEALED_BYTES, Payload
from fedsync.transport.port import Blob, SiloQuestion

_RECORD, _SPEC, _TEXT, _PAYLOAD, _RELAY, _JOIN = "fedsync", "spec", "text", "payload", "relay", "join"
_READ = 10_000

MOST_TOGETHER = 16
"""Maximum number of messages with small payloads in one request to the SuperLink."""


def request(node: int, question: SiloQuestion) -> Message:
    """Return a question for the silo of a node; raises `TypeError` for a blob, which messages cannot carry."""
    payload = question.payload
    if isinstance(payload, Blob):
        raise TypeError("a message carries no blob")
    content = _content({_SPEC: question.spec, _TEXT: question.text}, payload)
    return Message(content, message_type=question.kind, dst_node_id=node, ttl=question.ttl_s)


def join(node: int, text: str, ttl_s: float) -> Message:
    """Return the message that admits a silo to a run's sessions at the hub; see `fedsync.transport.join`."""
    return Message(
        RecordDict({_RECORD: ConfigRecord({_JOIN: text})}), message_type="query", dst_node_id=node, ttl=ttl_s
    )


def read_join(message: Message) -> str | None:
    record = message.content.config_records.get(_RECORD)
    text = None if record is None else record.get(_JOIN)
    return text if isinstance(text, str) else None


def answer(message: Message, text: str, payload: Payload | None = None, *, relay: bool = False) -> Message:
    texts = {_TEXT: text, **({_RELAY: "yes"} if relay else {})}
    return Message(_content(texts, payload), reply_to=message)


def is_relay(reply: Message) -> bool:
    record = reply.content.config_records.get(_RECORD)
    return record is not None and record.get(_RELAY) == "yes"


def _content(texts: dict[str, str], payload: Payload | None) -> RecordDict:
    """Return a new record of texts and a payload; messages must not share records, as Flower modifies them."""
    packed = None if payload is None else pack(payload)
    if isinstance(packed, bytes):
        return RecordDict({_RECORD: ConfigRecord({**texts, _PAYLOAD: packed})})
    records: dict[str, ConfigRecord | ArrayRecord] = {_RECORD: ConfigRecord({**texts})}
    if packed is not None:
        records[_PAYLOAD] = packed
    return RecordDict(records)  # type: ignore[arg-type]  # invariant, and it takes any record


def together(asked: Sequence[SiloQuestion]) -> int:
    """Return how many leading questions fit into one request: several with small payloads, or one with a large."""
    small = takewhile(lambda each: each.payload is None or each.payload.nbytes <= SMALL_BYTES, asked[:MOST_TOGETHER])
    return max(1, sum(1 for _ in small))


def read_request(message: Message) -> tuple[str, str, Payload | None]:
    """Return specification, request and payload (uint8), undecoded; `ProtocolError` if the message is no request."""
    payload = _payload(message, MAX_SEALED_BYTES, SERVER)
    return _text(message, _SPEC, SERVER), _text(message, _TEXT, SERVER), payload


def read_answer(reply: Message, sender: str, most: int) -> tuple[str, Payload | None]:
    """Return a silo's reply as text, and the payload, uint8. Raises `ProtocolError` if the message is not a reply."""
    return _text(reply, _TEXT, sender), _payload(reply, most, sender)


def shortened(reason: str | None) -> str:
    """Return a peer's reason without the middle of a long stack trace, and without terminal control characters."""
    text = reason or ""
    if len(text) > 2 * _READ:
        text = f"{text[:_READ]} ... {text[-_READ:]}"
    return shown(" ".join(text.split()), 560)


def _text(message: Message, key: str, sender: str) -> str:
    record = message.content.config_records.get(_RECORD)
    text = record.get(key) if record is not None else None
    if not isinstance(text, str):
        raise ProtocolError(sender, "message", f"it brings no {key!r}")
    return text


def _payload(message: Message, most: int, sender: str) -> Payload | None:
    record = message.content.config_records.get(_RECORD)
    beside = record.get(_PAYLOAD) if record is not None else None
    packed = beside if isinstance(beside, bytes) else message.content.array_records.get(_PAYLOAD)
    return None if packed is None else unpack(packed, most, sender)
