"""The orders that simulated machines have: a machine trains one at a time, in the order in which they came.

It begins a queued order when it has trained the one before. What that one costs besides training, and its way to the
server, pass meanwhile: neither takes the machine from training, nor the line from another message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from fedsync.core.orders import WorkOrder
from fedsync.core.speed.curve import steps_within
from fedsync.model.transfer import Payload
from fedsync.simulation.machines import Course, TimedMachine


@dataclass(slots=True, eq=False)
class OrderInWork:
    """An order at a machine, in work or queued there.

    Args:
        silo: whose machine it is.
        order: what it is to do.
        received: what came with it.
        start_s: when it can begin, or began.
        course: when its steps end; None as long as it waits for another.
    """

    silo: str
    order: WorkOrder
    received: Payload
    start_s: float
    course: Course | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """The order before is trained: one that waits can begin, unless it has begun since."""

    work: OrderInWork
    at_s: float


class Backlog:
    """Of all machines.

    Args:
        machines: by silo.
        after_s: seconds from the end of a silo's training until its update is there.
        push: has `Backlog.turn` or `Backlog.sent` called at a time, with this.
    """

    def __init__(
        self,
        machines: Mapping[str, TimedMachine],
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
        """The order that the silo was given last, if it has not answered it."""
        works = self._works.get(silo)
        return works[-1].order if works else None

    def begun(self, silo: str, update_id: str) -> tuple[OrderInWork, Course] | None:
        """An order that its silo has begun, and whose update is not there yet."""
        for work in self._works.get(silo, []):
            if work.order.update_id == update_id and work.course is not None:
                return work, work.course
        return None

    def add(self, work: OrderInWork) -> None:
        """A silo is given an order."""
        self._works.setdefault(work.silo, []).append(work)
        self._queue(work)

    def turn(self, turn: Turn) -> None:
        """It may be an order's turn."""
        if turn.work in self._works.get(turn.work.silo, []) and turn.work.course is None:
            self._train(turn.work, turn.at_s)

    def sent(self, work: OrderInWork) -> bool:
        """An update is there: the silo has the order no more. False if that is void: cut short, it came, or comes."""
        works = self._works.get(work.silo, [])
        if work not in works:
            return False
        works.remove(work)
        if not works:
            del self._works[work.silo]
        return True

    def lose(self, silo: str) -> None:
        """The silo is lost, and all that it had."""
        self._works.pop(silo, None)

    def halt(self, silo: str, update_id: str, heard_s: float) -> None:
        """End an order with the step that it is in at ``heard_s``, unless it waits or is done with training anyway."""
        begun = self.begun(silo, update_id)
        if begun is None:
            return
        work, course = begun
        steps = int(np.searchsorted(course.ends, heard_s, side="left")) + 1
        if steps < len(course.after_s):
            works = self._works[silo]
            # In the place of what has its end ahead still.
            cut = works[works.index(work)] = replace(work)
            self._schedule(cut, course.cut(steps))
            for other in works:
                if other.course is None:
                    self._queue(other)

    def _queue(self, work: OrderInWork) -> None:
        """Have an order begin once it is there, and the one before is trained."""
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
