"""Driver A: the coordinator under a virtual clock.

A discrete-event simulator: the heap is ordered by (time, priority, serial), so the same seed gives the
same journal, byte by byte. Durations come from the silo file; training is real and happens when an
update arrives, so that an order which is cut short costs no more than the steps it did, and an order
that is lost with its silo costs nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

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
from fedsync.core.events import (
    Evaluated,
    Event,
    Progressed,
    SiloJoined,
    SiloLost,
    TimerFired,
    UpdateArrived,
    WorkFailed,
)
from fedsync.core.layout import Vector
from fedsync.core.orders import Evaluation, SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.observe.recorder import Recorder
from fedsync.sim.machine import Machine, speed_windows
from fedsync.sim.outages import Outage, outages


class Worker(Protocol):
    """Trains for one silo."""

    @property
    def facts(self) -> SiloFacts:
        """What the silo says when it joins."""
        ...

    def train(self, order: WorkOrder, base: Vector) -> tuple[Vector, WorkReport]:
        """Carry out an order; the times in the report are replaced by virtual ones."""
        ...

    def evaluate(self, model: Vector) -> Evaluation | None:
        """Evaluate a model on the silo's test split; None where there is none."""
        ...


class Store(Protocol):
    """Keeps the model and the updates that wait for a commit; see `fedsync.aggregate.store.ModelStore`."""

    @property
    def model(self) -> Vector:
        """The current model, float32 [values]."""
        ...

    def begin(self, update_id: str) -> None:
        """An order starts from the current model."""
        ...

    def put(self, silo: str, update_id: str, update: Vector) -> None:
        """Keep an update."""
        ...

    def commit(self, commit: Commit) -> None:
        """Fold updates into the model."""
        ...

    def remember(self) -> None:
        """Keep the current model for `rollback`."""
        ...

    def rollback(self) -> None:
        """Go back to the model last remembered."""
        ...

    def discard(self, update_id: str) -> None:
        """Forget an update, if it is there."""
        ...


class _Priority(IntEnum):
    """At the same instant: who is there, then what arrived, then answers, then timers."""

    PRESENCE = 0
    ARRIVAL = 1
    ANSWER = 2
    TIMER = 3


@dataclass(slots=True, eq=False)
class _Work:
    """An order in work: the model it started from, when training began, when its steps end."""

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


@dataclass(frozen=True, slots=True)
class _Loss:
    """A silo is lost, until its return."""

    silo: str
    outage: Outage


_Happening = SiloJoined | TimerFired | Progressed | _Work | _Question | _Loss

