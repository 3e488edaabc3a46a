"""Driver A: the coordinator under a virtual clock.

A discrete-event simulator: the heap is ordered by (time, priority, serial), so the same seed gives the
same journal, byte by byte. Durations come from the silo file; training is real and happens when an
update arrives, so that an order which is cut short costs no more than the steps it did.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

from fedsync.aggregate.store import ModelStore
from fedsync.core.actions import Action, Commit, Discard, Dispatch, Evaluate, Stop, WakeAt
from fedsync.core.coordinator import Coordinator
from fedsync.core.errors import FedSyncError, RunError
from fedsync.core.events import Evaluated, Event, SiloJoined, TimerFired, UpdateArrived, WorkFailed
from fedsync.core.layout import Vector
from fedsync.core.orders import Evaluation, SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.observe.recorder import Recorder
from fedsync.sim.machine import Machine, speed_windows


class Worker(Protocol):
    """Trains for one silo."""

    @property
    def facts(self) -> SiloFacts:
        """What the silo says when it joins."""
        ...

    def train(self, order: WorkOrder, base: Vector) -> tuple[Vector, WorkReport]:
        """Carry out an order; the times in the report are replaced by virtual ones."""
        ...

    def evaluate(self, model: Vector) -> Evaluation:
        """Evaluate a model on the silo's test split."""
        ...


class _Priority(IntEnum):
    """At the same instant: who is there, then what arrived, then answers, then timers."""

    JOIN = 0
    ARRIVAL = 1
    ANSWER = 2
    TIMER = 3


@dataclass(frozen=True, slots=True)
class _Work:
    """An order in work: the model it started from and when it began."""

    silo: str
    order: WorkOrder
    base: Vector
    start_s: float


@dataclass(frozen=True, slots=True)
class _Question:
    """A model to be evaluated."""

    silo: str
    version: int
    model: Vector


_Happening = SiloJoined | TimerFired | _Work | _Question


class VirtualDriver:
    """Runs a coordinator to its end in virtual time.

    Args:
        coordinator: decides.
        store: model and pending updates.
        machines: how long each silo takes, by name.
        workers: who trains, by name.
        recorder: writes the run's files.
        poll_s: the coordinator looks at multiples of this many seconds only and absorbs together what
            happened in between, as a driver that polls would; 0 looks at every instant.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: ModelStore,
        machines: Mapping[str, Machine],
        workers: Mapping[str, Worker],
        recorder: Recorder,
        poll_s: float = 0.0,
    ) -> None:
        self._coordinator = coordinator
        self._store = store
        self._machines = machines
        self._workers = workers
        self._recorder = recorder
        self._poll_s = poll_s
        self._heap: list[tuple[float, int, int, _Happening]] = []
        self._serial = 0

    def run(self) -> Vector:
        """Run until the coordinator stops; returns the final model, float32 [values].

        Raises:
            RunError: nothing is left to happen although the run has not ended, or it ended in failure.
        """
        for name, worker in self._workers.items():
            self._push(0.0, _Priority.JOIN, SiloJoined(0.0, name, worker.facts))
        stop: Stop | None = None
        while stop is None:
            if not self._heap:
                raise RunError("nothing is left to happen, but the run has not ended")
            now_s, events = self._next_batch()
            entry = self._coordinator.handle(events, now_s)
            for action in entry.actions:
                self._carry_out(action, now_s)
            self._recorder.record(entry)
            stop = next((action for action in entry.actions if isinstance(action, Stop)), None)
        if stop.failed:
            raise RunError(stop.reason)
        return self._store.model

    def _push(self, at_s: float, priority: _Priority, happening: _Happening) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, priority, self._serial, happening))

    def _next_batch(self) -> tuple[float, list[Event]]:
        now_s = self._visible_at(self._heap[0][0])
        events: list[Event] = []
        while self._heap and self._heap[0][0] <= now_s:
            _, _, _, happening = heapq.heappop(self._heap)
            events.append(self._event(happening, now_s))
        return now_s, events

    def _visible_at(self, at_s: float) -> float:
        if self._poll_s <= 0:
            return at_s
        ticks = math.ceil(at_s / self._poll_s)
        # Rounding can put the tick a hair before the instant it stands for.
        return max(ticks * self._poll_s, at_s)

    def _event(self, happening: _Happening, now_s: float) -> Event:
        match happening:
            case _Work():
                return self._finish(happening, now_s)
            case _Question(silo, version, model):
                return Evaluated(now_s, silo, version, self._workers[silo].evaluate(model))
            case SiloJoined() | TimerFired():
                return replace(happening, at_s=now_s)

    def _finish(self, work: _Work, now_s: float) -> Event:
        """Train what the order asked for, now that its time has come."""
        worker, order = self._workers[work.silo], work.order
        try:
            update, report = worker.train(order, work.base)
            self._store.put(work.silo, order.update_id, update)
        except FedSyncError as error:
            return WorkFailed(now_s, work.silo, order.update_id, str(error))
        ends = self._machines[work.silo].step_ends(order, work.start_s)[: report.steps]
        report = replace(
            report,
            compute_s=float(ends[-1]) - work.start_s,
            overhead_s={"order": self._machines[work.silo].config.overhead_s},
            windows=speed_windows(order.batch_size, work.start_s, ends),
            peak_memory=0,
        )
        meta = UpdateMeta(
            update_id=order.update_id,
            silo=work.silo,
            base_version=order.base_version,
            steps=report.steps,
            samples=report.samples,
            examples=worker.facts.examples,
            nbytes=update.nbytes,
        )
        return UpdateArrived(now_s, meta, report)

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case Dispatch(silo, order):
                machine = self._machines[silo]
                ends = machine.step_ends(order, now_s)
                work = _Work(silo, order, self._store.model, now_s)
                self._push(float(ends[-1]) + machine.config.overhead_s, _Priority.ARRIVAL, work)
            case Commit():
                self._store.commit(action)
            case Discard(update_id, _):
                self._store.discard(update_id)
            case Evaluate(version, silos):
                for silo in silos:
                    self._push(now_s, _Priority.ANSWER, _Question(silo, version, self._store.model))
            case WakeAt(at_s):
                self._push(max(at_s, now_s), _Priority.TIMER, TimerFired(at_s))
