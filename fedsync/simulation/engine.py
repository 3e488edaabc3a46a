"""Driver for virtual time: runs the coordinator with a clock that jumps from event to event.

A discrete-event simulator: future events lie on a heap, ordered by (time, priority, serial), so the same seed gives the
same journal, byte by byte. Durations come from the silo file. Training is real and happens when an update arrives: a
shortened order costs only its finished steps, and an order lost with its silo costs nothing.

| on the heap | action when its time has come |
|---|---|
| `SiloJoined` | the silo joins; its next `_Loss` goes on the heap |
| `_Loss` | the silo and its order are lost; its return goes on the heap |
| `OrderInWork` | train and send: `UpdateArrived` or `WorkFailed`; nothing if it was shortened or lost meanwhile |
| `_Question` | evaluate the model: `Evaluated` |
| `Progressed`, `TimerFired` | deliver the event itself |

Not to be confused with the Flower driver (`fedsync.server.driver`), which does the same in real time, with messages.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

import numpy as np

from fedsync.common.errors import BudgetSpent, FedSyncError, RunError
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
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import (
    Evaluated,
    Event,
    OperatorAsked,
    Progressed,
    SiloJoined,
    SiloLost,
    Spare,
    TimerFired,
    UpdateArrived,
    WorkFailed,
)
from fedsync.core.orders import Evaluation, Presence, SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.report_checks import check_sealed
from fedsync.model.transfer import NO_PAYLOAD, Aggregator, Payload, Replica, store
from fedsync.observe.lost_silos import MOST_NAMED, LostSilo
from fedsync.observe.recorder import Recorder
from fedsync.silo.owner.refusals import explained
from fedsync.silo.protocol import Attestation, Completed, EvaluateModel, Refusal, Refused
from fedsync.simulation.machine import Machine, Outage, outages, speed_windows
from fedsync.simulation.orders_in_work import OrderInWork, OrdersInWork


@dataclass(frozen=True, slots=True)
class Untrained:
    """Outcome of an order that counts as complete without training or payload, with the reported metrics."""

    metrics: Mapping[str, float] = field(default_factory=dict)


class Worker(Protocol):
    """Trainer of one silo: a `fedsync.silo.session.session.SiloSession`, or a substitute that does not train."""

    @property
    def facts(self) -> SiloFacts: ...

    @property
    def replica(self) -> Replica:
        """Silo side of the model transfer: the local copy of the model, if kept, and the encryption."""

    def train(self, order: WorkOrder, received: Payload) -> Completed | Untrained:
        """Carry out an order. The driver makes the report's times virtual and adds speeds, except for `Untrained`."""

    def evaluate(self, received: Payload, asked: EvaluateModel) -> Evaluation | Attestation | None:
        """Evaluate a model on a split of the silo; None without such a split. Under sealed figures the result is an
        `Attestation` of the figures pooled in the received commits.
        """


@dataclass(frozen=True, slots=True)
class _Question:
    silo: str
    asked: Evaluate
    received: Payload


@dataclass(frozen=True, slots=True)
class _Loss:
    silo: str
    outage: Outage


class Priority(IntEnum):
    """Order of events at the same instant: presence of silos, arrivals, answers, timers."""

    PRESENCE = 0
    ARRIVAL = 1
    ANSWER = 2
    TIMER = 3


LOSSES_IN_VAIN = 1000
"""Losses of silos that leave no order in work, without an update in between, before a run is given up; plus ten for
each silo."""

SPARE_EPOCHS = 10
"""Epochs for each silo's predictor after a commit."""


class Stuck(RunError):
    """Failure of a run whose silos, for lack of presence or work, bring no further version."""

    def naming(self, missing: Sequence[LostSilo]) -> RunError:
        return RunError("; ".join([str(self), *(each.words for each in missing[:MOST_NAMED])]))


