"""Who takes part in masks, under which keys: the *roster*.

For each run a silo makes an X25519 pair of its own and *announces* it: the public half, signed under its long-lived key
together with the run's digest. The server collects announcements and sends all of them, the roster, with each order.
Pair masks come from these pairs alone, so who gets hold of a silo's long-lived keys later finds no mask with them.

A server may send whatever roster it likes, but

- it cannot write an announcement: each is signed by a silo that the administrator gave a key;
- it cannot use one of another run: the signature is over the run's digest;
- a silo that finds another key than its own under its name takes no part, and of too few none signs a list;
- the roster's digest is in the context of masks: between silos that were sent different rosters no mask cancels.

The *threshold* t of n silos against a server that has k of them on its side: 2 t > n + k, and t <= n. Then there
cannot be two lists of survivors with t signatures each: honest silos sign one list, the k sign both, so there would be
2 t <= (n - k) + 2 k signatures at most. And k silos have fewer than t shares.

Source: Bonawitz et al. 2017, section 6.2 (the active adversary), theorem 6.5.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedsync.cipher.keys.material import KEY_BYTES, SIGNATURE_BYTES, PublicKeys, SiloKeys, is_signed
from fedsync.cipher.masking.frames import pack_named, unpack_named
from fedsync.common.errors import SERVER, ProtocolError

RUN_BYTES = 32
ANNOUNCEMENT_BYTES = RUN_BYTES + KEY_BYTES + SIGNATURE_BYTES
_SIGNED = b"mask announcement 1"


def least_survivors(colluding: int) -> int:
    """Silos that a sum must have: with two honest ones, neither is told from the other."""
    return colluding + 2


def threshold(silos: int, colluding: int) -> int:
    """Signatures that a list needs, and shares that a seed needs.

    Args:
        silos: n, of the roster.
        colluding: k, of them, on the server's side.
    """
    return (silos + colluding) // 2 + 1


def fresh_pair(own: SiloKeys, exchange: bytes | None = None) -> SiloKeys:
    """A silo's keys with a pair for one run in the place of its long-lived X25519 pair.

    Args:
        own: the long-lived keys.
        exchange: the private half, 32 bytes; None draws it.
    """
    return replace(own, exchange=exchange or secrets.token_bytes(KEY_BYTES))


def announce(pair: SiloKeys, run: bytes) -> bytes:
    """What a silo announces, 128 bytes: the run's digest, the public half of its pair, and the signature.

    Args:
        pair: from `fresh_pair`.
        run: the run's digest.
    """
    text = run + pair.public.exchange
    return text + pair.sign(_SIGNED, text)


def announced(announcement: bytes, signing: bytes, sender: str) -> tuple[bytes, PublicKeys]:
    """The run's digest and the keys in an announcement.

    Args:
        announcement: as `announce` made it.
        signing: the silo's Ed25519 key.
        sender: who sent it, for errors.

    Raises:
        ProtocolError: it is not the silo's.
    """
    text, signature = announcement[:-SIGNATURE_BYTES], announcement[-SIGNATURE_BYTES:]
    if len(announcement) != ANNOUNCEMENT_BYTES or not is_signed(signing, _SIGNED, text, signature):
        raise ProtocolError(sender, "announcement", "the key for masks is not signed by its silo")
    keys = PublicKeys(text[RUN_BYTES:], signing)
    if not keys.usable:
        raise ProtocolError(sender, "announcement", "no secret can be agreed on with the key for masks")
    return text[:RUN_BYTES], keys


@dataclass(frozen=True, slots=True)
class MaskRoster:
    """Who takes part.

    Args:
        keys: by name: the run's X25519 key, the long-lived Ed25519 key.
        colluding: k.
        digest: SHA-256 of the announcements.
    """

    keys: Mapping[str, PublicKeys]
    colluding: int
    digest: bytes = field(repr=False)

    @property
    def threshold(self) -> int:
        return threshold(len(self.keys), self.colluding)

    @property
    def least(self) -> int:
        return least_survivors(self.colluding)

    @classmethod
    def read(cls, data: bytes, members: Mapping[str, PublicKeys], run: bytes, colluding: int) -> MaskRoster:
        """A roster that the server sent.

        Args:
            data: announcements, by name; see `fedsync.cipher.masking.frames`.
            members: the long-lived keys of all silos that the administrator knows.
            run: the run's digest.
            colluding: k.

        Raises:
            ProtocolError: an announcement is nobody's, or not of this run.
        """
        announcements = unpack_named(data, SERVER, ANNOUNCEMENT_BYTES)
        unknown = announcements.keys() - members.keys()
        if unknown:
            raise ProtocolError(SERVER, "roster", f"{len(unknown)} silos that have no key")
        found = {name: announced(one, members[name].signing, SERVER) for name, one in announcements.items()}
        if any(other != run for other, _ in found.values()):
            raise ProtocolError(SERVER, "roster", "a silo announced its key for another run")
        keys = {name: one for name, (_, one) in found.items()}
        return cls(keys, colluding, hashlib.sha256(pack_named(announcements)).digest())
