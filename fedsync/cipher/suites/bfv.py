"""Encryption scheme (suite) ``bfv``: exact sums of ciphertexts under a secret key that the silos share.

BFV with N = 4096, a coefficient modulus of 60 and 16 bits, a plain modulus t of 48 bits, symmetric encryption and no
evaluation keys. 76 bits are far below the 109 bits that the HomomorphicEncryption.org standard allows for 128-bit
security at this degree. Each chunk is one ciphertext of 2 x 4096 words below q. The noise of a sum grows with the
number of summands. Past the limit, decryption fails silently and totally, so the code bounds the number.

In a serialised ciphertext, all bytes except its words are constant. A process takes these bytes from one vector that it
encrypts itself, and checks them field by field. Peers send only words, around which the process writes its own constant
bytes. So no length, size or flag of a peer ever reaches the library.

    TenSEAL     protobuf: sizes of the vector (field 1), SEAL's bytes (field 2)
    SEAL        header [16]: magic 5ea1, header size, version, compression, reserved, total bytes
    zstd        frame of raw blocks, because words look random; left out in the bytes written here
    ciphertext  parameters' hash [32], NTT flag [1], polynomials [8], degree [8], primes [8], scale [8], correction [8],
                then an array: header [16], words [8], the words

Source: Fan and Vercauteren 2012 (eprint 2012/144); Microsoft SEAL; TenSEAL.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tenseal

from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.suites.suite import BFV, BFV_PLAIN, Form, Member, Words, check_additions, check_words
from fedsync.common.errors import ConfigError, RunError

_SEAL_HEADER = struct.Struct("<HBBBBHQ")
_FIELDS = struct.Struct("<32sBQQQdQ")
_MAGIC, _ZSTD_MAGIC = 0xA15E, b"\x28\xb5\x2f\xfd"
_PLAIN, _ZSTD = 0, 2
PREFIX_BYTES = _FIELDS.size + _SEAL_HEADER.size + 8  # bytes in front of a ciphertext's words


def varint(number: int) -> bytes:
    written = bytearray()
    while number > 127:
        written.append(number & 127 | 128)
        number >>= 7
    written.append(number)
    return bytes(written)


# Head of a vector with one ciphertext: its number of values, and the tag of SEAL's bytes.
_VECTOR_HEAD = b"\x0a" + varint(len(varint(SLOTS))) + varint(SLOTS) + b"\x12"


class FormatError(ValueError):
    """Error: the library wrote a format that this module does not know."""


class CompressedError(FormatError):
    """Error: the library compressed words, which almost never happens to random words. Remedy: encrypt again."""


def seal_bytes(vector: bytes) -> memoryview:
    """SEAL's bytes inside TenSEAL's bytes of a vector with one ciphertext; `FormatError` if there are none."""
    if not vector.startswith(_VECTOR_HEAD):
        found, expected = vector[: len(_VECTOR_HEAD)].hex(), _VECTOR_HEAD.hex()
        raise FormatError(f"a vector begins with {found}, expected {expected}")
    length, start = read_varint(vector, len(_VECTOR_HEAD))
    if start + length > len(vector):
        raise FormatError("a vector ends early")
    return memoryview(vector)[start : start + length]


def unpacked(data: memoryview) -> list[memoryview]:
    """Extract a ciphertext's own bytes from SEAL's bytes, in pieces. `FormatError` if the header differs from the known
    header; `CompressedError` if a zstd block is compressed.
    """
    magic, header, _, _, compression, reserved, total = _SEAL_HEADER.unpack_from(data)
    if (magic, header, reserved, total) != (_MAGIC, _SEAL_HEADER.size, 0, len(data)):
        raise FormatError(f"SEAL's header is {bytes(data[: _SEAL_HEADER.size]).hex()}")
    body = data[_SEAL_HEADER.size :]
    if compression == _PLAIN:
        return [body]
    if compression != _ZSTD:
        raise FormatError(f"SEAL used compression {compression}")
    return _raw_blocks(body)


def _raw_blocks(frame: memoryview) -> list[memoryview]:
    """Content of a zstd frame (RFC 8878) with raw blocks only."""
    if bytes(frame[:4]) != _ZSTD_MAGIC:
        raise FormatError("no zstd frame")
    descriptor = frame[4]
    single = descriptor >> 5 & 1
    size_bytes = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + size_bytes
    blocks: list[memoryview] = []
    last = False
    while not last:
        if at + 3 > len(frame):
            raise FormatError("a zstd frame ends early")
        head = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        if kind != 0:
            raise CompressedError("a zstd block is compressed")
        blocks.append(frame[at + 3 : at + 3 + size])
        at += 3 + size
    return blocks


def copy_words(pieces: list[memoryview], into: memoryview) -> None:
    """Copy the bytes behind a ciphertext's prefix from ``pieces``; `FormatError` if they do not fill ``into``."""
    at = -PREFIX_BYTES
    for piece in pieces:
        rest = piece[max(-at, 0) :]
        start = max(at, 0)
        at += len(piece)
        if at > len(into):
            break
        into[start : start + len(rest)] = rest
    if at != len(into):
        raise FormatError(f"a ciphertext has words of {at} bytes, expected {len(into)}")