class VirtualDriver:
    """Driver that runs a coordinator to its end in virtual time. With ``poll_s`` > 0 [s], the coordinator acts only at
    multiples of this period and absorbs all events since the last, as a polling driver would.
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
        self._machines = machines
        self._poll_s = poll_s
        self._heap: list[tuple[float, int, int, Any]] = []
        self._in_work = OrdersInWork(machines, self._after_s, partial(self._push, priority=Priority.ARRIVAL))
        self._serial = 0
        self._stop: Stop | None = None
        self._aggregator = aggregator
        self._workers = workers
        self._recorder = recorder
        self._committed = False
        self._outages: dict[str, Iterator[Outage]] = {}
        self._here: set[str] = set()
        self._spent: set[str] = set()

    def run(self) -> None:
        """Run until the coordinator stops; raises `RunError` if no event is left before, or if the run failed."""
        for name, worker in self._workers.items():
            config = self._machines[name].config
            self._outages[name] = outages(config, self._machines[name].seed)
            self._push(config.joins_at_s, SiloJoined(config.joins_at_s, name, worker.facts), Priority.PRESENCE)
        self._loop()
        if self._stop is not None and self._stop.failed:
            raise RunError(self._stop.reason)

    def _loop(self) -> None:
        losses, most_losses = 0, LOSSES_IN_VAIN + 10 * len(self._machines)
        while self._stop is None:
            if not self._heap:
                raise Stuck("nothing is left to happen, but the run has not ended")
            if losses > most_losses:
                raise Stuck(
                    f"silos were lost {losses} times, and no update arrived; make their presence longer, their crashes "
                    "rarer, or the orders shorter, and let enough silos be there together"
                )
            now_s, events = self._next_batch()
            if not events:
                continue
            if self._committed and self._coordinator.unlearned:  # predictors have time to train after a commit
                events.append(Spare(now_s, SPARE_EPOCHS * len(self._workers)))
            entry = self._coordinator.handle(events, now_s)
            for action in entry.actions:
                self._carry_out(action, now_s)
            self._recorder.record(entry)
            self._committed = any(isinstance(action, Commit) for action in entry.actions)
            arrived = any(isinstance(event, UpdateArrived) for event in events)
            lost = sum(isinstance(event, SiloLost) for event in events)
            losses = 0 if arrived else losses + (0 if self._in_work else lost)

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
                return self._ended(happening, now_s) if self._in_work.sent(happening) else None
            case TimerFired() | Progressed() | OperatorAsked():
                return replace(happening, at_s=now_s)
        return self._happens(happening, now_s)

    def _carry_out(self, action: Action, now_s: float) -> None:
        match action:
            case Dispatch(silo, order):
                self._begin(silo, order, now_s)
            case HaltEarly(silo, update_id):
                self._in_work.halt(silo, update_id, now_s + self._machines[silo].latency_s)
            case Probe(silo, update_id):
                self._probe(silo, update_id, now_s)
            case WakeAt(at_s):
                self._push(max(at_s, now_s), TimerFired(at_s), Priority.TIMER)
            case Stop():
                self._stop = action
            case Savepoint():
                self._aggregator.savepoint()
            case Rollback():
                self._aggregator.rollback()
            case Commit():
                self._aggregator.commit(action)
                self._ask_questions()
                if self._aggregator.wants_snapshot:
                    name, worker = max(self._workers.items(), key=lambda item: item[1].replica.holds)
                    self._aggregator.put_snapshot(name, worker.replica.holds, worker.replica.snapshot())
            case Discard(update_id, _):
                self._aggregator.discard(update_id)
            case KeepBest(score):
                self._aggregator.keep_best(score.version)
            case Evaluate(_, silos):
                for silo in silos:
                    self._push(now_s, _Question(silo, action, self._model_of(action, silo)), Priority.ANSWER)

    def _begin(self, silo: str, order: WorkOrder, now_s: float) -> None:
        received = self._given(silo, order)
        self._in_work.add(silo, order, received, now_s + self._machines[silo].transfer_s(received.nbytes))

    def _after_s(self, silo: str) -> float:
        machine = self._machines[silo]
        return machine.overhead_s + machine.transfer_s(self._aggregator.upload_bytes)

    def _probe(self, silo: str, update_id: str, now_s: float) -> None:
        work, latency_s = self._in_work.find(silo, update_id), self._machines[silo].latency_s
        if work is None:
            return
        steps = int(np.searchsorted(work.course.ends, now_s + latency_s, side="right"))
        heard_s = now_s + 2 * latency_s
        progress = Progressed(heard_s, silo, update_id, steps, steps * work.order.batch_size)
        self._push(heard_s, progress, Priority.ANSWER)

    def _happens(self, happening: SiloJoined | _Question | _Loss, now_s: float) -> Event | None:
        match happening:
            case _Question(silo, asked, received):
                return self._evaluate(now_s, silo, asked, received)
            case _Loss(silo, _) | SiloJoined(_, silo, _) if silo in self._spent:
                return None
            case _Loss(silo, outage):
                self._leave(silo)
                if outage.back_s < math.inf:
                    joined = SiloJoined(outage.back_s, silo, self._workers[silo].facts)
                    self._push(outage.back_s, joined, Priority.PRESENCE)
                return SiloLost(now_s, silo, outage.reason)
            case SiloJoined(_, silo, _):
                replica = self._workers[silo].replica
                self._here.add(silo)
                self._aggregator.greet(silo, replica.holds, replica.greeting())
                following = next(self._outages[silo], None)
                if following is not None:
                    self._push(following.at_s, _Loss(silo, following), Priority.PRESENCE)
                return replace(happening, at_s=now_s, facts=replace(happening.facts, presence=self._told(silo, now_s)))

    def _leave(self, silo: str) -> None:
        self._in_work.lose(silo)
        self._here.discard(silo)
        self._aggregator.leave(silo)

    def _ended(self, work: OrderInWork, now_s: float) -> Event:
        silo, order, course = work.silo, work.order, work.course
        worker, machine = self._workers[silo], self._machines[silo]
        asked, steps = order, len(course.after_s)
        if steps < order.max_steps or order.budget_s is not None:
            # The virtual machine has determined how many steps fit the time.
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
        except BudgetSpent as error:
            self._leave(silo)
            self._spent.add(silo)
            return SiloLost(now_s, silo, explained(silo, Refused(Refusal.BUDGET, str(error))))
        except FedSyncError as error:
            self._aggregator.holds(silo, worker.replica.holds)
            return WorkFailed(now_s, silo, order.update_id, str(error))
        overhead_s = {"order": machine.overhead_s}
        if machine.latency_s or machine.config.bandwidth_mbps is not None:
            sent_bytes = self._aggregator.upload_bytes
            overhead_s["transfer"] = machine.transfer_s(work.received.nbytes) + machine.transfer_s(sent_bytes)
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
        report = replace(report, presence=self._told(silo, now_s))
        meta = UpdateMeta.of(silo, order, report, worker.facts.examples, nbytes)
        return UpdateArrived(now_s, meta, report)

    def _told(self, silo: str, now_s: float) -> Presence | None:
        config = self._machines[silo].config
        return None if config.presence is None else config.presence.told(now_s - config.joins_at_s)

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

    def _model_of(self, asked: Evaluate, silo: str) -> Payload:
        if asked.owner:
            return self._aggregator.own(asked.owner)
        if asked.subject.own and not self._aggregator.seals_figures:
            return NO_PAYLOAD
        if silo in self._in_work:
            self._aggregator.holds(silo, self._workers[silo].replica.holds)
        return self._aggregator.outgoing(silo, asked.subject)

    def _given(self, silo: str, order: WorkOrder) -> Payload:
        if order.apart:
            return self._aggregator.apart(order)
        self._aggregator.begin(order.update_id)
        return self._aggregator.outgoing(silo)

    def _ask_questions(self) -> None:
        while self._aggregator.blocked:
            for silo, question in self._aggregator.questions().items():
                if silo not in self._here:
                    self._aggregator.give_up(silo)
                    break
                self._aggregator.answer(silo, self._workers[silo].replica.answer(question))
