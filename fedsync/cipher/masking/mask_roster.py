"""Roster: the list of silos that mask their updates in a run, with their public keys.

For each run a silo makes a fresh X25519 pair and *announces* it: the public half and the run's digest, signed together
under its long-lived key. The server collects announcements and sends all of them, the roster, with each order. Pair
masks follow only from these key pairs, so long-lived keys disclose no mask afterwards. A silo takes no part if the
roster has another key under the silo's name. Masks depend on the roster's digest, so masks of silos with different
rosters do not cancel.

Of n silos, k may collude with the server. The *threshold* t satisfies 2 t > n + k and t <= n. After a silo is lost, the
other silos sign the list of the remaining silos, and t signatures are needed. Two different lists cannot both get t
signatures: honest silos sign one list and the k silos sign both, which gives at most (n - k) + 2 k = n + k signatures.
The k silos also have fewer than t shares.

Source: Bonawitz et al. 2017, section 6.2 (the active adversary), theorem 6.5.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedsync.cipher.encoding.fields import pack_named, unpack_named
from fedsync.cipher.keys.material import KEY_BYTES, SIGNATURE_BYTES, PublicKeys, SiloKeys, is_signed
from fedsync.common.errors import SERVER, ProtocolError

RUN_BYTES = 32
ANNOUNCEMENT_BYTES = RUN_BYTES + KEY_BYTES + SIGNATURE_BYTES
_SIGNED = b"mask announcement 1"


def least_survivors(colluding: int) -> int:
    """Number of silos that a sum needs: the colluding silos, and two honest silos that hide each other's updates."""
    return colluding + 2


def threshold(silos: int, colluding: int) -> int:
    return (silos + colluding) // 2 + 1


def fresh_pair(own: SiloKeys, exchange: bytes | None = None) -> SiloKeys:
    """Replace a silo's long-lived X25519 pair by a pair for one run; ``exchange`` None draws the private half."""
    return replace(own, exchange=exchange or secrets.token_bytes(KEY_BYTES))


def announce(pair: SiloKeys, run: bytes) -> bytes:
    """Make an announcement, 128 bytes: run digest, public half of the `fresh_pair`, and signature."""
    text = run + pair.public.exchange
    return text + pair.sign(_SIGNED, text)


def announced(announcement: bytes, signing: bytes, sender: str) -> tuple[bytes, PublicKeys]:
    """Return run digest and keys of an announcement; `ProtocolError` if not signed by ``signing``, or not usable."""
    text, signature = announcement[:-SIGNATURE_BYTES], announcement[-SIGNATURE_BYTES:]
    if len(announcement) != ANNOUNCEMENT_BYTES or not is_signed(signing, _SIGNED, text, signature):
        raise ProtocolError(sender, "announcement", "the key for masks is not signed by its silo")
    keys = PublicKeys(text[RUN_BYTES:], signing)
    if not keys.usable:
        raise ProtocolError(sender, "announcement", "the key for masks is invalid: no shared secret can be computed")
    return text[:RUN_BYTES], keys


@dataclass(frozen=True, slots=True)
class MaskRoster:
    """Silos that take part in masks: for each, the run's X25519 key and the long-lived Ed25519 key. ``colluding`` is k;
    ``digest`` is the SHA-256 of the announcements. Silos unmask no sum of fewer than ``fewest`` silos.
    """

    keys: Mapping[str, PublicKeys]
    colluding: int
    digest: bytes = field(repr=False)
    fewest: int = 1

    @property
    def threshold(self) -> int:
        return threshold(len(self.keys), self.colluding)

    @property
    def least(self) -> int:
        return max(self.fewest, least_survivors(self.colluding))

    @classmethod
    def read(
        cls, data: bytes, members: Mapping[str, PublicKeys], run: bytes, colluding: int, fewest: int = 1
    ) -> MaskRoster:
        """Read the announcements by name that the server sent; ``members`` are all silos' long-lived keys. Raise
        `ProtocolError` if an announcement is of an unknown silo, is invalid, or is of another run.
        """
        announcements = unpack_named(data, SERVER, ANNOUNCEMENT_BYTES)
        unknown = announcements.keys() - members.keys()
        if unknown:
            raise ProtocolError(SERVER, "roster", f"{len(unknown)} silos that have no key")
        found = {name: announced(one, members[name].signing, SERVER) for name, one in announcements.items()}
        if any(other != run for other, _ in found.values()):
            raise ProtocolError(SERVER, "roster", "a silo announced its key for another run")
        keys = {name: one for name, (_, one) in found.items()}
        return cls(keys, colluding, hashlib.sha256(pack_named(announcements)).digest(), fewest)
