"""The virtual driver: the coordinator under a clock that jumps from one happening to the next.

A discrete-event simulator. What is to happen lies on a heap, ordered by (time, priority, serial), so the same seed
gives the same journal, byte by byte. Durations come from the silo file. Training is real and happens when an update
arrives: an order that is cut short costs no more than the steps it did, and one that is lost with its silo costs
nothing.

| on the heap | when its time has come |
|---|---|
| `SiloJoined` | the silo is here; its next `_Loss` goes on the heap |
| `_Loss` | the silo is gone, and the order it had; its return goes on the heap |
| `_Work` | trained and sent: `UpdateArrived`, or `WorkFailed`; nothing if it was cut short or lost meanwhile |
| `_Question` | the model is evaluated: `Evaluated` |
| `Progressed`, `TimerFired` | themselves |

Not to be confused with the Flower driver (`fedsync.flower.driver`), which does the same in real time, with messages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Protocol

import numpy as np

from fedsync.core.actions import (
    Action,
    Commit,
    Discard,
    Dispatch,
    Evaluate,
    HaltEarly,
    KeepBest,
    Probe,
    Rollback,
    Savepoint,
    Stop,
    WakeAt,
)
from fedsync.core.checks import check_sealed
from fedsync.core.coordinator import Coordinator
from fedsync.core.curve import steps_within
from fedsync.core.errors import FedSyncError, RunError
from fedsync.core.events import (
    Evaluated,
    Event,
    Progressed,
    SiloJoined,
    SiloLost,
    Spare,
    TimerFired,
    UpdateArrived,
    WorkFailed,
)
from fedsync.core.orders import Evaluation, SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.transfer import NO_PAYLOAD, Aggregator, Payload, Replica, store
from fedsync.observe.recorder import Recorder
from fedsync.sim.machine import Course, Machine, speed_windows
from fedsync.sim.outages import Outage, outages
from fedsync.trainer.protocol import Attestation, Completed, EvaluateModel


@dataclass(frozen=True, slots=True)
class Untrained:
    """Of an order that counts as carried out in full, though nobody trained: there is no payload to keep.

    Args:
        metrics: what the silo's report tells all the same.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)


class Worker(Protocol):
    """Trains for one silo: a `fedsync.trainer.session.SiloSession`, or what stands in for one where nobody trains."""

    @property
    def facts(self) -> SiloFacts: ...

    @property
    def replica(self) -> Replica:
        """Its copy of the model, where it keeps one, and its encryption."""

    def train(self, order: WorkOrder, received: Payload) -> Completed | Untrained:
        """Carry out an order; the times in the report are made virtual, and it has no speeds where nobody trains."""

    def evaluate(self, received: Payload, asked: EvaluateModel) -> Evaluation | Attestation | None:
        """Evaluate a model on a split of the silo; None where there is none.

        Where figures are sealed, what silos found together in the commits that came with it.
        """


class _Priority(IntEnum):
    """At the same instant: who is there, then what arrived, then answers, then timers."""

    PRESENCE = 0
    ARRIVAL = 1
    ANSWER = 2
    TIMER = 3


@dataclass(slots=True, eq=False)
class _Work:
    """An order in work: what came with it, when training began, when its steps end."""

    silo: str
    order: WorkOrder
    received: Payload
    start_s: float
    course: Course


@dataclass(frozen=True, slots=True)
class _Question:
    """A model to be evaluated."""

    silo: str
    asked: Evaluate
    received: Payload


@dataclass(frozen=True, slots=True)
class _Loss:
    """A silo is lost, until its return."""

    silo: str
    outage: Outage


_Happening = SiloJoined | TimerFired | Progressed | _Work | _Question | _Loss

SPARE_EPOCHS = 10
"""Epochs for each silo that predictors may train after a commit, where they learn at all."""

_QUIET_ENTRIES = 1000
"""Comings and goings of silos, and ten more for each silo, without an order in work, before a run is given up."""


