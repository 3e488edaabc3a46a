"""The Flower messages between server and silos: the only module that builds or takes them apart.

A message is a text, and bytes beside it where arrays travel; on the way to a silo also the run's specification, by
which the silo finds its trainer. What texts say is in `fedsync.silo.protocol`, how bytes travel in
`fedsync.flower.payloads`. Whatever a peer sends is bounded before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.common.foreign import shown
from fedsync.flower.payloads import pack, unpack
from fedsync.model.transfer import MAX_SEALED_BYTES, Payload
from fedsync.transport.questions import Blob, SiloQuestion

_RECORD, _SPEC, _TEXT, _PAYLOAD, _RELAY, _JOIN = "fedsync", "spec", "text", "payload", "relay", "join"
_READ = 10_000

MOST_TOGETHER = 16
"""Messages that go to the SuperLink in one request, where their payloads are small."""


def request(node: int, question: SiloQuestion) -> Message:
    """A question for the silo of a node; its payload is bytes.

    Raises:
        TypeError: the payload is a blob, which no message carries.
    """
    payload = question.payload
    if isinstance(payload, Blob):
        raise TypeError("a message carries no blob")
    content = _content({_SPEC: question.spec, _TEXT: question.text}, payload)
    return Message(content, message_type=question.kind, dst_node_id=node, ttl=question.ttl_s)


def join(node: int, text: str, ttl_s: float) -> Message:
    """The one message that lets a silo into a run's sessions at the hub; see `fedsync.transport.join`."""
    return Message(
        RecordDict({_RECORD: ConfigRecord({_JOIN: text})}), message_type="query", dst_node_id=node, ttl=ttl_s
    )


def read_join(message: Message) -> str | None:
    """The join in a message; None where it is a question."""
    record = message.content.config_records.get(_RECORD)
    text = None if record is None else record.get(_JOIN)
    return text if isinstance(text, str) else None


def answer(message: Message, text: str, payload: Payload | None = None, *, relay: bool = False) -> Message:
    """Send a trainer's reply, or a relay's."""
    texts = {_TEXT: text, **({_RELAY: "yes"} if relay else {})}
    return Message(_content(texts, payload), reply_to=message)


def is_relay(reply: Message) -> bool:
    """Whether the node that answers is a relay."""
    record = reply.content.config_records.get(_RECORD)
    return record is not None and record.get(_RELAY) == "yes"


def _content(texts: dict[str, str], payload: Payload | None) -> RecordDict:
    """Texts and a payload; one a message, for a shared one would be changed under the feet of the others."""
    packed = None if payload is None else pack(payload)
    if isinstance(packed, bytes):
        return RecordDict({_RECORD: ConfigRecord({**texts, _PAYLOAD: packed})})
    records: dict[str, ConfigRecord | ArrayRecord] = {_RECORD: ConfigRecord({**texts})}
    if packed is not None:
        records[_PAYLOAD] = packed
    return RecordDict(records)  # type: ignore[arg-type]  # invariant, and it takes any record


def together(sent: Sequence[Message]) -> int:
    """How many of the first of these go in one request: such as have no large payload, or one that has."""
    small = takewhile(lambda each: not each.content.array_records, sent[:MOST_TOGETHER])
    return max(1, sum(1 for _ in small))


def read_request(message: Message) -> tuple[str, str, Payload | None]:
    """The run's specification, the request as text, and the bytes beside it, uint8. Nothing is decoded.

    Raises:
        ProtocolError: the server sent something else.
    """
    payload = _payload(message, MAX_SEALED_BYTES, SERVER)
    return _text(message, _SPEC, SERVER), _text(message, _TEXT, SERVER), payload


def read_answer(reply: Message, sender: str, most: int) -> tuple[str, Payload | None]:
    """A silo's reply as text, and the bytes beside it, uint8.

    Args:
        reply: what came.
        sender: the silo, for errors.
        most: bytes that may be beside it.

    Raises:
        ProtocolError: the silo sent something else.
    """
    return _text(reply, _TEXT, sender), _payload(reply, most, sender)


def shortened(reason: str | None) -> str:
    """A peer's reason, without the middle of a long stack trace, and without what a terminal would obey."""
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
