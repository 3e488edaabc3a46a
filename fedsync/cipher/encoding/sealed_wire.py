"""Format of sealed (encrypted and signed) messages between silos and server. Numbers are little-endian.

    magic [4] | format version [2] | kind [1] | suite [1] | bits [1] | lanes [1] | number of members [2]
    | length of this header [4] | length of the annex [4] | number of chunks [4] | key epoch [4] | attempt [4]
    | round [8] | group fingerprint [16] | grid digest [32] | sender: length [1], UTF-8 | each member | zeros to 8
    each member (update in a sum): as in `fields`; in an aggregate (sum of updates) with the digests
    annex: additional data of a masked update; zeros to 8
    payload: all chunks, as little-endian words of 64 bits; chunk 0 begins with the numbers of `tally`
    tag [2 x 8] | Ed25519 signature [64] over header, annex, SHA-256 of the payload, and tag

The only member of an update is the update itself; the receiver computes the two digests. An aggregate names every
update in the sum with its digests, and has no annex. The tag comes after the payload, so that a silo can send the first
chunks while it seals the last. A *slip* is an update with the SHA-256 of the payload instead of the payload: a few
hundred bytes under the same signature.

A message is untrusted until `decode` returns. `decode` reads no field before it knows that the field exists. It
compares the length with the header's numbers before it touches the payload. It allocates nothing in proportion to a
number in the message. It returns only words that are below their modulus.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding.fields import annex_digest, check_same, read_member, read_name, write_member, write_name
from fedsync.cipher.encoding.packing import Packing
from fedsync.cipher.keys.material import FINGERPRINT_BYTES, SIGNATURE_BYTES, is_signed, sign
from fedsync.cipher.suites.suite import DIGEST_BYTES, MASKED, Form, Member, Words, check_additions, words_fault
from fedsync.common.errors import ProtocolError
from fedsync.model.chunked_arrays import pieces as array_pieces

VERSION = 4
TAG_PARTS = 2  # numbers of a tag, each below the suite's modulus

Tag = tuple[int, ...]
NO_TAG: Tag = (0,) * TAG_PARTS

MAX_MEMBERS = 255
MAX_CHUNKS = 2**20

MAX_ANNEX = 2**20  # bytes

_MAGIC = b"FSYM"
_FIXED = struct.Struct("<4sHBBBBHIIIIIQ16s32s")
_BOUND = struct.Struct("<BBBIII16s32s")
TAG = struct.Struct(f"<{TAG_PARTS}Q")
TRAILER_BYTES = TAG.size + SIGNATURE_BYTES  # behind the payload

_ALIGN = 8
_CONTEXT = b"sealed message 2"

Buffer = bytes | bytearray | memoryview | NDArray[np.uint8]


class Kind(IntEnum):
    """Content of a message. Numbers on the wire: never renumber."""

    UPDATE = 1
    AGGREGATE = 2


@dataclass(frozen=True, slots=True)
class Head:
    """Everything in a message except its words and its tag.

    Args:
        round: base version of an update; in an aggregate, the version to which it leads, as the server claims.
        attempt: number of earlier attempts at the round; in an aggregate, the attempt of all members.
        epoch: epoch of the group key, whose ``fingerprint`` has 16 bytes.
        grid: `QuantizationGrid.digest`, concealed by a key of the group, 32 bytes.
        chunks: chunks of the payload: `QuantizationGrid.chunks`, or 1 for a header alone.
    """

    kind: Kind
    form: Form
    packing: Packing
    sender: str
    round: int
    attempt: int
    epoch: int
    fingerprint: bytes
    grid: bytes
    chunks: int
    members: tuple[Member, ...]
    annex: bytes = b""

    @property
    def nbytes(self) -> int:
        return len(_pack(self)) + self.chunks * self.form.chunk_bytes + TRAILER_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Envelope:
    """Message that passed every check that needs no secret. ``words`` are a view of the message, uint64 [chunks, words
    of a chunk]. A slip has no words.
    """

    head: Head
    words: Words
    tag: Tag
    signature: bytes = bytes(SIGNATURE_BYTES)


@dataclass(frozen=True, slots=True)
class Expected:
    """Values that a receiver expects in a message; fields as in `Head`.

    The transport has authenticated ``sender``. A receiver that does not know ``attempt`` passes None: the tag binds the
    attempt. A receiver that does not know ``grid`` passes None, and compares the grid afterwards. ``public`` is the
    Ed25519 key of an update's sender; None if the transport alone vouches for the sender.
    """

    kind: Kind
    form: Form
    packing: Packing
    sender: str
    round: int
    attempt: int | None
    epoch: int
    fingerprint: bytes
    grid: bytes | None
    chunks: int
    update_id: str | None = None
    public: bytes | None = None


def member_context(head: Head, member: Member) -> bytes:
    """Canonical bytes of all that an update's sender knew of the message; the tag is bound to these bytes.

    The head of the update and the head of an aggregate with this update give the same bytes.
    """
    packing = head.packing
    bound = _BOUND.pack(
        *(head.form.code, packing.bits, packing.count, head.epoch, head.attempt, head.chunks),
        *(head.fingerprint, head.grid),
    )
    return bound + write_member(member, digests=True)


class Writer:
    """Incremental writer of one message; `ValueError` if the head cannot be written, or chunks do not fit. ``signing``
    is the sender's Ed25519 private key; without it the signature is zero.
    """

    def __init__(self, head: Head, signing: bytes | None) -> None:
        self.header = _pack(head)  # header and annex
        self._form, self._signing, self._left = head.form, signing, head.chunks
        self._hash = hashlib.sha256()

    def payload(self, words: Words) -> memoryview:
        """Return the next chunks' bytes, without a copy on little-endian machines."""
        if words.ndim != 2 or words.shape[1] != self._form.words or len(words) > self._left:
            raise ValueError(f"chunks {words.shape} do not fit the message")
        self._left -= len(words)
        data = _payload(words)
        self._hash.update(data)
        return data

    @property
    def digest(self) -> bytes:
        return self._hash.digest()

    def trailer(self, tag: Tag) -> bytes:
        if self._left:
            raise ValueError(f"{self._left} chunks are missing")
        packed = TAG.pack(*tag)
        if self._signing is None:
            return packed + bytes(SIGNATURE_BYTES)
        return packed + sign(self._signing, _CONTEXT, self.header + self.digest + packed)


