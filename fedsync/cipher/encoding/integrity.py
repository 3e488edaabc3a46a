"""Tags that add up like the updates: silos notice if the sum was changed.

Lattice ciphertexts are malleable: who adds the right words changes a sum by a known amount. So each silo sends with
its update x a *tag* of eight numbers modulo p = 2^64 - 59,

    tag_c = sum over blocks b of s_bc <r_c, x_b> + F_c(member)   (mod p),

where x_b are blocks of 4,096 slots, s_bc (64 bits), r_c (15 bits a slot) and the values of F come from a key that the
server does not have. The server adds tags. Silos compute the same of the opened sum; it fits only if the sum is
exactly that of the members named. F is fresh for every upload, for it depends on the nonce, so a tag tells nothing
and a replayed one does not fit. What is changed passes with probability below 2^-100, whatever is changed.

It protects against the server and the network, not against silos: those have the key.

Source: Agrawal and Boneh 2009, "Homomorphic MACs", section 3, for sums; r_c in few bits so that products of blocks
are exact in float64.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import numpy as np

from fedsync.cipher.encoding.packing import SLOTS, Slots
from fedsync.cipher.encoding.wire import TAG_MODULUS, TAG_PARTS, Tag
from fedsync.cipher.suites.pad import Keystream
from fedsync.cipher.suites.suite import Member
from fedsync.core.errors import ProtocolError

# Slots are cut to pieces of so many bits; 24 + 15 + 12 stay below the 53 that float64 adds exactly.
_PIECE = 24
_COEFFICIENT = 15
# Chunks that are worked on together.
_GROUP = 16


class Tagger:
    """Computes one tag from slots that come in order.

    Args:
        key: 32 bytes that the silos share and the server does not have.
        context: what all updates of a sum have in common, for example the grid; other contexts' tags do not fit.
    """

    def __init__(self, key: bytes, context: bytes = b"") -> None:
        self._key = hmac.digest(key, b"fedsync tag 1\0" + context, "sha256")
        width = SLOTS * TAG_PARTS
        drawn = Keystream(self._derived(b"r")).words(width // 4).view(np.uint16)
        self._coefficients = (drawn & ((1 << _COEFFICIENT) - 1)).astype(np.float64).reshape(SLOTS, TAG_PARTS)
        self._factors = Keystream(self._derived(b"s"))
        self._sums = [0] * TAG_PARTS

    def take(self, slots: Slots) -> None:
        """The next chunks, int64 [chunks, 4096]."""
        for first in range(0, len(slots), _GROUP):
            self._take(slots[first : first + _GROUP])

    def _take(self, slots: Slots) -> None:
        products = [0] * (len(slots) * TAG_PARTS)
        mask = np.int64((1 << _PIECE) - 1)
        bits = 1 + max(int(slots.max()).bit_length(), int(slots.min()).bit_length())
        pieces = -(-bits // _PIECE)
        for piece in range(pieces):
            cut = slots >> np.int64(_PIECE * piece)
            # All pieces but the highest are without a sign.
            if piece < pieces - 1:
                cut &= mask
            exact = (cut.astype(np.float64) @ self._coefficients).astype(np.int64)
            for index, value in enumerate(exact.reshape(-1).tolist()):
                products[index] += value << (_PIECE * piece)
        factors = self._factors.words(len(products)).tolist()
        for index, (product, factor) in enumerate(zip(products, factors, strict=True)):
            self._sums[index % TAG_PARTS] += product * factor

    def tag(self, member: Member) -> Tag:
        """Tag of an update, once all its slots were taken."""
        return tuple((one + blind) % TAG_MODULUS for one, blind in zip(self._sums, self._blinds(member), strict=True))

    def check(self, tag: Tag, members: Sequence[Member], sender: str) -> None:
        """Check the sum of tags against the sum of updates, whose slots were taken.

        Raises:
            ProtocolError: a contribution was changed, replayed, left out or added.
        """
        expected = list(self._sums)
        for member in members:
            for part, blind in enumerate(self._blinds(member)):
                expected[part] += blind
        if any((one - other) % TAG_MODULUS for one, other in zip(expected, tag, strict=True)):
            raise ProtocolError(sender, "tag", f"the sum is not that of the {len(members)} updates that are named")

    def _blinds(self, member: Member) -> list[int]:
        """F: a number for each part, nearly uniform modulo p."""
        name = member.update_id.encode()
        text = member.nonce + member.round.to_bytes(8, "little") + name
        wide = b"".join(self._derived(b"f" + bytes([part]) + text) for part in range(TAG_PARTS))
        return [int.from_bytes(wide[32 * part : 32 * part + 16], "little") % TAG_MODULUS for part in range(TAG_PARTS)]

    def _derived(self, info: bytes) -> bytes:
        return hmac.digest(self._key, info, "sha256")


def added(first: Tag, second: Tag) -> Tag:
    """The tag of a sum of updates; needs no key."""
    return tuple((one + other) % TAG_MODULUS for one, other in zip(first, second, strict=True))
