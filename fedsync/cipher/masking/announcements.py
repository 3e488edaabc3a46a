"""The server's book of what silos announced for masks, from which it makes rosters."""

from __future__ import annotations

from collections import Counter

from fedsync.cipher.masking.frames import pack_named
from fedsync.cipher.masking.mask_roster import RUN_BYTES


class Announcements:
    """Rosters, as silos send their announcements, leave and come back.

    Masks cancel between silos that were sent one roster. So it stays the same while a version lasts, also if a silo
    leaves. Who comes meanwhile is sent one that has it, cannot be added up with the others, and is in the next.

    Attributes:
        here: announcement of each silo that is here.
    """

    def __init__(self) -> None:
        self.here: dict[str, bytes] = {}
        self._fixed: dict[str, bytes] | None = None

    def put(self, silo: str, announcement: bytes) -> None:
        """The silo is here, and announces this; checked by `fedsync.cipher.masking.mask_roster.announced`."""
        self.here[silo] = announcement

    def leave(self, silo: str) -> None:
        """The silo is gone; until it comes again, no roster of a later version has it."""
        self.here.pop(silo, None)

    def renew(self) -> None:
        """There is a new version."""
        self._fixed = None

    def roster(self, silo: str) -> bytes:
        """What a silo is sent; see `fedsync.cipher.masking.mask_roster.MaskRoster`.

        Silos are in one run if they say so; who announces another than most do is left out.
        """
        if self._fixed is None:
            self._fixed = dict(self.here)
        same = self._fixed.get(silo) == self.here.get(silo)
        found = self._fixed if same else self.here
        runs = Counter(announcement[:RUN_BYTES] for announcement in found.values())
        run = max(sorted(runs), key=runs.__getitem__, default=b"")
        return pack_named({name: one for name, one in found.items() if one.startswith(run)})
