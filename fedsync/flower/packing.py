"""Payloads made ready for the wire, once for all silos that get the same."""

from __future__ import annotations

from fedsync.core.transfer import Payload
from fedsync.flower import payloads
from fedsync.flower.parcels import Parcel, ParcelStore

MOST_BYTES = 2**24
"""Payloads that are kept as they were packed; beside these the newest one, however large."""


class Packer:
    """Packs what a server or a relay sends.

    Silos that have missed other versions get other payloads, and ask in any order. So the newest few are kept.

    Args:
        parcels: what is left at the gate; None where there is none.
    """

    def __init__(self, parcels: ParcelStore | None) -> None:
        self._parcels = parcels
        self._packed: dict[tuple[int, bool], tuple[Payload, payloads.Packed]] = {}

    def pack(self, payload: Payload, *, fetches: bool) -> payloads.Packed:
        """A payload for the wire; where it is large, and its node ``fetches``, what it is called at the gate."""
        key = id(payload), fetches  # as long as it is kept nothing else has its number
        if key not in self._packed:
            parcel = None
            if fetches and self._parcels is not None and payload.nbytes > payloads.SMALL_BYTES:
                parcel = self._parcels.publish(payload)
            while self._packed and self._nbytes + payload.nbytes > MOST_BYTES:
                del self._packed[next(iter(self._packed))]
            self._packed[key] = payload, parcel or payloads.pack(payload)
        return self._packed[key][1]

    @property
    def digests(self) -> set[str]:
        """Names of the parcels that are kept at the gate for who comes next."""
        return {packed.digest for _, packed in self._packed.values() if isinstance(packed, Parcel)}

    @property
    def _nbytes(self) -> int:
        return sum(payload.nbytes for payload, _ in self._packed.values())
