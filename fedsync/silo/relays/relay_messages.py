"""What server and relay say to each other; see `docs/internals/relays.md`.

A message to a relay is a `RegionRequest`: what its silos are asked, each with a number, and bytes beside it, the
*pieces*, one behind the other. The relay holds it, and answers the oldest that it holds with all that it has by then, a
`RegionReply`, whichever request asked for it. So one request is always there to be answered, and nobody looks.

Texts for silos, and theirs, pass as they are: `fedsync.silo.protocol` has what they say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsync.common import codec
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.layout import Layout
from fedsync.model.transfer import Payload
from fedsync.silo.protocol import MAX_TEXT

MAX_SILOS = 1000
"""Silos of a region."""

_ALIGN = 8

MAX_REGION_TEXT = MAX_SILOS * MAX_TEXT


@dataclass(frozen=True, slots=True)
class RegionAsk:
    """A question for one silo.

    Args:
        number: names it in the server's session.
        node: of the silo, by the relay's count.
        text: a `fedsync.silo.protocol.Request`.
        piece: number of the piece that goes with it; -1 for none.
        most: bytes that may come beside the answer.
        ttl_s: after which nobody waits for the answer.
        update_id: of the update that comes of it, if that may be added to others'.
        examples: training samples that its silo holds.
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
    """What a relay is asked.

    Args:
        session: of the server; with another one all that was asked before is forgotten.
        asks: of its silos.
        pieces: bytes of each piece.
        hold_s: after which the relay answers at the latest.
        layout: of the model, until the relay has said that it knows it.
        most: bytes that may be beside the answer. A request that allows more is answered before one that allows less.
    """

    session: str
    asks: tuple[RegionAsk, ...] = ()
    pieces: tuple[int, ...] = ()
    hold_s: float = 0.0
    layout: Layout | None = None
    most: int = 0


@dataclass(frozen=True, slots=True)
class RegionAnswer:
    """A silo's answer.

    Args:
        number: of the question.
        text: a `fedsync.silo.protocol.Reply`.
        piece: number of the piece that came with it; -1 for none, or if it is in a sum.
        problem: why there is no answer.
    """

    number: str
    text: str = ""
    piece: int = -1
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RegionMembers:
    """The updates of these answers are in one sum, which is a piece.

    Args:
        numbers: of the questions.
        update_ids: likewise; see `fedsync.model.region_sums.RegionSum`.
        piece: number of the piece.
    """

    numbers: tuple[str, ...]
    update_ids: tuple[str, ...]
    piece: int


@dataclass(frozen=True, slots=True)
class RelayedNode:
    """A silo's node at its relay: its number, the name that it is registered under, and since when it is there."""

    node: int
    name: str = ""
    since: str = ""


@dataclass(frozen=True, slots=True)
class RegionReply:
    """What a relay answers.

    Args:
        session: of the server that asked; empty where it asked something else, who this is.
        answers: of silos.
        sums: of their updates.
        pieces: bytes of each piece.
        here: all silos' nodes that are there.
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
    """What a relay's SuperNode hands to its app: the run's specification, and the server's question."""

    spec: str
    text: str


def write(told: RegionRequest | RegionReply | RelayCall) -> str:
    return codec.dumps(told, type(told))


def read_region_request(text: str) -> RegionRequest | None:
    """What the server asks a relay; None where it is a question for a silo, as the first to every node.

    Raises:
        ProtocolError: it is too long.
    """
    if len(text) > MAX_REGION_TEXT:
        raise ProtocolError(SERVER, "message", f"it has {len(text)} characters, at most {MAX_REGION_TEXT}")
    try:
        request: RegionRequest = codec.loads(RegionRequest, text)
    except codec.DecodeError:
        return None
    return request


def read_region_reply(text: str, relay: str) -> RegionReply:
    """What a relay answers.

    Raises:
        ProtocolError: it is something else, or has too many parts.
    """
    if len(text) > MAX_REGION_TEXT:
        raise ProtocolError(relay, "message", f"it has {len(text)} characters, at most {MAX_REGION_TEXT}")
    try:
        reply: RegionReply = codec.loads(RegionReply, text)
    except codec.DecodeError as error:
        raise ProtocolError(relay, "message", str(error)) from error
    if len(reply.here) > MAX_SILOS:
        raise ProtocolError(relay, "region", f"it has {len(reply.here)} silos, at most {MAX_SILOS}")
    return reply


def joined(pieces: Sequence[Payload]) -> Payload | None:
    """Pieces one behind the other, uint8, each but the last with zeros to 8; one alone is not copied."""
    if len(pieces) < 2:
        return pieces[0].view(np.uint8) if pieces else None
    filled = []
    for piece in pieces:
        filled += [piece.view(np.uint8), np.zeros(-piece.nbytes % _ALIGN, np.uint8)]
    return np.concatenate(filled[:-1])


def parted(payload: Payload | None, lengths: Sequence[int], sender: str) -> list[Payload]:
    """The inverse of `joined`: views.

    Raises:
        ProtocolError: there are more bytes, or fewer.
    """
    whole = np.empty(0, np.uint8) if payload is None else payload
    starts, end = [], 0
    for length in lengths:
        starts.append(end + -end % _ALIGN)
        end = starts[-1] + length
    if min(lengths, default=0) < 0 or end != len(whole):
        raise ProtocolError(sender, "length", f"{len(whole)} bytes, and its pieces have {end}")
    return [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def piece_of(pieces: Sequence[Payload], number: int, sender: str) -> Payload | None:
    """The piece of a number; None for -1.

    Raises:
        ProtocolError: there is none.
    """
    if not -1 <= number < len(pieces):
        raise ProtocolError(sender, "message", f"it has {len(pieces)} pieces, and speaks of number {number}")
    return None if number == -1 else pieces[number]
