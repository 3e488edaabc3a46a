"""Roster of a run's silos, with indexes of idle and changed silos, so that no lookup scans all silos."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fedsync.core.views import SiloView

_set_item = dict[str, SiloView].__setitem__
_SPARE_NEWS = 1000


class Roster(dict[str, SiloView]):
    """Name -> view, in order of joining; change it only by ``roster[name] = view`` and ``pop``. A `views.Index`.

    Attributes:
        idle: name -> rank in the order of joining, for silos without an order.
        revision: counter of joins, leaves, and assignments of facts or forecasts (changed or equal).
        news: counter of joins, leaves and finished orders.
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
                self._tell(name)  # an order ended, and the silo continues with its next order

    def pop(self, name: str, default: Any = None) -> Any:
        if name in self:
            self.revision += 1
            self._names = None
            del self._ranks[name]
            self.idle.pop(name, None)
            self._tell(name)
        return super().pop(name, default)

    @property
    def views(self) -> dict[str, SiloView]:
        """Name -> view as a plain dictionary. Set it together with the counters when restoring a checkpoint."""
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
        """Return silos that joined, left or ended an order since ``news``, may repeat; None if ``news`` is too old."""
        since = len(self._news) - (self.news - news)
        return self._news[since:] if since >= 0 else None

    def _tell(self, name: str) -> None:
        self.news += 1
        self._news.append(name)
        if len(self._news) > 2 * len(self) + _SPARE_NEWS:
            del self._news[: len(self._news) // 2]