_QUIET_ENTRIES = 1000
"""Comings and goings of silos, and ten more for each silo, without an order in work, before a run is given up."""


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
        windows: report the series of speeds within each order; costs most of the time where nobody trains.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        store: Store,
        machines: Mapping[str, Machine],
        workers: Mapping[str, Worker],
        recorder: Recorder,
        poll_s: float = 0.0,
        windows: bool = True,
    ) -> None:
        self._coordinator = coordinator
        self._store = store
        self._machines = machines
        self._workers = workers
        self._recorder = recorder
        self._poll_s = poll_s
        self._windows = windows
        # The model does not change its size, and an update is as large as the model.
        self._nbytes = store.model.nbytes
        self._outages: dict[str, Iterator[Outage]] = {}
        self._heap: list[tuple[float, int, int, _Happening]] = []
        self._working: dict[str, _Work] = {}
        self._serial = 0
        self._stop: Stop | None = None

    def run(self) -> Vector:
        """Run until the coordinator stops; returns the final model, float32 [values].

        Raises:
            RunError: nothing is left to happen although the run has not ended, or it ended in failure.
        """
        for name, worker in self._workers.items():
            config = self._machines[name].config
            self._outages[name] = outages(config, self._machines[name].seed)
            self._push(config.joins_at_s, _Priority.PRESENCE, SiloJoined(config.joins_at_s, name, worker.facts))
        quiet, most_quiet = 0, _QUIET_ENTRIES + 10 * len(self._workers)
        while self._stop is None:
            if not self._heap or quiet > most_quiet:
                others = " but silos that come and go" if self._heap else ""
                raise RunError(f"nothing is left to happen{others}, but the run has not ended")
            now_s, events = self._next_batch()
            if not events:
                continue
            entry = self._coordinator.handle(events, now_s)
            for action in entry.actions:
                self._carry_out(action, now_s)
            self._recorder.record(entry)
            quiet = 0 if entry.actions or self._working else quiet + 1
        if self._stop.failed:
            raise RunError(self._stop.reason)
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
                return Evaluated(now_s, silo, version, self._evaluate(silo, model))
            case _Loss(silo, outage):
                self._working.pop(silo, None)
                if outage.back_s < math.inf:
                    joined = SiloJoined(outage.back_s, silo, self._workers[silo].facts)
                    self._push(outage.back_s, _Priority.PRESENCE, joined)
                return SiloLost(now_s, silo, outage.reason)
            case SiloJoined(_, silo, _):
                following = next(self._outages[silo], None)
                if following is not None:
                    self._push(following.at_s, _Priority.PRESENCE, _Loss(silo, following))
                return replace(happening, at_s=now_s)
            case TimerFired() | Progressed():
                return replace(happening, at_s=now_s)

    def _finish(self, work: _Work, now_s: float) -> Event:
        """Train what was done of the order, now that its time has come."""
        silo, order, ends = work.silo, work.order, work.ends
        worker, config = self._workers[silo], self._machines[silo].config
        asked = order
        if len(ends) < order.max_steps or order.budget_s is not None:
            # The virtual machine has decided how many steps there was time for.
            asked = replace(order, max_steps=len(ends), budget_s=None)
        try:
            update, done = worker.train(asked, work.base)
            self._store.put(silo, order.update_id, update)
        except FedSyncError as error:
            return WorkFailed(now_s, silo, order.update_id, str(error))
        ends = ends[: done.steps]
        overhead_s = {"order": config.overhead_s}
        if config.latency_s or config.bandwidth_mbps is not None:
            overhead_s["transfer"] = 2 * self._machines[silo].transfer_s(self._nbytes)
        report = WorkReport(
            base_version=done.base_version,
            steps=done.steps,
            samples=done.samples,
            compute_s=float(ends[-1]) - work.start_s,
            loss=done.loss,
            overhead_s=overhead_s,
            windows=speed_windows(order.batch_size, work.start_s, ends) if self._windows else (),
            peak_memory=0,
            batch_cap=done.batch_cap,
            evaluation=done.evaluation,
        )
        meta = UpdateMeta(
            update_id=order.update_id,
            silo=silo,
            base_version=order.base_version,
            steps=done.steps,
            samples=done.samples,
            examples=worker.facts.examples,
            nbytes=update.nbytes,
            loss=done.loss,
        )
        return UpdateArrived(now_s, meta, report)

    def _evaluate(self, silo: str, model: Vector) -> Evaluation | None:
        try:
            return self._workers[silo].evaluate(model)
        except FedSyncError:
            return None

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
            case Stop():
                self._stop = action

    def _begin(self, silo: str, order: WorkOrder, now_s: float) -> None:
        self._store.begin(order.update_id)
        machine = self._machines[silo]
        start_s = now_s + machine.transfer_s(self._nbytes)
        ends = machine.step_ends(order, start_s)
        if order.budget_s is not None:
            seconds = np.diff(ends, prepend=start_s)
            ends = ends[: steps_within(seconds, order.budget_s, order.overrun)]
        self._schedule(_Work(silo, order, self._store.model, start_s, ends))

    def _schedule(self, work: _Work) -> None:
        self._working[work.silo] = work
        machine = self._machines[work.silo]
        end_s = float(work.ends[-1]) + machine.config.overhead_s + machine.transfer_s(self._nbytes)
        self._push(end_s, _Priority.ARRIVAL, work)

    def _halt(self, silo: str, update_id: str, now_s: float) -> None:
        """End a silo's order with the step it is in when it hears of it, unless it is done with training anyway."""
        work = self._working.get(silo)
        if work is None or work.order.update_id != update_id:
            return
        heard_s = now_s + self._machines[silo].config.latency_s
        steps = int(np.searchsorted(work.ends, heard_s, side="left")) + 1
        if steps < len(work.ends):
            self._schedule(replace(work, ends=work.ends[:steps]))

    def _probe(self, silo: str, update_id: str, now_s: float) -> None:
        work = self._working.get(silo)
        if work is None or work.order.update_id != update_id:
            return
        latency_s = self._machines[silo].config.latency_s
        steps = int(np.searchsorted(work.ends, now_s + latency_s, side="right"))
        told_s = now_s + 2 * latency_s
        told = Progressed(told_s, silo, update_id, steps, steps * work.order.batch_size)
        self._push(told_s, _Priority.ANSWER, told)
