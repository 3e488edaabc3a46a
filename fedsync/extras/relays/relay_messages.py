"""Protocol between a server and a relay (the aggregator of a group of silos); see `docs/internals/relays.md`.

A `RegionRequest` carries numbered questions for silos and their binary parts, the concatenated *pieces*. The relay
holds requests, and answers the oldest with all results that are ready, as a `RegionReply`. The results may belong to
other requests. So one request is always open for a reply, and the server does not poll.

Texts from and for silos pass unchanged; see `fedsync.silo.protocol`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from fedsync.common import codec
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.layout import Layout
from fedsync.model.transfer import Payload
from fedsync.silo.owner.refusals import explained
from fedsync.silo.protocol import MAX_TEXT, Refused, read_reply

MAX_SILOS = 1000
"""Limit of silos in a region."""

_ALIGN = 8

MAX_REGION_TEXT = MAX_SILOS * MAX_TEXT


@dataclass(frozen=True, slots=True)
class RegionAsk:
    """Question for one silo.

    Args:
        number: id of the question in the server's session.
        node: number of the silo's node at the relay.
        text: a `fedsync.silo.protocol.Request`.
        piece: number of the piece with the question; -1 for none.
        most: limit of the payload beside the answer [bytes].
        ttl_s: time after which the answer is useless [s].
        update_id: id of the expected update, if it may be added to other updates; else empty.
        examples: training samples that the silo holds.
    """

    number: str
    node: int
    text: str
    piece: int = -1
    most: int = 0
    ttl_s: float = 60.0
    update_id: str = ""
    examples: int = 1


@dataclass(frozen=True, slots=True)
class RegionRequest:
    """Request to a relay.

    Args:
        session: id of the server's session; a new session makes the relay forget all earlier questions.
        pieces: size of each piece [bytes].
        hold_s: time limit of the relay's reply [s].
        layout: layout of the model, unless the relay knows it.
        most: limit of the payload beside the reply [bytes]. Requests with a higher limit are answered first.
    """

    session: str
    asks: tuple[RegionAsk, ...] = ()
    pieces: tuple[int, ...] = ()
    hold_s: float = 0.0
    layout: Layout | None = None
    most: int = 0


@dataclass(frozen=True, slots=True)
class RegionAnswer:
    """Answer of a silo to the question ``number``, or the ``problem`` that prevented it.

    ``text`` is a `fedsync.silo.protocol.Reply`. ``piece`` is -1 without payload, or if the update is in a sum.
    """

    number: str
    text: str = ""
    piece: int = -1
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RegionMembers:
    """Sum of several silos' updates, which is a piece; for ``update_ids`` see `RegionSum`."""

    numbers: tuple[str, ...]
    update_ids: tuple[str, ...]
    piece: int


@dataclass(frozen=True, slots=True)
class RelayedNode:
    """Node of a silo at its relay: number, registered name, and start of the connection."""

    node: int
    name: str = ""
    since: str = ""


@dataclass(frozen=True, slots=True)
class RegionReply:
    """Reply of a relay.

    Args:
        session: that of the request; empty in the reply to a question that is not a `RegionRequest`.
        pieces: size of each piece [bytes].
        here: nodes of all connected silos.
        knows: whether the relay knows the model's layout.
    """

    session: str = ""
    answers: tuple[RegionAnswer, ...] = ()
    sums: tuple[RegionMembers, ...] = ()
    pieces: tuple[int, ...] = ()
    here: tuple[RelayedNode, ...] = ()
    knows: bool = False


@dataclass(frozen=True, slots=True)
class RelayCall:
    """Payload from a relay's SuperNode to its app: the run's specification and the server's question."""

    spec: str
    text: str


def write(told: RegionRequest | RegionReply | RelayCall) -> str:
    return codec.dumps(told, type(told))


def read_region_request(text: str) -> RegionRequest | None:
    """Parse a request to a relay; None for a question to a silo, such as the first message to every node.

    Raises `ProtocolError` if the text is too long.
    """
    if len(text) > MAX_REGION_TEXT:
        raise ProtocolError(SERVER, "message", f"it has {len(text)} characters, at most {MAX_REGION_TEXT}")
    try:
        request: RegionRequest = codec.loads(RegionRequest, text)
    except codec.DecodeError:
        return None
    return request


def read_region_reply(text: str, relay: str) -> RegionReply:
    """Parse a relay's reply; raise `ProtocolError` if it is a refusal, invalid, too long, or has too many silos."""
    if len(text) > MAX_REGION_TEXT:
        raise ProtocolError(relay, "message", f"it has {len(text)} characters, at most {MAX_REGION_TEXT}")
    try:
        reply: RegionReply = codec.loads(RegionReply, text)
    except codec.DecodeError as error:
        check, detail = "message", str(error)
        with suppress(ProtocolError):
            if isinstance(refused := read_reply(text, relay), Refused):
                check, detail = "refusal", explained(relay, refused)
        raise ProtocolError(relay, check, detail) from error
    if len(reply.here) > MAX_SILOS:
        raise ProtocolError(relay, "region", f"it has {len(reply.here)} silos, at most {MAX_SILOS}")
    return reply


def joined(pieces: Sequence[Payload]) -> Payload | None:
    """Concatenate pieces, uint8, each but the last padded with zeros to 8 bytes; a single piece is not copied."""
    if len(pieces) < 2:
        return pieces[0].view(np.uint8) if pieces else None
    filled = []
    for piece in pieces:
        filled += [piece.view(np.uint8), np.zeros(-piece.nbytes % _ALIGN, np.uint8)]
    return np.concatenate(filled[:-1])


def parted(payload: Payload | None, lengths: Sequence[int], sender: str) -> list[Payload]:
    """Split a payload into views, the inverse of `joined`; raise `ProtocolError` if the lengths do not fit."""
    whole = np.empty(0, np.uint8) if payload is None else payload
    starts, end = [], 0
    for length in lengths:
        starts.append(end + -end % _ALIGN)
        end = starts[-1] + length
    if min(lengths, default=0) < 0 or end != len(whole):
        raise ProtocolError(sender, "length", f"{len(whole)} bytes, and its pieces have {end}")
    return [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def piece_of(pieces: Sequence[Payload], number: int, sender: str) -> Payload | None:
    """Return the piece of a number, None for -1; raise `ProtocolError` if there is no such piece."""
    if not -1 <= number < len(pieces):
        raise ProtocolError(sender, "message", f"it has {len(pieces)} pieces, and speaks of number {number}")
    return None if number == -1 else pieces[number]
