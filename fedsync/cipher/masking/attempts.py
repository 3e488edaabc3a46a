"""The server's count of attempts at one version under masks.

A silo's masks of one attempt are good for one update. All that is in a sum belongs to one attempt, so an order that
failed is first repeated in the same: that is of use wherever the silo failed before it sealed. If it fails again, the
silo has perhaps sealed and refuses for that reason; then it goes on in an attempt of its own, whose update no sum
needs, and takes part again from the next version on.
"""

from __future__ import annotations

import secrets

_SAME = 2
"""Orders of one silo that belong to one attempt."""

_ATTEMPTS = 2**31


class Attempts:
    """Which attempt each silo's next update belongs to."""

    def __init__(self) -> None:
        self._version = 0
        self._first = 0
        self._orders: dict[str, int] = {}

    def begin(self, silo: str, version: int) -> int:
        """The attempt of an order that starts from ``version``."""
        if version != self._version:
            self._version, self._first, self._orders = version, 0, {}
        self._orders[silo] = self._orders.get(silo, 0) + 1
        return self.of(silo, version)

    def of(self, silo: str, version: int) -> int:
        """The attempt of the silo's newest order; the first there is where none began with this version."""
        if version != self._version:
            return 0
        return self._first + max(0, self._orders.get(silo, 0) - _SAME)

    def restart(self, version: int) -> None:
        """Another process goes on from ``version``, and does not know all that was ordered: it begins attempts like
        none before."""
        self._version, self._first, self._orders = version, secrets.randbelow(_ATTEMPTS), {}
