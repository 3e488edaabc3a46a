"""Who is here and who is idle, without looking at everybody."""

from __future__ import annotations

from typing import Any

from fedsync.core.views import SiloView


class Roster(dict[str, SiloView]):
    """Name -> view, in order of joining; changed by ``roster[name] = view`` and ``pop`` only.

    Attributes:
        idle: name -> rank in the order of joining, of the silos without an order.
        revision: grows whenever a silo comes, goes, or gets new facts or a new forecast, different or not.
    """

    __slots__ = ("_joined", "_ranks", "idle", "revision")

    idle: dict[str, int]
    revision: int
    _ranks: dict[str, int]
    _joined: int

    def __new__(cls) -> Roster:
        """Empty. Not ``__init__``: unpickling fills a roster without calling that."""
        roster = super().__new__(cls)
        roster.idle, roster._ranks, roster._joined, roster.revision = {}, {}, 0, 0
        return roster

    def __setitem__(self, name: str, view: SiloView) -> None:
        before = self.get(name)
        if before is None:
            self._ranks[name] = self._joined
            self._joined += 1
            self.revision += 1
        elif before.forecast is not view.forecast or before.facts is not view.facts:
            self.revision += 1
        super().__setitem__(name, view)
        if view.order is None:
            self.idle[name] = self._ranks[name]
        else:
            self.idle.pop(name, None)

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a silo; returns its view, or ``default`` if it is not here."""
        if name in self:
            self.revision += 1
            del self._ranks[name]
            self.idle.pop(name, None)
        return super().pop(name, default)
