"""The messages between server and silos: the only module that builds or takes apart Flower messages.

A message is a text, and bytes beside it where arrays travel; on the way to a silo also the run's specification, by
which the silo finds its trainer. What texts say is in `fedsync.trainer.protocol`, how bytes travel in
`fedsync.flower.payloads`. In the place of large bytes a message may say where they were left, see
`fedsync.flower.parcels`; a node that can fetch them says so in each of its answers, beside the text.
Whatever a peer sends is bounded before anything is made of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import takewhile

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedsync.core.errors import SERVER, ProtocolError
from fedsync.core.foreign import shown
from fedsync.core.transfer import MAX_SEALED_BYTES, Payload
from fedsync.flower.parcels import Parcel, Ticket, Uploaded
from fedsync.flower.payloads import Packed, unpack
from fedsync.trainer.protocol import MAX_TEXT, EvaluateModel, Reply, Request, Train, read_reply, write_request

_RECORD, _SPEC, _TEXT, _PAYLOAD = "fedsync", "spec", "text", "payload"
_PARCEL, _TICKET, _UPLOADED, _FETCHES, _RELAY = "parcel", "ticket", "uploaded", "fetches", "relay"
_READ = 10_000

MOST_TOGETHER = 16
"""Messages that go to the SuperLink in one request, where their payloads are small."""

_NAMES = {
    _PARCEL: re.compile(r"([0-9a-f]{16})/([0-9a-f]{64})/([0-9]{1,15})"),
    _TICKET: re.compile(r"([0-9a-f]{16})/([0-9a-f]{32})"),
    _UPLOADED: re.compile(r"([0-9a-f]{32})/([0-9]{1,15})"),
}


def request(
    node: int, spec: str, asked: Request, payload: Packed | None, ttl_s: float, ticket: Ticket | None = None
) -> Message:
    """Ask the trainer of a node's silo; with a ticket, a large answer may be left at the gate."""
    match asked:
        case Train():
            kind = MessageType.TRAIN
        case EvaluateModel():
            kind = MessageType.EVALUATE
        case _:
            kind = MessageType.QUERY
    texts = {_SPEC: spec, _TEXT: write_request(asked)}
    if ticket is not None:
        texts[_TICKET] = f"{ticket.session}/{ticket.name}"
    return Message(_content(texts, payload), message_type=kind, dst_node_id=node, ttl=ttl_s)


def relay_request(
    node: int, spec: str, text: str, payload: Packed | None, ttl_s: float, ticket: Ticket | None = None
) -> Message:
    """Ask a relay; ``text`` is a `fedsync.trainer.regions.RegionRequest`."""
    texts = {_SPEC: spec, _TEXT: text, **({} if ticket is None else {_TICKET: f"{ticket.session}/{ticket.name}"})}
    return Message(_content(texts, payload), message_type=MessageType.QUERY, dst_node_id=node, ttl=ttl_s)


def relay_answer(message: Message, text: str, payload: Packed | None = None, *, fetches: bool = False) -> Message:
    """Send a relay's reply; other arguments as of `answer`."""
    texts = {_TEXT: text, _RELAY: "yes", **({_FETCHES: "yes"} if fetches else {})}
    return Message(_content(texts, payload), reply_to=message)


def is_relay(reply: Message) -> bool:
    """Whether the node that answers is a relay."""
    return _says(reply, _RELAY)


def answer(message: Message, text: str, payload: Packed | None = None, *, fetches: bool = False) -> Message:
    """Send a trainer's reply, from a node that can fetch parcels or cannot."""
    return Message(_content({_TEXT: text, **({_FETCHES: "yes"} if fetches else {})}, payload), reply_to=message)


def _content(texts: dict[str, str], packed: Packed | None) -> RecordDict:
    """Texts and a payload; one a message, for a shared one would be changed under the feet of the others."""
    match packed:
        case bytes():
            return RecordDict({_RECORD: ConfigRecord({**texts, _PAYLOAD: packed})})
        case Parcel(session, digest, nbytes):
            texts = {**texts, _PARCEL: f"{session}/{digest}/{nbytes}"}
        case Uploaded(content, nbytes):
            texts = {**texts, _UPLOADED: f"{content}/{nbytes}"}
    records: dict[str, ConfigRecord | ArrayRecord] = {_RECORD: ConfigRecord({**texts})}
    if isinstance(packed, ArrayRecord):
        records[_PAYLOAD] = packed
    return RecordDict(records)  # type: ignore[arg-type]  # invariant, and it takes any record


def together(sent: Sequence[Message]) -> int:
    """How many of the first of these go in one request: such as have no large payload, or one that has."""
    small = takewhile(lambda each: not each.content.array_records, sent[:MOST_TOGETHER])
    return max(1, sum(1 for _ in small))


def read_request(message: Message) -> tuple[str, str, Payload | Parcel | None]:
    """The run's specification, the request as text, and the bytes beside it, uint8, or where they are.

    Nothing is decoded.

    Raises:
        ProtocolError: the server sent something else.
    """
    named = _named(message, _PARCEL, SERVER)
    if named is None:
        payload: Payload | Parcel | None = _payload(message, MAX_SEALED_BYTES, SERVER)
    else:
        payload = Parcel(named[0], named[1], _bounded(named[2], MAX_SEALED_BYTES, SERVER))
    return _text(message, _SPEC, SERVER), _text(message, _TEXT, SERVER), payload


def queues(message: Message) -> bool:
    """Whether the run queues orders at silos, so that others may come before this message is answered.

    Raises:
        ProtocolError: the server sent something else.
    """
    try:
        spec = json.loads(_text(message, _SPEC, SERVER))
    except ValueError as error:
        raise ProtocolError(SERVER, "message", f"its specification is no JSON: {error}") from error
    return isinstance(spec, dict) and spec.get("queues") is True


def read_ticket(message: Message) -> Ticket | None:
    """Where a large answer may be left; None where it goes into the message.

    Raises:
        ProtocolError: the server sent something else.
    """
    named = _named(message, _TICKET, SERVER)
    return None if named is None else Ticket(*named)


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
    text, payload = read_answer_text(reply, sender, most_bytes)
    return read_reply(text, sender, most), payload


def read_answer_text(reply: Message, sender: str, most_bytes: int) -> tuple[str, Payload | None]:
    """A reply as text, and the bytes beside it, uint8; arguments and errors as of `read_answer`."""
    return _text(reply, _TEXT, sender), _payload(reply, most_bytes, sender)


def read_uploaded(reply: Message, sender: str) -> Uploaded | None:
    """What the silo has left at the gate in place of bytes; None where it left nothing.

    Raises:
        ProtocolError: the silo sent something else.
    """
    named = _named(reply, _UPLOADED, sender)
    return None if named is None else Uploaded(named[0], int(named[1]))


def fetches(reply: Message) -> bool:
    """Whether the node that answers can fetch parcels."""
    return _says(reply, _FETCHES)


def _says(reply: Message, key: str) -> bool:
    record = reply.content.config_records.get(_RECORD)
    return record is not None and record.get(key) == "yes"


def _named(message: Message, key: str, sender: str) -> tuple[str, ...] | None:
    record = message.content.config_records.get(_RECORD)
    if record is None or key not in record:
        return None
    text = record[key]
    found = _NAMES[key].fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ProtocolError(sender, "message", f"its {key} is {text!r:.100}")
    return found.groups()


def _bounded(number: str, most: int, sender: str) -> int:
    if int(number) > most:
        raise ProtocolError(sender, "length", f"{number} bytes, at most {most}")
    return int(number)


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
