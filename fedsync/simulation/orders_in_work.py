"""Orders (training requests) in work at simulated machines: one order at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedsync.core.orders import WorkOrder
from fedsync.core.speed.curve import steps_within
from fedsync.model.transfer import Payload
from fedsync.simulation.machine import Course, Machine


@dataclass(frozen=True, slots=True, eq=False)
class OrderInWork:
    """Order at a machine; its training begins at ``start_s``, and ``course`` has the end times of its steps."""

    silo: str
    order: WorkOrder
    received: Payload
    start_s: float
    course: Course


class OrdersInWork:
    """Orders in work, by silo. ``after_s`` returns the seconds from the end of a silo's training to the arrival of its
    update. ``push`` schedules a call of `sent` with this argument at this time.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        after_s: Callable[[str], float],
        push: Callable[[float, OrderInWork], None],
    ) -> None:
        self._machines = machines
        self._after_s = after_s
        self._push = push
        self._works: dict[str, OrderInWork] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def __contains__(self, silo: str) -> bool:
        return silo in self._works

    def find(self, silo: str, update_id: str) -> OrderInWork | None:
        """Return an order whose update has not arrived; None if it is unknown."""
        work = self._works.get(silo)
        return work if work is not None and work.order.update_id == update_id else None

    def add(self, silo: str, order: WorkOrder, received: Payload, start_s: float) -> None:
        course = self._machines[silo].course(order, start_s)
        if order.budget_s is not None:
            seconds = np.diff(course.ends, prepend=start_s)
            course = course.cut(steps_within(seconds, order.budget_s, order.overrun))
        self._schedule(OrderInWork(silo, order, received, start_s, course))

    def sent(self, work: OrderInWork) -> bool:
        """Remove an order whose update has arrived; False if the event is void: the order was cut short or is gone."""
        if self._works.get(work.silo) is not work:
            return False
        del self._works[work.silo]
        return True

    def lose(self, silo: str) -> None:
        self._works.pop(silo, None)

    def halt(self, silo: str, update_id: str, heard_s: float) -> None:
        work = self.find(silo, update_id)
        if work is None:
            return
        steps = int(np.searchsorted(work.course.ends, heard_s, side="left")) + 1
        if steps < len(work.course.after_s):
            # A new object: the event that is scheduled for the old one becomes void.
            self._schedule(replace(work, course=work.course.cut(steps)))

    def _schedule(self, work: OrderInWork) -> None:
        self._works[work.silo] = work
        self._push(work.course.last_s + self._after_s(work.silo), work)
