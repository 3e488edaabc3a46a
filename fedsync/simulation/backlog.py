"""Queues of orders (training requests) at simulated machines: one order at a time, first come, first served.

A queued order begins when training of the previous order ends; it does not wait for overhead and upload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedsync.core.orders import WorkOrder
from fedsync.core.speed.curve import steps_within
from fedsync.model.transfer import Payload
from fedsync.simulation.machine import Course, Machine


@dataclass(slots=True, eq=False)
class OrderInWork:
    """Order at a machine, in work or queued. While it is queued, ``start_s`` is the earliest start, and ``course``, the
    end times of its steps, is None.
    """

    silo: str
    order: WorkOrder
    received: Payload
    start_s: float
    course: Course | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """Event: the previous order is trained, so a queued order can begin unless it has begun already."""

    work: OrderInWork
    at_s: float


class Backlog:
    """Order queues of all machines. ``after_s`` returns the seconds from the end of a silo's training to the arrival of
    its update. ``push`` schedules a call of `turn` or `sent` with this argument at this time.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        after_s: Callable[[str], float],
        push: Callable[[float, OrderInWork | Turn], None],
    ) -> None:
        self._machines = machines
        self._after_s = after_s
        self._push = push
        self._works: dict[str, list[OrderInWork]] = {}

    def __bool__(self) -> bool:
        return bool(self._works)

    def newest(self, silo: str) -> WorkOrder | None:
        works = self._works.get(silo)
        return works[-1].order if works else None

    def begun(self, silo: str, update_id: str) -> tuple[OrderInWork, Course] | None:
        """Return an order whose update has not arrived, and its course; None if it is unknown or still queued."""
        for work in self._works.get(silo, []):
            if work.order.update_id == update_id and work.course is not None:
                return work, work.course
        return None

    def add(self, work: OrderInWork) -> None:
        self._works.setdefault(work.silo, []).append(work)
        self._queue(work)

    def turn(self, turn: Turn) -> None:
        if turn.work in self._works.get(turn.work.silo, []) and turn.work.course is None:
            self._train(turn.work, turn.at_s)

    def sent(self, work: OrderInWork) -> bool:
        """Remove an order whose update has arrived; False if the event is void: the order was cut short or is gone."""
        works = self._works.get(work.silo, [])
        if work not in works:
            return False
        works.remove(work)
        if not works:
            del self._works[work.silo]
        return True

    def lose(self, silo: str) -> None:
        self._works.pop(silo, None)

    def halt(self, silo: str, update_id: str, heard_s: float) -> None:
        begun = self.begun(silo, update_id)
        if begun is None:
            return
        work, course = begun
        steps = int(np.searchsorted(course.ends, heard_s, side="left")) + 1
        if steps < len(course.after_s):
            works = self._works[silo]
            # A new object: the event that is scheduled for the old one becomes void.
            cut = works[works.index(work)] = replace(work)
            self._schedule(cut, course.cut(steps))
            for other in works:
                if other.course is None:
                    self._queue(other)

    def _queue(self, work: OrderInWork) -> None:
        works = self._works[work.silo]
        place = works.index(work)
        before = works[place - 1].course if place else None
        if before is None or before.last_s <= work.start_s:
            self._train(work, work.start_s)
        else:
            self._push(before.last_s, Turn(work, before.last_s))

    def _train(self, work: OrderInWork, start_s: float) -> None:
        order, work.start_s = work.order, start_s
        course = self._machines[work.silo].course(order, start_s)
        if order.budget_s is not None:
            seconds = np.diff(course.ends, prepend=start_s)
            course = course.cut(steps_within(seconds, order.budget_s, order.overrun))
        self._schedule(work, course)

    def _schedule(self, work: OrderInWork, course: Course) -> None:
        work.course = course
        self._push(course.last_s + self._after_s(work.silo), work)
