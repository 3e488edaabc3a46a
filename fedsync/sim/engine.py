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

import numpy as np
from numpy.typing import NDArray

from fedsync.aggregate.store import ModelStore
from fedsync.core.actions import (
    Action,
    Commit,
    Discard,
    Dispatch,
    Evaluate,
    HaltEarly,
    Probe,
    Remember,
    Rollback,
    Stop,
    WakeAt,
)
from fedsync.core.budget import steps_within
from fedsync.core.coordinator import Coordinator
from fedsync.core.errors import FedSyncError, RunError
from fedsync.core.events import Evaluated, Event, Progressed, SiloJoined, TimerFired, UpdateArrived, WorkFailed
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


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """An order in work: the model it started from, when it began, when its steps end."""

    silo: str
    order: WorkOrder
    base: Vector
    start_s: float
    ends: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Question:
    """A model to be evaluated."""

    silo: str
    version: int
    model: Vector


_Happening = SiloJoined | TimerFired | Progressed | _Work | _Question


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
        self._working: dict[str, _Work] = {}
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
            if not events:
                continue
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
            event = self._event(happening, now_s)
            if event is not None:
                events.append(event)
        return now_s, events

    def _visible_at(self, at_s: float) -> float:
        if self._poll_s <= 0:
            return at_s
        ticks = math.ceil(at_s / self._poll_s)
        # Rounding can put the tick a hair before the instant it stands for.
        return max(ticks * self._poll_s, at_s)

    def _event(self, happening: _Happening, now_s: float) -> Event | None:
        match happening:
            case _Work(silo):
                if self._working.get(silo) is not happening:
                    return None  # it was cut short since, and has arrived or will arrive earlier
                del self._working[silo]
                return self._finish(happening, now_s)
            case _Question(silo, version, model):
                return Evaluated(now_s, silo, version, self._workers[silo].evaluate(model))
            case SiloJoined() | TimerFired() | Progressed():
                return replace(happening, at_s=now_s)

    def _finish(self, work: _Work, now_s: float) -> Event:
        """Train what was done of the order, now that its time has come."""
        worker = self._workers[work.silo]
        # The virtual machine has decided how many steps there was time for.
        order = replace(work.order, max_steps=len(work.ends), budget_s=None)
        try:
            update, report = worker.train(order, work.base)
            self._store.put(work.silo, order.update_id, update)
        except FedSyncError as error:
            return WorkFailed(now_s, work.silo, order.update_id, str(error))
        ends = work.ends[: report.steps]
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
            loss=report.loss,
        )
        return UpdateArrived(now_s, meta, report)

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case Dispatch(silo, order):
                self._begin(silo, order, now_s)
            case HaltEarly(silo, update_id):
                self._halt(silo, update_id, now_s)
            case Probe(silo, update_id):
                self._probe(silo, update_id, now_s)
            case Remember():
                self._store.remember()
            case Rollback():
                self._store.rollback()
            case Commit():
                self._store.commit(action)
            case Discard(update_id, _):
                self._store.discard(update_id)
            case Evaluate(version, silos):
                for silo in silos:
                    self._push(now_s, _Priority.ANSWER, _Question(silo, version, self._store.model))
            case WakeAt(at_s):
                self._push(max(at_s, now_s), _Priority.TIMER, TimerFired(at_s))

    def _begin(self, silo: str, order: WorkOrder, now_s: float) -> None:
        ends = self._machines[silo].step_ends(order, now_s)
        if order.budget_s is not None:
            seconds = np.diff(ends, prepend=now_s)
            ends = ends[: steps_within(seconds, order.budget_s, order.overrun)]
        self._schedule(_Work(silo, order, self._store.model, now_s, ends))

    def _schedule(self, work: _Work) -> None:
        self._working[work.silo] = work
        overhead_s = self._machines[work.silo].config.overhead_s
        self._push(float(work.ends[-1]) + overhead_s, _Priority.ARRIVAL, work)

    def _halt(self, silo: str, update_id: str, now_s: float) -> None:
        """End a silo's order with the step it is in, unless it is done with training anyway."""
        work = self._working.get(silo)
        if work is None or work.order.update_id != update_id:
            return
        steps = int(np.searchsorted(work.ends, now_s, side="left")) + 1
        if steps < len(work.ends):
            self._schedule(replace(work, ends=work.ends[:steps]))

    def _probe(self, silo: str, update_id: str, now_s: float) -> None:
        work = self._working.get(silo)
        if work is None or work.order.update_id != update_id:
            return
        steps = int(np.searchsorted(work.ends, now_s, side="right"))
        told = Progressed(now_s, silo, update_id, steps, steps * work.order.batch_size)
        self._push(now_s, _Priority.ANSWER, told)
