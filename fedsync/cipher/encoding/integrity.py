"""Authentication tags of ciphertexts: with them a silo decrypts only sums of updates that silos encrypted.

Ciphertexts are malleable, and whether a silo can decrypt a changed ciphertext discloses something about the key. So
each silo sends a *tag* with its update: two numbers modulo m. The encryption scheme (*suite*) adds ciphertext words
modulo the same prime m. For c = 0 and 1

    h_c(w) = sum over blocks b of s_bc * (sum over positions p of rho_pc w_bp)                 (mod m)
    tag_c  = h_c(w) + pad_c(all that the sender knew of the message, SHA-256 of w included)    (mod m)

where w_bp are the ciphertext words: block b is a chunk, p a position in the chunk. The server adds words and tags
without a key. A silo that receives a sum computes h of the sum, adds the pads of the updates that the sum names, and
compares the result with the received tag before it decrypts anything. rho and s are uniform, secret, and equal for all
messages of a key epoch and suite. Only equal words can share a pad, since the input of a pad includes the digest of the
words. With two numbers in a tag, a forgery succeeds with probability (2/m)^2, below 2^-116. The tags protect against
the server and the network, not against silos. `docs/internals/cryptography.md` gives the argument.

Source: Agrawal and Boneh 2009, "Homomorphic MACs", section 3, for sums; Carter and Wegman 1981 for hash and pad.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding.sealed_wire import TAG, TAG_PARTS, Envelope, Head, Tag, member_context
from fedsync.cipher.suites.pad import Keystream
from fedsync.cipher.suites.suite import NO_DIGEST, Form, Words, check_words
from fedsync.common.errors import PolicyError, ProtocolError
from fedsync.model.chunked_arrays import give_back, spans

_EXACT, _HALVES, _GROUP = 53, 2, 8
"""Bits of integers that float64 adds exactly; parts of a word; chunks that are processed together, for the cache."""

_STRETCH = 512
"""Positions of one matrix product: below the size at which OpenBLAS starts threads, which cost more than they gain."""

_SPARE = 16
"""Spare draws: about 1 of 2^46 numbers is not below the modulus and is replaced."""


class WordHash:
    """Incremental hash h of words that arrive in order. For one message and one thread.

    A word is cut into two halves, and rho into pieces so small that float64 adds up a chunk's products exactly. 8,192
    words of 60 bits take 30 + 10 + 13 = 53 bits. So the inner sums are a matrix product.
    """

    def __init__(
        self, form: Form, half: int, pieces: NDArray[np.float64], weights: list[int], factors: Keystream
    ) -> None:
        self._modulus, self._pieces, self._weights, self._factors = form.modulus, pieces, weights, factors
        self._half, self._mask = np.uint64(half), np.uint64((1 << half) - 1)
        self._halves = np.empty((_HALVES * _GROUP, form.words))
        self._sums = [0] * TAG_PARTS

    def take(self, words: Words) -> None:
        """Hash the next chunks, uint64 [chunks, words of a chunk], all below the modulus, as `check_words` ensures."""
        for first in range(0, len(words), _GROUP):
            group = words[first : first + _GROUP]
            count = len(group)
            halves = self._halves[: _HALVES * count]
            np.bitwise_and(group, self._mask, out=halves[:count], casting="unsafe")
            np.right_shift(group, self._half, out=halves[count:], casting="unsafe")
            # One product per stretch of positions; the sum over stretches is exact, too.
            stretches = halves.reshape(_HALVES * count, -1, _STRETCH).transpose(1, 0, 2)
            products = (stretches @ self._pieces).sum(axis=0).astype(np.int64).reshape(_HALVES, count, TAG_PARTS, -1)
            blocks = products.transpose(1, 2, 0, 3).reshape(count, TAG_PARTS, -1).tolist()
            # A number of 128 bits, reduced, is practically uniform below the modulus.
            factors = self._factors.words(2 * TAG_PARTS * count).reshape(count, TAG_PARTS, 2).tolist()
            for inner, outer in zip(blocks, factors, strict=True):
                for check, (low, high) in enumerate(outer):
                    self._sums[check] += sum(map(mul, inner[check], self._weights)) % self._modulus * (high << 64 | low)

    def value(self) -> Tag:
        return tuple(one % self._modulus for one in self._sums)


@dataclass(frozen=True, slots=True, eq=False)
class Authentic:
    """Message whose tag was verified; made by `Authenticator.authenticate`.

    Its words may lie in a file that could change after the check. So callers get copies, span by span. Each copy is
    released only after h of all words up to its end equals the value at verification (``reached``).
    """

    head: Head
    _words: Words
    _sender: str
    _reached: tuple[Tag, ...]
    _hasher: Callable[[], WordHash]

    def spans(self) -> Iterator[Words]:
        """Yield copies of all words, uint64 [chunks of a span, words of a chunk]; `ProtocolError` if words changed."""
        hasher = self._hasher()
        for span, reached in zip(_copies(self._words, self.head.form, self._sender), self._reached, strict=True):
            hasher.take(span)
            if hasher.value() != reached:
                raise ProtocolError(self._sender, "tag", "words changed after they were authenticated")
            yield span

    @property
    def first(self) -> Words:
        """First chunk, uint64 [1, words of a chunk]; raises as `spans`."""
        return next(self.spans())[:1]


class Authenticator:
    """Maker and verifier of the tags of one suite in one key epoch; ``key`` is for `Purpose.TAG`, 32 bytes."""

    def __init__(self, key: bytes, form: Form) -> None:
        self._key = hmac.digest(key, b"fedsync tag 2\0" + bytes([form.code]), "sha256")
        self._form, self._pad_key, self._factor_key = form, self._derived(b"pad"), self._derived(b"s")
        self._half = -(-form.modulus.bit_length() // _HALVES)
        bits = _EXACT - self._half - (form.words - 1).bit_length()
        shifts = range(0, form.modulus.bit_length(), bits)
        rho = np.stack([_uniform(self._derived(b"rho", check), form) for check in range(TAG_PARTS)], axis=1)
        cut = [(rho >> np.uint64(shift)) & np.uint64((1 << bits) - 1) for shift in shifts]
        self._pieces = np.stack(cut, axis=2).reshape(-1, _STRETCH, TAG_PARTS * len(cut)).astype(np.float64)
        self._weights = [1 << (self._half * half + shift) for half in range(_HALVES) for shift in shifts]

    def hasher(self) -> WordHash:
        return WordHash(self._form, self._half, self._pieces, self._weights, Keystream(self._factor_key))

    def tag(self, hashed: Tag, head: Head) -> Tag:
        """Compute the tag of an update from its `WordHash.value`; the member must already have its digests."""
        if head.members[0].digest == NO_DIGEST:
            raise PolicyError(f"{head.members[0].update_id} cannot be tagged: its words have no digest yet")
        return self._padded(hashed, head)

    def authenticate(self, envelope: Envelope, sender: str) -> Authentic:
        """Verify a sum before it is opened; raise `ProtocolError` if its words are not what its members sealed."""
        head, hasher, reached = envelope.head, self.hasher(), list[Tag]()
        for span in _copies(envelope.words, self._form, sender):
            hasher.take(span)
            reached.append(hasher.value())
        expected = self._padded(hasher.value(), head)
        if not hmac.compare_digest(TAG.pack(*expected), TAG.pack(*envelope.tag)):
            raise ProtocolError(sender, "tag", f"this is not the sum of the {len(head.members)} updates that it names")
        return Authentic(head, envelope.words, sender, tuple(reached), self.hasher)

    def _padded(self, hashed: Tag, head: Head) -> Tag:
        total = list(hashed)
        for member in head.members:
            wide = hmac.digest(self._pad_key, b"fedsync pad of a tag 1\0" + member_context(head, member), "sha512")
            for check in range(TAG_PARTS):
                # A number of 256 bits, reduced, is practically uniform below the modulus.
                total[check] += int.from_bytes(wide[32 * check : 32 * check + 32], "little")
        return tuple(one % self._form.modulus for one in total)

    def _derived(self, use: bytes, check: int = 0) -> bytes:
        return hmac.digest(self._key, use + bytes([check]), "sha256")


def added(first: Tag, second: Tag, form: Form) -> Tag:
    """Tag of a sum of updates; needs no key."""
    return tuple((one + other) % form.modulus for one, other in zip(first, second, strict=True))


def _copies(words: Words, form: Form, sender: str) -> Iterator[Words]:
    for start, stop in spans(len(words), form.chunk_bytes):
        span = words[start:stop].copy()
        give_back(words)
        check_words(span, form, sender, start)
        yield span


def _uniform(key: bytes, form: Form) -> Words:
    drawn = Keystream(key).words(form.words + _SPARE)
    np.bitwise_and(drawn, np.uint64((1 << form.modulus.bit_length()) - 1), out=drawn)
    return drawn[drawn < np.uint64(form.modulus)][: form.words]
