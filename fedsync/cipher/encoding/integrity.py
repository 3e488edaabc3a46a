"""Tags over ciphertext words: a silo decrypts nothing but sums of what silos sealed.

Ciphertexts are malleable, and whether a changed one still opens tells something about the key. So each silo sends
with its update x a *tag* of two numbers modulo m, the prime that the suite adds words modulo. For c = 0 and 1

    h_c(w) = sum over blocks b of s_bc * (sum over positions p of rho_pc w_bp)                 (mod m)
    tag_c  = h_c(w) + pad_c(all that the sender knew of the message, SHA-256 of w included)    (mod m)

where w_bp are the words: block b is a chunk, p a place in it. What is hashed is the ciphertext, c0 and c1. The
server adds words and tags, without a key. A silo that is sent a sum computes h of it, adds the pads of the members
that the sum names, and compares, before anything is opened: it fits only if the words are the sum of exactly those
members' words. Coefficients and pads come from a key that silos share and the server does not have.

- rho and s are the same for all messages of a key epoch and suite, for what is hashed is a sum of them. They are
  uniform and secret: a change d, not 0, has h_c(d) = t with a probability of at most 2/m for every t: either the
  inner sum of a block that changed is 0, or its factor s_bc has one value of m. Swaps and multiples are changes, too.
- Two checks with coefficients of their own make it (2/m)^2, below 2^-116. Accept or refuse is all that is seen of a
  guess, and a wrong one tells no more than that it was wrong: v guesses succeed with v times that probability.
- A pad hides h_c(w): without it two messages would give linear equations in rho and s. It must never be used for two
  messages. Serial numbers and nonces come again where a backup is restored, so the digest of the words is in it: the
  same pad hides the same words, and tells nothing new.
- What is in the pad cannot be told otherwise later by the server: the run and all that led to the sender's model
  (``Member.chain``), the grid, the attempt, the suite, how many chunks there are. A left-out, added, renamed or
  replayed member has another pad, too.

It protects against the server and the network, not against silos: those have the key.

Source: Agrawal and Boneh 2009, "Homomorphic MACs", section 3, for sums; Carter and Wegman 1981 for hash and pad.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from operator import mul

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding.sealed_wire import TAG_PARTS, Envelope, Head, Tag, member_context
from fedsync.cipher.suites.pad import Keystream
from fedsync.cipher.suites.suite import NO_DIGEST, Adder, Form, Words
from fedsync.common.errors import PolicyError, ProtocolError
from fedsync.model.chunked_arrays import give_back, spans

# Bits of integers that float64 adds exactly.
_EXACT = 53
# Words are cut in two.
_HALVES = 2
# Chunks that are worked on together: they stay in the cache.
_GROUP = 8
# Positions of one matrix product: it stays below the size from which OpenBLAS starts threads, which cost more than they
# bring here, and so much that all else comes to a halt where a process shares its cores.
_STRETCH = 512
# Of 2^46 numbers one is not below its modulus and drawn again.
_SPARE = 16


class WordHash:
    """h of words that come in order. For one message and one thread.

    A word is cut in two halves and rho in pieces so small that float64 adds up a chunk's products exactly: with 8,192
    words of 60 bits 30 + 10 + 13 = 53 bits. So the inner sums are a matrix product.
    """

    def __init__(self, form: Form, pieces: NDArray[np.float64], weights: list[int], factors: Keystream) -> None:
        self._modulus, self._pieces, self._weights, self._factors = form.modulus, pieces, weights, factors
        self._half = np.uint64(_half_bits(form))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._halves = np.empty((_HALVES * _GROUP, form.words))
        self._sums = [0] * TAG_PARTS

    def take(self, words: Words) -> None:
        """The next chunks, uint64 [chunks, words of a chunk], all below the modulus, as `Adder.check` makes sure."""
        for first in range(0, len(words), _GROUP):
            self._take(words[first : first + _GROUP])

    def _take(self, words: Words) -> None:
        count = len(words)
        halves = self._halves[: _HALVES * count]
        np.bitwise_and(words, self._mask, out=halves[:count], casting="unsafe")
        np.right_shift(words, self._half, out=halves[count:], casting="unsafe")
        # Stretches of positions at a time, all of them added up exactly.
        stretches = halves.reshape(_HALVES * count, -1, _STRETCH).transpose(1, 0, 2)
        products = (stretches @ self._pieces).sum(axis=0).astype(np.int64).reshape(_HALVES, count, TAG_PARTS, -1)
        blocks = products.transpose(1, 2, 0, 3).reshape(count, TAG_PARTS, -1).tolist()
        # 128 bits make a number that is as good as uniform below the modulus.
        factors = self._factors.words(2 * TAG_PARTS * count).reshape(count, TAG_PARTS, 2).tolist()
        for inner, outer in zip(blocks, factors, strict=True):
            for check, (low, high) in enumerate(outer):
                self._sums[check] += sum(map(mul, inner[check], self._weights)) % self._modulus * (high << 64 | low)

    def value(self) -> Tag:
        """h_0 and h_1 of all that was taken."""
        return tuple(one % self._modulus for one in self._sums)


class Authentic:
    """A message whose tag fits. `Authenticator.authenticate` makes it.

    Its words may lie in a file, and what is opened has to be what was authenticated. So whoever opens them gets copies,
    span by span, and of each only once h of all up to its end is again what it was when the tag was checked.

    Args:
        envelope: the message.
        sender: who sent it, for errors.
        reached: h at the end of each span.
        hasher: for the words once more.
    """

    def __init__(
        self, envelope: Envelope, sender: str, reached: tuple[Tag, ...], hasher: Callable[[], WordHash]
    ) -> None:
        self.head = envelope.head
        self._words, self._sender, self._reached, self._hasher = envelope.words, sender, reached, hasher

    def spans(self) -> Iterator[Words]:
        """All words in their order, uint64 [chunks of a span, words of a chunk], which nobody else has.

        Raises:
            ProtocolError: they are not what they were.
        """
        hasher = self._hasher()
        for span, reached in zip(_copies(self._words, self.head.form, self._sender), self._reached, strict=True):
            hasher.take(span)
            if hasher.value() != reached:
                raise ProtocolError(self._sender, "tag", "words changed after they were authenticated")
            yield span

    @property
    def first(self) -> Words:
        """The first chunk, uint64 [1, words of a chunk]; raises as `spans`."""
        return next(self.spans())[:1]


class Authenticator:
    """Makes and checks tags of one suite in one key epoch.

    Args:
        key: 32 bytes that silos share and the server does not have, `GroupKey.derive` of `Purpose.TAG`.
        form: of the suite.
    """

    def __init__(self, key: bytes, form: Form) -> None:
        self._key = hmac.digest(key, b"fedsync tag 2\0" + bytes([form.code]), "sha256")
        self._form = form
        bits = _EXACT - _half_bits(form) - (form.words - 1).bit_length()
        shifts = range(0, form.modulus.bit_length(), bits)
        rho = np.stack([_uniform(self._derived(b"rho", check), form) for check in range(TAG_PARTS)], axis=1)
        cut = [(rho >> np.uint64(shift)) & np.uint64((1 << bits) - 1) for shift in shifts]
        self._pieces = np.stack(cut, axis=2).reshape(-1, _STRETCH, TAG_PARTS * len(cut)).astype(np.float64)
        self._weights = [1 << (_half_bits(form) * half + shift) for half in range(_HALVES) for shift in shifts]

    def hasher(self) -> WordHash:
        """For the words of one message."""
        return WordHash(self._form, self._pieces, self._weights, Keystream(self._derived(b"s")))

    def tag(self, hashed: Tag, head: Head) -> Tag:
        """Tag of an update.

        Args:
            hashed: `WordHash.value` of its words.
            head: of its message; the member has its digests by now.

        Raises:
            PolicyError: the member has no digest: one pad could hide two messages.
        """
        if head.members[0].digest == NO_DIGEST:
            raise PolicyError(f"{head.members[0].update_id} is to be tagged before its words have a digest")
        return added(hashed, self._pads(head), self._form)

    def check(self, hashed: Tag, head: Head, tag: Tag, sender: str) -> None:
        """Check the sum of tags against the words of a sum, before anything of it is opened.

        Args:
            hashed: `WordHash.value` of the words.
            head: of the sum; it names every member.
            tag: that came with it.
            sender: who sent it, for errors.

        Raises:
            ProtocolError: it is not the sum of what these members sealed.
        """
        expected = added(hashed, self._pads(head), self._form)
        if not hmac.compare_digest(_packed(expected), _packed(tag)):
            raise ProtocolError(sender, "tag", f"the sum is not that of the {len(head.members)} updates that are named")

    def authenticate(self, envelope: Envelope, sender: str) -> Authentic:
        """`check` a whole message.

        Raises:
            ProtocolError: as of `check`.
        """
        hasher, reached = self.hasher(), list[Tag]()
        for span in _copies(envelope.words, self._form, sender):
            hasher.take(span)
            reached.append(hasher.value())
        self.check(hasher.value(), envelope.head, envelope.tag, sender)
        return Authentic(envelope, sender, tuple(reached), self.hasher)

    def _pads(self, head: Head) -> Tag:
        """The sum of all members' pads."""
        total = [0] * TAG_PARTS
        key = self._derived(b"pad")
        for member in head.members:
            wide = hmac.digest(key, b"fedsync pad of a tag 1\0" + member_context(head, member), "sha512")
            for check in range(TAG_PARTS):
                # 256 bits make a number that is as good as uniform below the modulus.
                total[check] += int.from_bytes(wide[32 * check : 32 * check + 32], "little")
        return tuple(one % self._form.modulus for one in total)

    def _derived(self, use: bytes, check: int = 0) -> bytes:
        return hmac.digest(self._key, use + bytes([check]), "sha256")


def added(first: Tag, second: Tag, form: Form) -> Tag:
    """The tag of a sum of updates; needs no key."""
    return tuple((one + other) % form.modulus for one, other in zip(first, second, strict=True))


def _copies(words: Words, form: Form, sender: str) -> Iterator[Words]:
    """Words span by span, of a file that could change only before they are looked at."""
    adder = Adder(form)
    for start, stop in spans(len(words), form.chunk_bytes):
        span = words[start:stop].copy()
        give_back(words)
        adder.check(span, sender, start)
        yield span


def _half_bits(form: Form) -> int:
    """Bits of the lower half of a word."""
    return -(-form.modulus.bit_length() // _HALVES)


def _uniform(key: bytes, form: Form) -> Words:
    """A number below the modulus for each word of a chunk, uint64 [words]."""
    drawn = Keystream(key).words(form.words + _SPARE)
    np.bitwise_and(drawn, np.uint64((1 << form.modulus.bit_length()) - 1), out=drawn)
    return drawn[drawn < np.uint64(form.modulus)][: form.words]


def _packed(tag: Tag) -> bytes:
    return b"".join(one.to_bytes(8, "little") for one in tag)