def _payload(words: Words) -> memoryview:
    # An empty array has no buffer that can be cast.
    return np.ascontiguousarray(words, dtype="<u8").data.cast("B") if len(words) else memoryview(b"")


def encode(head: Head, words: Words, tag: Tag, signing: bytes | None) -> bytes:
    writer = Writer(head, signing)
    return b"".join((writer.header, writer.payload(words), writer.trailer(tag)))


def pieces(envelope: Envelope) -> Iterator[bytes | memoryview]:
    """Yield the message that an envelope was read from, without a copy of its words."""
    yield _pack(envelope.head)
    yield from array_pieces(envelope.words.astype("<u8", copy=False))
    yield TAG.pack(*envelope.tag) + envelope.signature


def unsigned(head: Head, words: Iterable[Words], tag: Tag) -> Iterator[bytes | memoryview]:
    yield _pack(head)
    for portion in words:
        yield _payload(portion)
    yield TAG.pack(*tag) + bytes(SIGNATURE_BYTES)


def slip(envelope: Envelope) -> bytes:
    digest = envelope.head.members[0].digest
    return b"".join((_pack(envelope.head), digest, TAG.pack(*envelope.tag), envelope.signature))


def read_slip(data: Buffer, expected: Expected) -> Envelope:
    """Read an update without its words from its slip; arguments and errors as in `decode`."""
    view = np.frombuffer(data, np.uint8).data
    head, size = _read_head(view, expected, DIGEST_BYTES)
    digest, no_words = bytes(view[size : size + DIGEST_BYTES]), np.empty((0, head.form.words), dtype=np.uint64)
    return _signed(view, size, size + DIGEST_BYTES, head, no_words, digest, expected)


def decode(data: Buffer, expected: Expected) -> Envelope:
    """Read a message after every check that needs no secret; raise `ProtocolError` at the first failed check. The
    member of an update gets its digests. ``data`` must not change while the envelope is in use.
    """
    view = np.frombuffer(data, np.uint8).data
    head, size = _read_head(view, expected, expected.chunks * expected.form.chunk_bytes)
    end = size + head.chunks * head.form.chunk_bytes
    # A view is safe: the length was compared before.
    words = np.frombuffer(view[size:end], dtype="<u8").reshape(head.chunks, head.form.words)
    native = words.astype(np.uint64, copy=False)
    hashed = hashlib.sha256() if head.kind is Kind.UPDATE else None
    fault = words_fault(native, head.form, expected.sender, hashed)
    envelope = _signed(view, size, end, head, native, None if hashed is None else hashed.digest(), expected)
    if fault is not None:
        raise fault
    return envelope


def _signed(
    view: memoryview, size: int, end: int, head: Head, words: Words, digest: bytes | None, expected: Expected
) -> Envelope:
    """Read tag and signature behind a payload from ``size`` to ``end``; check the signature if it has a ``digest``."""
    tag, signature = TAG.unpack_from(view, end), bytes(view[end + TAG.size :])
    if max(tag) >= head.form.modulus:
        raise ProtocolError(expected.sender, "tag", "a number of the tag is not below its modulus")
    if digest is not None:
        head = replace(head, members=(replace(head.members[0], digest=digest, annex=annex_digest(head.annex)),))
        signed = b"".join((view[:size], digest, TAG.pack(*tag)))
        if expected.public is not None and not is_signed(expected.public, _CONTEXT, signed, signature):
            raise ProtocolError(expected.sender, "signature", "not signed by the sender, or changed in transit")
    return Envelope(head, words, tag, signature)


