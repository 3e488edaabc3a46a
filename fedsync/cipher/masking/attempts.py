"""Server's count of attempts at one version under masks.

A silo's masks of one attempt blind one update only. All updates in a sum belong to one attempt. A failed order is
therefore first repeated in the same attempt, which helps wherever the silo failed before it sealed. After a second
failure, the silo may have sealed already and refuse for that reason. The silo then continues in a separate attempt,
whose update no sum needs. It takes part again from the next version on.
"""

from __future__ import annotations

import secrets

_SAME = 2

_ATTEMPTS = 2**31


class Attempts:
    """Attempt numbers of the silos' next updates."""

    def __init__(self) -> None:
        self._version = 0
        self._first = 0
        self._orders: dict[str, int] = {}

    def begin(self, silo: str, version: int) -> int:
        """Count an order that starts from ``version``, and return its attempt."""
        if version != self._version:
            self._version, self._first, self._orders = version, 0, {}
        self._orders[silo] = self._orders.get(silo, 0) + 1
        return self.of(silo, version)

    def of(self, silo: str, version: int) -> int:
        """Attempt of the silo's newest order; 0 where no order began with this version."""
        if version != self._version:
            return 0
        return self._first + max(0, self._orders.get(silo, 0) - _SAME)

    def restart(self, version: int) -> None:
        """Continue from ``version`` in another process, with unused attempts: not all earlier orders are known."""
        self._version, self._first, self._orders = version, secrets.randbelow(_ATTEMPTS), {}
