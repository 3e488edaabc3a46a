"""The messages between server and silos: the only module that builds or takes apart Flower messages.

A message is a text, and bytes beside it where arrays travel; on the way to a silo also the run's specification, by
which the silo finds its trainer. What texts say is in `fedsync.trainer.protocol`, how bytes travel in
`fedsync.flower.payloads`. Whatever a peer sends is bounded before anything is made of it.
"""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedsync.core.errors import SERVER, ProtocolError
from fedsync.core.transfer import MAX_SEALED_BYTES, Payload
from fedsync.flower.payloads import Packed, unpack
from fedsync.trainer.protocol import MAX_TEXT, EvaluateModel, Reply, Request, Train, read_reply, write_request

_RECORD, _SPEC, _TEXT, _PAYLOAD = "fedsync", "spec", "text", "payload"
_READ = 10_000


def request(node: int, spec: str, asked: Request, payload: Packed | None, ttl_s: float) -> Message:
    """Ask the trainer of a node's silo."""
    match asked:
        case Train():
            kind = MessageType.TRAIN
        case EvaluateModel():
            kind = MessageType.EVALUATE
        case _:
            kind = MessageType.QUERY
    content = _content({_SPEC: spec, _TEXT: write_request(asked)}, payload)
    return Message(content, message_type=kind, dst_node_id=node, ttl=ttl_s)


def answer(message: Message, text: str, payload: Packed | None = None) -> Message:
    """Send a trainer's reply."""
    return Message(_content({_TEXT: text}, payload), reply_to=message)


def _content(texts: dict[str, str], packed: Packed | None) -> RecordDict:
    """Texts and a payload; one a message, for a shared one would be changed under the feet of the others."""
    if isinstance(packed, bytes):
        return RecordDict({_RECORD: ConfigRecord({**texts, _PAYLOAD: packed})})
    records: dict[str, ConfigRecord | ArrayRecord] = {_RECORD: ConfigRecord({**texts})}
    if packed is not None:
        records[_PAYLOAD] = packed
    return RecordDict(records)  # type: ignore[arg-type]  # invariant, and it takes any record


def read_request(message: Message) -> tuple[str, str, Payload | None]:
    """The run's specification, the request as text, and the bytes beside it, uint8: nothing is decoded.

    Raises:
        ProtocolError: the server sent something else.
    """
    return _text(message, _SPEC, SERVER), _text(message, _TEXT, SERVER), _payload(message, MAX_SEALED_BYTES, SERVER)


def read_answer(reply: Message, sender: str, most_bytes: int, most: int = MAX_TEXT) -> tuple[Reply, Payload | None]:
    """A silo's reply, and the bytes beside it, uint8.

    Args:
        reply: what came.
        sender: the silo, for errors.
        most_bytes: bytes that may be beside it.
        most: characters that it may have.

    Raises:
        ProtocolError: the silo sent something else.
    """
    return read_reply(_text(reply, _TEXT, sender), sender, most), _payload(reply, most_bytes, sender)


def shortened(reason: str | None) -> str:
    """A peer's reason, without the middle of a long stack trace, and without what a terminal would obey."""
    text = reason or ""
    if len(text) > 2 * _READ:
        text = f"{text[:_READ]} ... {text[-_READ:]}"
    text = " ".join(text.split())
    text = text if len(text) <= 600 else f"{text[:200]} ... {text[-400:]}"
    return "".join(letter if letter.isprintable() else "?" for letter in text)


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