def _read_head(view: memoryview, expected: Expected, payload: int) -> tuple[Head, int]:
    """Read header and annex, compare them with ``expected``, and return the head and the start of the payload.

    Suite, lanes and chunks are compared first, because the expected length of ``payload`` [bytes] depends on them.
    """
    same = partial(check_same, expected.sender)
    if len(view) < _FIXED.size + TRAILER_BYTES:
        raise ProtocolError(expected.sender, "length", f"{len(view)} bytes are no message")
    fields = _FIXED.unpack_from(view)
    magic, version, kind, suite, bits, lanes, count, size, annexed, chunks, *rest = fields
    same("magic", magic, _MAGIC)
    same("version", version, VERSION)
    same("kind", kind, int(expected.kind))
    same("suite", suite, expected.form.code)
    same("bits", bits, expected.packing.bits)
    same("lanes", lanes, expected.packing.count)
    same("chunks", chunks, expected.chunks)
    if not 1 <= count <= MAX_MEMBERS:
        raise ProtocolError(expected.sender, "members", f"{count} members, at most {MAX_MEMBERS}")
    if not _FIXED.size <= size <= len(view) or size % _ALIGN:
        raise ProtocolError(expected.sender, "header", f"a header of {size} bytes in a message of {len(view)}")
    most = MAX_ANNEX if kind == Kind.UPDATE and expected.form is MASKED else 0
    if annexed > most:
        raise ProtocolError(expected.sender, "annex", f"{annexed} bytes, at most {most}")
    start = size + annexed + -annexed % _ALIGN
    same("length", len(view), start + payload + TRAILER_BYTES)
    sender, at = read_name(view[:size], _FIXED.size, expected.sender)
    members: list[Member] = []
    for _ in range(count):
        member, at = read_member(view[:size], at, expected.sender, digests=kind == Kind.AGGREGATE)
        members.append(member)
    if size - at >= _ALIGN or any(view[at:size]):
        raise ProtocolError(expected.sender, "header", "has more bytes after the members")
    annex = bytes(view[size : size + annexed])
    if any(view[size + annexed : start]):
        raise ProtocolError(expected.sender, "annex", "has more bytes after its end")
    epoch, attempt, round_, fingerprint, grid = rest
    head = Head(
        Kind(kind), expected.form, expected.packing, sender, round_, attempt, epoch, fingerprint, grid, chunks,
        tuple(members), annex,
    )  # fmt: skip
    _compare(head, expected)
    return head, start


def _compare(head: Head, expected: Expected) -> None:
    same = partial(check_same, expected.sender)
    same("sender", head.sender, expected.sender)
    same("key epoch", head.epoch, expected.epoch)
    same("key fingerprint", head.fingerprint, expected.fingerprint)
    same("round", head.round, expected.round)
    if expected.attempt is not None:
        same("attempt", head.attempt, expected.attempt)
    if expected.grid is not None:
        same("grid", head.grid, expected.grid)
    check_additions(head.members, head.form.limit(head.packing), expected.sender)
    if head.kind is not Kind.AGGREGATE:
        same("members", len(head.members), 1)
        same("round", head.members[0].round, head.round)
        if expected.update_id is not None:
            same("update id", head.members[0].update_id, expected.update_id)


def _pack(head: Head) -> bytes:
    if not 1 <= len(head.members) <= MAX_MEMBERS or not 1 <= head.chunks <= MAX_CHUNKS:
        raise ValueError(f"{len(head.members)} members, {head.chunks} chunks cannot be written")
    aggregate, annex = head.kind is Kind.AGGREGATE, head.annex
    if len(annex) > MAX_ANNEX or (annex and (aggregate or head.form is not MASKED)):
        raise ValueError(f"an annex of {len(annex)} bytes, at most {MAX_ANNEX}, with masked updates only")
    if not aggregate and head.members[0].annex != annex_digest(annex):
        raise ValueError("the member has the digest of another annex")
    if (len(head.fingerprint), len(head.grid)) != (FINGERPRINT_BYTES, DIGEST_BYTES):
        raise ValueError(f"a fingerprint of {len(head.fingerprint)} bytes, a grid of {len(head.grid)}")
    packing = head.packing
    try:
        rest = write_name(head.sender)
        for member in head.members:
            rest += write_member(member, digests=aggregate)
        rest += bytes(-(_FIXED.size + len(rest)) % _ALIGN)
        fixed = _FIXED.pack(
            *(_MAGIC, VERSION, head.kind, head.form.code, packing.bits, packing.count, len(head.members)),
            *(_FIXED.size + len(rest), len(annex), head.chunks, head.epoch, head.attempt, head.round),
            *(head.fingerprint, head.grid),
        )
    except struct.error as error:
        raise ValueError(f"the header cannot be written: {error}") from None
    return fixed + rest + annex + bytes(-len(annex) % _ALIGN)
