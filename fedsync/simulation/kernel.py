"""Discrete-event kernel of the simulator: a coordinator under a virtual clock that jumps from event to event.

Future events lie on a heap, ordered by (time, priority, serial), so equal inputs give the same journal, byte by byte.
The kernel handles orders in work and queued (`fedsync.simulation.backlog`), halts, probes and timers. A subclass
supplies the result of an order (`Kernel.ended`), other events, and other actions.

`fedsync.simulation.engine.VirtualDriver` is the subclass: training or timing only, arrivals and departures of silos,
and the run's files.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from fedsync.common.errors import RunError
from fedsync.core.actions import Action, Dispatch, HaltEarly, Probe, Stop, WakeAt
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, OperatorAsked, Progressed, TimerFired
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import WorkOrder
from fedsync.model.transfer import Payload
from fedsync.simulation.backlog import Backlog, OrderInWork, Turn
from fedsync.simulation.machine import TimedMachine

M = TypeVar("M", bound=TimedMachine)


class Priority(IntEnum):
    """Order of events at the same instant: presence of silos, arrivals, answers, timers."""

    PRESENCE = 0
    ARRIVAL = 1
    ANSWER = 2
    TIMER = 3


QUIET_ENTRIES = 1000
"""Journal entries without actions and without an order in work before a run is given up; plus ten for each silo."""


class Kernel(ABC, Generic[M]):
    """Driver of a coordinator in virtual time.

    With ``poll_s`` above 0, all events of an interval are absorbed together at its end; 0 handles each instant
    separately.
    """

    def __init__(self, coordinator: Coordinator, machines: Mapping[str, M], poll_s: float = 0.0) -> None:
        self._coordinator = coordinator
        self._machines = machines
        self._poll_s = poll_s
        self._heap: list[tuple[float, int, int, Any]] = []
        self._backlog = Backlog(machines, self._after_s, partial(self._push, priority=Priority.ARRIVAL))
        self._serial = 0
        self._stop: Stop | None = None

    # Hooks of the subclass.
    @property
    @abstractmethod
    def upload_bytes(self) -> int:
        """Encoded size of an update."""

    @abstractmethod
    def given(self, silo: str, order: WorkOrder) -> Payload:
        """Return the payload sent to the silo with the order."""

    @abstractmethod
    def ended(self, work: OrderInWork, now_s: float) -> Event:
        """Return the event for an order that has ended."""

    @abstractmethod
    def happens(self, happening: Any, now_s: float) -> Event | None:
        """Return the event, if any, for another item of the heap."""

    @abstractmethod
    def act(self, action: Action, now_s: float) -> None:
        """Carry out an action that the kernel does not handle."""

    @abstractmethod
    def decided(self, entry: JournalEntry) -> None:
        """Called after all actions of the entry were carried out."""

    def added(self, now_s: float) -> list[Event]:
        """Return further events of the driver, absorbed after the batch."""
        return []

    def run(self) -> None:
        """Run until the coordinator stops.

        Raises:
            RunError: the run has not ended, and no event is left that could end it.
        """
        quiet, most_quiet = 0, QUIET_ENTRIES + 10 * len(self._machines)
        while self._stop is None:
            if not self._heap or quiet > most_quiet:
                others = " but silos that come and go" if self._heap else ""
                raise RunError(f"nothing is left to happen{others}, but the run has not ended")
            now_s, events = self._next_batch()
            if not events:
                continue
            entry = self._coordinator.handle([*events, *self.added(now_s)], now_s)
            for action in entry.actions:
                self._carry_out(action, now_s)
            self.decided(entry)
            quiet = 0 if entry.actions or self._backlog else quiet + 1

    def _push(self, at_s: float, happening: Any, priority: Priority) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, priority, self._serial, happening))

    def _next_batch(self) -> tuple[float, list[Event]]:
        heap, events = self._heap, []
        now_s = heap[0][0]
        if self._poll_s > 0:
            # Rounding can put the tick slightly before the event.
            now_s = max(math.ceil(now_s / self._poll_s) * self._poll_s, now_s)
        while heap and heap[0][0] <= now_s:
            event = self._event(heapq.heappop(heap)[3], now_s)
            if event is not None:
                events.append(event)
        return now_s, events

    def _event(self, happening: Any, now_s: float) -> Event | None:
        match happening:
            case OrderInWork():
                # A halted order has a new item on the heap; its old item is void.
                return self.ended(happening, now_s) if self._backlog.sent(happening) else None
            case Turn():
                self._backlog.turn(happening)
                return None
            case TimerFired() | Progressed() | OperatorAsked():
                return replace(happening, at_s=now_s)
        return self.happens(happening, now_s)

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case Dispatch(silo, order):
                self._begin(silo, order, now_s)
            case HaltEarly(silo, update_id):
                self._backlog.halt(silo, update_id, now_s + self._machines[silo].latency_s)
            case Probe(silo, update_id):
                self._probe(silo, update_id, now_s)
            case WakeAt(at_s):
                self._push(max(at_s, now_s), TimerFired(at_s), Priority.TIMER)
            case Stop():
                self._stop = action
            case _:
                self.act(action, now_s)

    def _begin(self, silo: str, order: WorkOrder, now_s: float) -> None:
        received = self.given(silo, order)
        self._backlog.add(OrderInWork(silo, order, received, now_s + self._machines[silo].transfer_s(received.nbytes)))

    def _after_s(self, silo: str) -> float:
        machine = self._machines[silo]
        return machine.overhead_s + machine.transfer_s(self.upload_bytes)

    def _probe(self, silo: str, update_id: str, now_s: float) -> None:
        begun = self._backlog.begun(silo, update_id)
        if begun is None:
            return
        (work, course), latency_s = begun, self._machines[silo].latency_s
        steps = int(np.searchsorted(course.ends, now_s + latency_s, side="right"))
        heard_s = now_s + 2 * latency_s
        progress = Progressed(heard_s, silo, update_id, steps, steps * work.order.batch_size)
        self._push(heard_s, progress, Priority.ANSWER)
