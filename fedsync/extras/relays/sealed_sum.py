"""Format of the sum of encrypted updates that a relay sends to the server for its silos.

    magic [4] | format version [2] | number of members [2] | length of each slip [4 per member] | zeros to 8
    | each slip, zeros to 8 | words of the sum | values in the clear, float32

A *slip* (`fedsync.cipher.encoding.sealed_wire.slip`) is an update without its words, under its silo's own signature. So
the server knows as much of each member as of an update that arrives directly: its silo, order, grid, chain and annex.
The server adds up the tags itself. The server cannot see whether the words are the members' sum. Silos can: they check
the tag before they open anything.

Unencrypted values are sent as a mean, see `fedsync.extras.relays.region_sums`. Numbers are little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fedsync.cipher.encoding import fields
from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.integrity import added
from fedsync.cipher.suites.suite import Words, check_additions, words_fault
from fedsync.common.errors import ProtocolError
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload

_MAGIC, _VERSION, _ALIGN = b"FSRG", 1, 8
_HEAD = struct.Struct("<4sHH")


@dataclass(frozen=True, slots=True, eq=False)
class SealedSum:
    """Region's sum that passed every check that needs no key, with its members' slips in the same order."""

    envelope: wire.Envelope
    slips: tuple[wire.Envelope, ...]
    clear: Vector


def most_bytes(members: int, upload_bytes: int, annex: int) -> int:
    """Upper bound of a region sum's size [bytes]; ``upload_bytes`` is the bound of one update."""
    return upload_bytes + members * (4096 + annex)


def parts(envelopes: Sequence[wire.Envelope], words: Iterable[Words], clear: Vector) -> Iterator[bytes | memoryview]:
    """Yield the message: slips of ``envelopes``, ``words`` of their sum, and the mean of the values in the clear."""
    slips = [wire.slip(envelope) for envelope in envelopes]
    lengths = np.array([len(slip) for slip in slips], dtype="<u4").tobytes()
    yield _HEAD.pack(_MAGIC, _VERSION, len(slips)) + lengths + bytes(-len(lengths) % _ALIGN)
    for slip in slips:
        yield slip + bytes(-len(slip) % _ALIGN)
    for span in words:
        yield np.ascontiguousarray(span, dtype="<u8").data.cast("B")
    yield clear.astype("<f4", copy=False).tobytes()


def read(payload: Payload, relay: str, expected: Sequence[wire.Expected], clear_values: int) -> SealedSum:
    """Read a region's sum after every check that needs no secret; raise `ProtocolError` at the first failed check.

    Args:
        payload: the message, uint8 [bytes].
        expected: expectation for each member, in order; all have the same form and number of chunks.
        clear_values: number of values in the clear.
    """
    if payload.dtype != np.uint8 or payload.ndim != 1 or len(payload) < _HEAD.size:
        raise ProtocolError(relay, "region's sum", f"{payload.dtype} {payload.shape} instead of bytes")
    magic, version, count = _HEAD.unpack_from(payload.data)
    if (magic, version, count) != (_MAGIC, _VERSION, len(expected)):
        told = f"it begins with {magic!r}, version {version}, of {count} members, and names {len(expected)}"
        raise ProtocolError(relay, "region's sum", told)
    table, form = 4 * count, expected[0].form
    at, size = _HEAD.size + table + -table % _ALIGN, expected[0].chunks * form.chunk_bytes
    if len(payload) < at:
        raise ProtocolError(relay, "region's sum", "it ends within its lengths")
    lengths = np.frombuffer(payload.data, "<u4", count, _HEAD.size).tolist()
    whole = at + sum(length + -length % _ALIGN for length in lengths) + size + 4 * clear_values
    if len(payload) != whole:
        raise ProtocolError(relay, "length", f"{len(payload)} bytes, and its parts have {whole}")
    slips = []
    for length, wanted in zip(lengths, expected, strict=True):
        slips.append(wire.read_slip(payload[at : at + length], wanted))
        at += length + -length % _ALIGN
    envelope = _aggregate(slips, payload[at : at + size], relay)
    fault = words_fault(envelope.words, form, relay)
    if fault is not None:
        raise fault
    clear = fields.clear_values(payload[at + size :], clear_values, relay)
    return SealedSum(envelope, tuple(slips), clear)


def _aggregate(slips: Sequence[wire.Envelope], payload: Payload, relay: str) -> wire.Envelope:
    """Envelope of the sum of the slips' updates, or `ProtocolError` if they cannot be in one sum."""
    first, members = slips[0].head, tuple(slip.head.members[0] for slip in slips)
    for slip in slips[1:]:
        head = slip.head
        if (head.grid, head.round, head.attempt) != (first.grid, first.round, first.attempt):
            raise ProtocolError(relay, "members", "updates of other grids, versions or attempts are in one sum")
        if head.members[0].chain != first.members[0].chain:
            raise ProtocolError(relay, "members", "updates with different histories are in one sum")
    check_additions(members, first.form.limit(first.packing), relay)
    tag = slips[0].tag
    for slip in slips[1:]:
        tag = added(tag, slip.tag, first.form)
    words = np.frombuffer(payload.data, dtype="<u8").reshape(first.chunks, first.form.words)
    head = wire.Head(
        wire.Kind.AGGREGATE, first.form, first.packing, relay, first.round, first.attempt, first.epoch,
        first.fingerprint, first.grid, first.chunks, members,
    )  # fmt: skip
    return wire.Envelope(head, words.astype(np.uint64, copy=False), tag)
