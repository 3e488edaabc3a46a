"""Server's collection of announcements for masks, from which it makes rosters."""

from __future__ import annotations

from collections import Counter

from fedsync.cipher.masking.frames import pack_named
from fedsync.cipher.masking.mask_roster import RUN_BYTES


class Announcements:
    """Rosters of silos that announce, leave and return.

    Masks cancel only between silos that were sent the same roster. The roster therefore stays fixed for the duration of
    a version, also if a silo leaves. A silo that joins meanwhile gets a roster that includes it. Its update cannot be
    added to the others. It is part of the next version's roster.

    Attributes:
        here: announcement of each present silo.
    """

    def __init__(self) -> None:
        self.here: dict[str, bytes] = {}
        self._fixed: dict[str, bytes] | None = None

    def put(self, silo: str, announcement: bytes) -> None:
        """Record a present silo's announcement, checked by `fedsync.cipher.masking.mask_roster.announced`."""
        self.here[silo] = announcement

    def leave(self, silo: str) -> None:
        """Remove a silo that left from the rosters of later versions, until it returns."""
        self.here.pop(silo, None)

    def renew(self) -> None:
        self._fixed = None

    def roster(self, silo: str) -> bytes:
        """Roster to send to a silo; see `fedsync.cipher.masking.mask_roster.MaskRoster`.

        Silos state their run. Silos that announce another run than most silos are left out.
        """
        if self._fixed is None:
            self._fixed = dict(self.here)
        same = self._fixed.get(silo) == self.here.get(silo)
        found = self._fixed if same else self.here
        runs = Counter(announcement[:RUN_BYTES] for announcement in found.values())
        run = max(sorted(runs), key=runs.__getitem__, default=b"")
        return pack_named({name: one for name, one in found.items() if one.startswith(run)})
