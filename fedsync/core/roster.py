"""The silos of a run: which are here, which are idle and what has changed, without a look at each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedsync.core.views import SiloView

_set_item = dict[str, SiloView].__setitem__
_SPARE_NEWS = 1000


class Roster(dict[str, SiloView]):
    """Name -> view, in order of joining; changed by ``roster[name] = view`` and ``pop`` only. A `views.Index`.

    Attributes:
        idle: name -> rank in the order of joining, of the silos without an order.
        revision: grows whenever a silo comes, goes, or gets new facts or a new forecast, different or not.
        news: grows whenever a silo comes, goes, or ends an order.
    """

    __slots__ = ("_joined", "_names", "_news", "_ranks", "idle", "news", "revision")

    idle: dict[str, int]
    revision: int
    news: int
    _ranks: dict[str, int]
    _joined: int
    _names: tuple[str, ...] | None
    _news: list[str]

    def __init__(self) -> None:
        self.idle, self._ranks, self._joined, self.revision = {}, {}, 0, 0
        self._names, self._news, self.news = None, [], 0

    def __setitem__(self, name: str, view: SiloView) -> None:
        before = self.get(name)
        if before is None:
            self._ranks[name] = self._joined
            self._joined += 1
            self._names = None
            self.revision += 1
        elif before.forecast is not view.forecast or before.facts is not view.facts:
            self.revision += 1
        _set_item(self, name, view)
        if view.order is None:
            self.idle[name] = self._ranks[name]
            self._tell(name)
        else:
            self.idle.pop(name, None)
            if before is not None and before.order is not None and before.order is not view.order:
                self._tell(name)  # it has ended one, and gone on with the next

    def pop(self, name: str, default: Any = None) -> Any:
        """Remove a silo; returns its view, or ``default`` if it is not here."""
        if name in self:
            self.revision += 1
            self._names = None
            del self._ranks[name]
            self.idle.pop(name, None)
            self._tell(name)
        return super().pop(name, default)

    @property
    def views(self) -> dict[str, SiloView]:
        """Name -> view as a plain dictionary; set it together with the counters, to go on from a checkpoint."""
        return dict(self)

    @views.setter
    def views(self, views: Mapping[str, SiloView]) -> None:
        self.clear()
        self.update(views)
        self._names = None

    @property
    def names(self) -> Sequence[str]:
        if self._names is None:
            self._names = tuple(self)
        return self._names

    def changed_since(self, news: int) -> Collection[str] | None:
        """Names of the silos that have come, gone or ended an order since ``news`` was what it says, perhaps twice.

        None if that is too long ago to be known.
        """
        since = len(self._news) - (self.news - news)
        return self._news[since:] if since >= 0 else None

    def _tell(self, name: str) -> None:
        self.news += 1
        self._news.append(name)
        if len(self._news) > 2 * len(self) + _SPARE_NEWS:
            del self._news[: len(self._news) // 2]