class VirtualDriver:
    """Runs a coordinator to its end in virtual time.

    Args:
        coordinator: decides.
        aggregator: adds updates, and knows what each silo needs.
        machines: how long each silo takes, by name.
        workers: who trains, by name.
        recorder: writes the run's files.
        poll_s: the coordinator looks at multiples of this many seconds only and absorbs together what
            happened in between, as a driver that polls would; 0 looks at every instant.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        aggregator: Aggregator,
        machines: Mapping[str, Machine],
        workers: Mapping[str, Worker],
        recorder: Recorder,
        poll_s: float = 0.0,
    ) -> None:
        self._coordinator = coordinator
        self._aggregator = aggregator
        self._machines = machines
        self._workers = workers
        self._recorder = recorder
        self._poll_s = poll_s
        self._outages: dict[str, Iterator[Outage]] = {}
        self._heap: list[tuple[float, int, int, _Happening]] = []
        self._working: dict[str, _Work] = {}
        self._here: set[str] = set()
        self._serial = 0
        self._stop: Stop | None = None

    def run(self) -> None:
        """Run until the coordinator stops.

        Raises:
            RunError: nothing is left to happen although the run has not ended, or it ended in failure.
        """
        for name, worker in self._workers.items():
            config = self._machines[name].config
            self._outages[name] = outages(config, self._machines[name].seed)
            self._push(config.joins_at_s, _Priority.PRESENCE, SiloJoined(config.joins_at_s, name, worker.facts))
        quiet, most_quiet, committed = 0, _QUIET_ENTRIES + 10 * len(self._workers), False
        while self._stop is None:
            if not self._heap or quiet > most_quiet:
                others = " but silos that come and go" if self._heap else ""
                raise RunError(f"nothing is left to happen{others}, but the run has not ended")
            now_s, events = self._next_batch()
            if not events:
                continue
            if committed and self._coordinator.unlearned:
                events.append(Spare(now_s, SPARE_EPOCHS * len(self._workers)))
            entry = self._coordinator.handle(events, now_s)
            for action in entry.actions:
                self._carry_out(action, now_s)
            self._recorder.record(entry)
            committed = any(isinstance(action, Commit) for action in entry.actions)
            quiet = 0 if entry.actions or self._working else quiet + 1
        if self._stop.failed:
            raise RunError(self._stop.reason)
        self._recorder.keep("predictor.json", self._coordinator.learned)

    def _push(self, at_s: float, priority: _Priority, happening: _Happening) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, priority, self._serial, happening))

    def _next_batch(self) -> tuple[float, list[Event]]:
        heap, events = self._heap, []
        now_s = heap[0][0]
        if self._poll_s > 0:
            # Rounding can put the tick a hair before the instant it stands for.
            now_s = max(math.ceil(now_s / self._poll_s) * self._poll_s, now_s)
        while heap and heap[0][0] <= now_s:
            event = self._event(heapq.heappop(heap)[3], now_s)
            if event is not None:
                events.append(event)
        return now_s, events

    def _event(self, happening: _Happening, now_s: float) -> Event | None:
        match happening:
            case _Work(silo):
                if self._working.get(silo) is not happening:
                    return None  # it was cut short since, and has arrived or will arrive earlier
                del self._working[silo]
                return self._finish(happening, now_s)
            case _Question(silo, asked, received):
                return self._evaluate(now_s, silo, asked, received)
            case _Loss(silo, outage):
                self._working.pop(silo, None)
                self._here.discard(silo)
                self._aggregator.leave(silo)
                if outage.back_s < math.inf:
                    joined = SiloJoined(outage.back_s, silo, self._workers[silo].facts)
                    self._push(outage.back_s, _Priority.PRESENCE, joined)
                self._aggregator.leave(silo)
                return SiloLost(now_s, silo, outage.reason)
            case SiloJoined(_, silo, _):
                replica = self._workers[silo].replica
                self._here.add(silo)
                self._aggregator.greet(silo, replica.holds, replica.greeting())
                following = next(self._outages[silo], None)
                if following is not None:
                    self._push(following.at_s, _Priority.PRESENCE, _Loss(silo, following))
                return replace(happening, at_s=now_s)
            case TimerFired() | Progressed():
                return replace(happening, at_s=now_s)

    def _finish(self, work: _Work, now_s: float) -> Event:
        """Train what was done of the order, now that its time has come."""
        silo, order, course = work.silo, work.order, work.course
        worker, machine = self._workers[silo], self._machines[silo]
        asked, steps = order, len(course.after_s)
        if steps < order.max_steps or order.budget_s is not None:
            # The virtual machine has decided how many steps there was time for.
            asked = replace(order, max_steps=steps, budget_s=None)
        try:
            outcome = worker.train(asked, work.received)
            if isinstance(outcome, Untrained):
                self._aggregator.holds(silo, order.base_version)
            else:
                if self._aggregator.seals_figures:
                    check_sealed(silo, outcome.report)
                self._aggregator.holds(silo, worker.replica.holds)
                store(self._aggregator, silo, order, outcome.update)
        except FedSyncError as error:
            self._aggregator.holds(silo, worker.replica.holds)
            return WorkFailed(now_s, silo, order.update_id, str(error))
        overhead_s = {"order": machine.overhead_s}
        if machine.latency_s or machine.config.bandwidth_mbps is not None:
            there_s, back_s = (
                machine.transfer_s(work.received.nbytes),
                machine.transfer_s(self._aggregator.upload_bytes),
            )
            overhead_s["transfer"] = there_s + back_s
        if isinstance(outcome, Untrained):
            samples, compute_s = steps * order.batch_size, course.last_s - work.start_s
            report = WorkReport(order.base_version, steps, samples, compute_s, 0.0, overhead_s, metrics=outcome.metrics)
            nbytes = self._aggregator.upload_bytes
        else:
            course, nbytes = course.cut(outcome.report.steps), outcome.update.nbytes
            report = replace(
                outcome.report,
                compute_s=course.last_s - work.start_s,
                overhead_s=overhead_s,
                windows=speed_windows(order.batch_size, work.start_s, course.ends),
            )
        meta = UpdateMeta.of(silo, order, report, worker.facts.examples, nbytes)
        return UpdateArrived(now_s, meta, report)

    def _evaluate(self, now_s: float, silo: str, asked: Evaluate, received: Payload) -> Evaluated:
        worker = self._workers[silo]
        try:
            found = worker.evaluate(received, EvaluateModel.of(asked))
        except FedSyncError:
            found = None
        self._aggregator.holds(silo, worker.replica.holds)
        evaluation, pooled = (None, found.pooled) if isinstance(found, Attestation) else (found, ())
        if self._aggregator.seals_figures:
            evaluation = None
        return EvaluateModel.of(asked).answered(now_s, silo, evaluation, pooled)

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case Dispatch(silo, order):
                self._begin(silo, order, now_s)
            case HaltEarly(silo, update_id):
                self._halt(silo, update_id, now_s)
            case Probe(silo, update_id):
                self._probe(silo, update_id, now_s)
            case Savepoint():
                self._aggregator.savepoint()
            case Rollback():
                self._aggregator.rollback()
            case Commit():
                self._aggregator.commit(action)
                self._ask_questions()
                if self._aggregator.wants_snapshot:
                    self._take_snapshot()
            case Discard(update_id, _):
                self._aggregator.discard(update_id)
            case KeepBest(score):
                self._aggregator.keep_best(score.version)
            case Evaluate(_, silos):
                for silo in silos:
                    self._push(now_s, _Priority.ANSWER, _Question(silo, action, self._model_of(action, silo)))
            case WakeAt(at_s):
                self._push(max(at_s, now_s), _Priority.TIMER, TimerFired(at_s))
            case Stop():
                self._stop = action

    def _model_of(self, asked: Evaluate, silo: str) -> Payload:
        """What a silo needs to have the model that it is asked about."""
        if asked.owner:
            return self._aggregator.own(asked.owner)
        return NO_PAYLOAD if asked.subject.own else self._aggregator.outgoing(silo, asked.subject)

    def _begin(self, silo: str, order: WorkOrder, now_s: float) -> None:
        machine = self._machines[silo]
        if order.apart:
            received = self._aggregator.apart(order)
        else:
            self._aggregator.begin(order.update_id)
            received = self._aggregator.outgoing(silo)
        start_s = now_s + machine.transfer_s(received.nbytes)
        course = machine.course(order, start_s)
        if order.budget_s is not None:
            seconds = np.diff(course.ends, prepend=start_s)
            course = course.cut(steps_within(seconds, order.budget_s, order.overrun))
        self._schedule(_Work(silo, order, received, start_s, course))

    def _ask_questions(self) -> None:
        """Have silos answer whatever the aggregator asks; it takes no virtual time."""
        while self._aggregator.blocked:
            for silo, question in self._aggregator.questions().items():
                if silo not in self._here:
                    self._aggregator.give_up(silo)
                    break
                self._aggregator.answer(silo, self._workers[silo].replica.answer(question))

    def _take_snapshot(self) -> None:
        """Have the silo with the newest model seal it; it takes no virtual time."""
        name = max(self._workers, key=lambda silo: self._workers[silo].replica.holds)
        replica = self._workers[name].replica
        self._aggregator.put_snapshot(name, replica.holds, replica.snapshot())

    def _schedule(self, work: _Work) -> None:
        self._working[work.silo] = work
        machine = self._machines[work.silo]
        end_s = work.course.last_s + machine.overhead_s + machine.transfer_s(self._aggregator.upload_bytes)
        self._push(end_s, _Priority.ARRIVAL, work)

    def _halt(self, silo: str, update_id: str, now_s: float) -> None:
        """End a silo's order with the step it is in when it hears of it, unless it is done with training anyway."""
        work = self._working.get(silo)
        if work is None or work.order.update_id != update_id:
            return
        heard_s = now_s + self._machines[silo].latency_s
        steps = int(np.searchsorted(work.course.ends, heard_s, side="left")) + 1
        if steps < len(work.course.after_s):
            self._schedule(replace(work, course=work.course.cut(steps)))

    def _probe(self, silo: str, update_id: str, now_s: float) -> None:
        work = self._working.get(silo)
        if work is None or work.order.update_id != update_id:
            return
        latency_s = self._machines[silo].latency_s
        steps = int(np.searchsorted(work.course.ends, now_s + latency_s, side="right"))
        heard_s = now_s + 2 * latency_s
        progress = Progressed(heard_s, silo, update_id, steps, steps * work.order.batch_size)
        self._push(heard_s, _Priority.ANSWER, progress)
