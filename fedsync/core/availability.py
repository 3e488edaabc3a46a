"""Silos with a window of each day: which of them are away, and which have no time left for another order.

A silo says how long it is still there when it joins and with each update (`fedsync.core.silo_presence.Presence`). Here that
becomes times on the run's own clock. A silo without a window is in no table and costs nothing.

| a silo with a window | barriers | its order |
|---|---|---|
| within it | see it | any, if it can be answered in time by what is predicted |
| within it, idle, and an order takes longer than is left | do not see it | it gets none |
| its window is over, at work | do not see it: nobody waits for it | goes on, and counts unless a commit was first |
| its window is over, idle | do not see it | it gets none |
| signed off | as any that was lost | |
| the next window has begun, and it is here | see it | as within it |

Being away is no failure: what it answers AWAY to is not counted. While a silo is expected back the run waits, also
with nobody there, and the journal says for whom.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import ClassVar

from fedsync.core.events import UpdateArrived, WorkFailed
from fedsync.core.extension import Extension
from fedsync.core.orders import SiloFacts, WorkOrder
from fedsync.core.silo_presence import MAX_AWAY_S, Presence
from fedsync.core.views import ClusterView, SiloView

REST_S = 10.0
"""A silo that says that it is away is left alone for so long at least [s], whatever it says."""

_SLACK_S = 1.0
"""A silo that is lost so shortly before its window ends has gone home [s]."""

_MOST_NAMED = 5


@dataclass(slots=True)
class Attendance(Extension):
    """Availability windows of part-time silos; an extension of the coordinator once a silo has such a window.

    Args:
        windows: name -> when its window ends and when the next one begins, in seconds since the run began.
        told: silos that the journal was last told of, which barriers do not see.
        awaited: whether a silo was away, and expected back, when that was last looked at.
    """

    name: ClassVar[str] = "attendance"
    windows: dict[str, tuple[float, float]] = field(default_factory=dict)
    told: tuple[str, ...] = ()
    awaited: bool = False

    @property
    def expects(self) -> bool:
        return self.awaited

    def takes(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        self.hear(event.meta.silo, event.at_s, event.report.presence)
        if order.base_version != version and self.away(event.meta.silo, event.at_s):
            return "its silo's window was over, and the model has moved on"
        return None

    def hear(self, name: str, at_s: float, said: Presence | None) -> None:
        """A silo says how long it is there; None says nothing new."""
        if said is not None:
            self.windows[name] = at_s + said.left_s, at_s + said.back_s

    def on_join(self, name: str, facts: SiloFacts, at_s: float) -> None:
        """A silo has joined; without a window it is there always."""
        self.windows.pop(name, None)
        self.hear(name, at_s, facts.presence)

    def on_loss(self, name: str, at_s: float) -> None:
        """A silo is gone. Within its window that has other reasons, so nobody knows when it will be back."""
        if at_s < self.windows.get(name, (-inf, inf))[0] - _SLACK_S:
            del self.windows[name]

    def excuses(self, event: WorkFailed) -> bool:
        """Whether a silo did not take an order because it is away, which is no failure."""
        at_s, back_s = event.at_s, event.back_s
        if back_s is None or not 0 <= back_s <= MAX_AWAY_S:
            return False
        self.windows[event.silo] = at_s, at_s + max(back_s, REST_S)
        return True

    def forget(self, name: str) -> Presence | None:
        """A silo's window on the run's clock, which nobody waits for any more; None if it has none."""
        window = self.windows.pop(name, None)
        return None if window is None else Presence(*window)

    def away(self, name: str, now_s: float) -> bool:
        """Whether its window is over, and the next one has not begun."""
        until_s, back_s = self.windows.get(name, (inf, inf))
        return until_s <= now_s < back_s

    def wake_s(self, now_s: float) -> float | None:
        """When the next window ends or begins; None if none does."""
        return min((at_s for window in self.windows.values() for at_s in window if at_s > now_s), default=None)

    def shows(self, view: ClusterView) -> tuple[ClusterView, str]:
        """What barriers see, and what is to be said of it: O(silos with a window), and O(n) once one is not seen."""
        if not self.windows:
            return view, ""
        view = replace(view, windows=self.windows)
        unseen: dict[str, str] = {}
        for name in self.windows:
            silo = view.silos.get(name)
            if silo is not None and (why := self._unseen(name, silo, view)):
                unseen[name] = why
        self.awaited = any(self.away(name, view.now_s) for name in self.windows)
        silos = {name: silo for name, silo in view.silos.items() if name not in unseen} if unseen else view.silos
        said = "; ".join([*list(unseen.values())[:_MOST_NAMED], *([] if silos else self._expected(view.now_s))])
        if tuple(unseen) == self.told and silos:
            said = ""
        self.told = tuple(unseen)
        return (replace(view, silos=silos, index=None) if unseen else view), said

    def _unseen(self, name: str, silo: SiloView, view: ClusterView) -> str:
        """Why barriers do not see a silo; empty if they do."""
        until_s, back_s = self.windows[name]
        if self.away(name, view.now_s):
            return f"{name} is away for {back_s - view.now_s:.0f} s"
        if silo.order is None and not view.has_time(name):
            left_s, needs_s = until_s - view.now_s, silo.order_s(view.work[name]) or 0.0
            return f"{name} gets no order: one takes {needs_s:.0f} s, and its window ends in {left_s:.0f} s"
        return ""

    def _expected(self, now_s: float) -> list[str]:
        """Nobody is to be seen: who is the first to be back, and when."""
        back = [(back_s, name) for name, (_, back_s) in self.windows.items() if self.away(name, now_s)]
        if not back:
            return []
        back_s, name = min(back)
        return [f"the run waits: {name} is the first to be back, in {back_s - now_s:.0f} s"]
