"""Availability windows of part-time silos: barriers do not see a silo that is away or has too little time left.

A silo reports its remaining time when it joins and with each update (`fedsync.core.orders.Presence`). This module
converts the durations to times on the run's clock. Silos without a window are not tracked.

| a silo with a window | barriers | its order |
|---|---|---|
| inside its window | see it | any order that it is predicted to finish in time |
| inside, idle, and an order takes longer than the time left | do not see it | none |
| window over, busy | do not see it, so no barrier waits for it | goes on; counts unless a commit came first |
| window over, idle | do not see it | none |
| disconnected | handled like any lost silo | |
| next window has begun, and the silo is connected | see it | as inside its window |

An order answered with AWAY does not count as failed. While a silo is expected back, the run waits, even with no silo
present. The journal names the silo.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

from fedsync.core.events import UpdateArrived, WorkFailed
from fedsync.core.extension import Extension
from fedsync.core.orders import MAX_AWAY_S, Presence, SiloFacts, WorkOrder
from fedsync.core.views import ClusterView, SiloView

REST_S = 10.0
"""Minimum pause after a silo reports that it is away [s], whatever return time it reports."""

_SLACK_S = 1.0
"""A silo lost less than this before the end of its window [s] counts as away, not as lost."""

_MOST_NAMED = 5


@dataclass(slots=True)
class Attendance(Extension):
    """Availability windows of part-time silos: an extension of the coordinator once a silo has a window.

    Args:
        windows: name -> end of the current window and start of the next one, in seconds since the run began.
        told: silos hidden from barriers, as last written to the journal.
        hidden: name -> id of the order in work while the silo was hidden.
        awaited: whether a silo was away and expected back at the last check.
    """

    name: ClassVar[str] = "attendance"
    windows: dict[str, tuple[float, float]] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    hidden: dict[str, str] = field(default_factory=dict)
    awaited: bool = False

    @property
    def expects(self) -> bool:
        return self.awaited

    def takes(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        name = event.meta.silo
        self.hear(name, event.at_s, event.report.presence)
        was_away = self.away(name, event.at_s) or self.hidden.get(name) == order.update_id
        if order.base_version != version and was_away:
            return "its silo's window was over, and the model has moved on"
        return None

    def hear(self, name: str, at_s: float, said: Presence | None) -> None:
        if said is not None:
            self.windows[name] = at_s + said.left_s, at_s + said.back_s

    def on_join(self, name: str, facts: SiloFacts, at_s: float) -> None:
        self.windows.pop(name, None)
        self.hear(name, at_s, facts.presence)

    def on_loss(self, name: str, at_s: float) -> None:
        """Forget the window of a silo lost inside it: its return time is unknown."""
        if at_s < self.windows.get(name, (-inf, inf))[0] - _SLACK_S:
            del self.windows[name]

    def excuses(self, event: WorkFailed) -> bool:
        at_s, back_s = event.at_s, event.back_s
        if back_s is None or not 0 <= back_s <= MAX_AWAY_S:
            return False
        self.windows[event.silo] = at_s, at_s + max(back_s, REST_S)
        return True

    def forget(self, name: str) -> Presence | None:
        window = self.windows.pop(name, None)
        return None if window is None else Presence(*window)

    def away(self, name: str, now_s: float) -> bool:
        until_s, back_s = self.windows.get(name, (inf, inf))
        return until_s <= now_s < back_s

    def wake_s(self, now_s: float) -> float | None:
        return min((at_s for window in self.windows.values() for at_s in window if at_s > now_s), default=None)

    def shows(self, view: ClusterView) -> tuple[ClusterView, str]:
        """Return the view for barriers and a journal message; O(silos with a window), O(n) once a silo is hidden."""
        if not self.windows:
            self.awaited = False
            return view, ""
        view = replace(view, windows=self.windows)
        unseen: dict[str, str] = {}
        for name in self.windows:
            silo = view.silos.get(name)
            if silo is not None and (why := self._unseen(name, silo, view)):
                unseen[name] = why
                if silo.order is not None:
                    self.hidden[name] = silo.order.update_id
        self.awaited = any(self.away(name, view.now_s) for name in self.windows)
        silos = {name: silo for name, silo in view.silos.items() if name not in unseen} if unseen else view.silos
        said = "; ".join([*list(unseen.values())[:_MOST_NAMED], *([] if silos else self._expected(view.now_s))])
        if tuple(unseen) == self.told and silos:
            said = ""
        self.told = tuple(unseen)
        return (replace(view, silos=silos, index=None) if unseen else view), said

    def _unseen(self, name: str, silo: SiloView, view: ClusterView) -> str:
        until_s, back_s = self.windows[name]
        if self.away(name, view.now_s):
            return f"{name} is away for {back_s - view.now_s:.0f} s"
        if silo.order is None and not view.has_time(name):
            left_s, needs_s = until_s - view.now_s, silo.order_s(view.work[name]) or 0.0
            return f"{name} gets no order: one takes {needs_s:.0f} s, and its window ends in {left_s:.0f} s"
        return ""

    def _expected(self, now_s: float) -> list[str]:
        back = [(back_s, name) for name, (_, back_s) in self.windows.items() if self.away(name, now_s)]
        if not back:
            return []
        back_s, name = min(back)
        return [f"the run waits: {name} is the first to be back, in {back_s - now_s:.0f} s"]