def checked_prefix(body: bytes) -> bytes:
    """Bytes in front of a ciphertext's words; `FormatError` unless the fields fit two polynomials modulo one prime."""
    if len(body) != PREFIX_BYTES + 8 * BFV.words:
        raise FormatError(f"a ciphertext has {len(body)} bytes, expected {PREFIX_BYTES + 8 * BFV.words}")
    _, *found = _FIELDS.unpack_from(body)
    if found != [0, 2, SLOTS, 1, 1.0, 1]:
        raise FormatError(f"a ciphertext's fields are {found}")
    magic, header, _, _, compression, reserved, total = _SEAL_HEADER.unpack_from(body, _FIELDS.size)
    (words,) = struct.unpack_from("<Q", body, PREFIX_BYTES - 8)
    array = (magic, header, compression, reserved, total, words)
    if array != (_MAGIC, _SEAL_HEADER.size, _PLAIN, 0, _SEAL_HEADER.size + 8 + 8 * BFV.words, BFV.words):
        raise FormatError(f"an array's header is {array}")
    return body[:PREFIX_BYTES]


def vector_head(sample: bytes, prefix: bytes) -> bytes:
    """Bytes that must precede words so that TenSEAL reads an uncompressed vector. ``sample`` is a vector that TenSEAL
    wrote; its version numbers are reused. ``prefix`` comes from `checked_prefix`.
    """
    major, minor = seal_bytes(sample)[3:5]
    total = _SEAL_HEADER.size + len(prefix) + 8 * BFV.words
    header = _SEAL_HEADER.pack(_MAGIC, _SEAL_HEADER.size, major, minor, _PLAIN, 0, total)
    return _VECTOR_HEAD + varint(total) + header + prefix


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
    raise FormatError("a vector's lengths cannot be read")


_VECTOR = tenseal._ts_cpp.BFVVector
_ATTEMPTS = 8


def new_context() -> bytes:
    """Create a context with its secret key and nothing else, 43 KB: the group's secret."""
    symmetric = tenseal.ENCRYPTION_TYPE.SYMMETRIC
    context = tenseal.context(
        tenseal.SCHEME_TYPE.BFV, SLOTS, BFV_PLAIN, coeff_mod_bit_sizes=[60, 16], encryption_type=symmetric, n_threads=1
    )
    secret: bytes = context.serialize(
        save_public_key=False, save_secret_key=True, save_galois_keys=False, save_relin_keys=False
    )
    return secret


class Bfv:
    """Sealer with the group's BFV context, which the library parses: it must come from the administrator, signed.
    ``form`` is `BFV`, or `MASKED` where the slots are already masked. `ConfigError` if ``context`` is not from
    `new_context`; `RunError` if the library writes ciphertexts in an unknown format.
    """

    def __init__(self, context: bytes, form: Form = BFV) -> None:
        self._context, self._head = _opened(context)
        self._form = form

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        """Encrypt one ciphertext a chunk, uint64 [chunks, 8192]; ``slots``, int64 [chunks, 4096], lie within +-2^47."""
        words = np.empty((len(slots), BFV.words), dtype=np.uint64)
        for into, row in zip(words, slots, strict=True):
            self._encrypt(row.tolist(), into)
        return words if sys.byteorder == "little" else words.byteswap()

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        check_additions(members, self._form.additions, sender)
        # This check must directly precede the library call.
        check_words(words, self._form, sender)
        slots = np.empty((len(words), SLOTS), dtype=np.int64)
        for into, row in zip(slots, words, strict=True):
            into[:] = _VECTOR(self._context, self._head + row.astype("<u8", copy=False).tobytes()).decrypt()
        return slots

    def _encrypt(self, values: list[int], into: Words) -> None:
        for _ in range(_ATTEMPTS):
            try:
                pieces = unpacked(seal_bytes(_VECTOR(self._context, values).serialize()))
            except CompressedError:
                continue
            return copy_words(pieces, into.data.cast("B"))
        raise RunError("TenSEAL compressed a ciphertext again and again: its words are not random")


def _opened(secret: bytes) -> tuple[Any, bytes]:
    try:
        # One thread: the library's thread pool would not survive a fork.
        loaded = tenseal.context_from(secret, n_threads=1)
        if not loaded.is_private() or loaded.has_galois_keys():
            raise ValueError("a context with the secret key and no others is needed")
        return loaded.data, _probe(loaded.data)
    except FormatError as error:
        raise RunError(f"TenSEAL {tenseal.__version__} writes ciphertexts in an unknown way: {error}") from None
    except (ValueError, RuntimeError, TypeError) as error:
        problem = f"no context of this suite: {error}"
        raise ConfigError("group secret", problem, "Ask the administrator for a new one") from None


def _probe(context: Any) -> bytes:
    """Constant head of a vector, after a test that words survive extraction and reinsertion."""
    values = [(-1) ** slot * (slot << 34) for slot in range(SLOTS)]
    sample = _VECTOR(context, values).serialize()
    body = b"".join(unpacked(seal_bytes(sample)))
    head = vector_head(sample, checked_prefix(body))
    words = np.frombuffer(body, dtype="<u8", offset=PREFIX_BYTES).reshape(1, -1)
    if int(words.max()) >= BFV.modulus:
        raise FormatError("words are not below the modulus")
    if list(_VECTOR(context, head + words.tobytes()).decrypt()) != values:
        raise FormatError("words change when they are taken out and put back")
    return head
