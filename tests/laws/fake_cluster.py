"""A cluster that lives through a `Scenario`: silos that join, get lost, fail, lie, repeat themselves and come late.

It drives a `Coordinator` in virtual time as a real driver would, with a dictionary in place of the payloads, and
keeps its own books of what really happened, for the laws to compare with.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedsync.core.actions import (
    Action,
    Commit,
    Discard,
    Dispatch,
    Evaluate,
    HaltEarly,
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
    Progressed,
    SiloJoined,
    SiloLost,
    Spare,
    TimerFired,
    UpdateArrived,
    WorkFailed,
)
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, PooledFigures, Score, SiloFacts, UpdateMeta, Window, WorkOrder, WorkReport
from tests.laws.scenario import Scenario, Silo

MEAN_LOSS = 2.0
"""A sample, of every model on every silo's test split."""
TEST_SAMPLES = 100
"""Of every silo."""


@dataclass(slots=True, eq=False)
class Job:
    """An order at a silo.

    ``steps`` may be cut by a budget or a halt. ``void`` once the silo was lost or came anew: whatever it still sends
    is late.
    """

    silo: str
    serial: int
    """The silo's own count of orders, from 1."""
    order: WorkOrder
    begin_s: float
    step_s: float
    steps: int
    overhead_s: float
    void: bool = False
    done: bool = False
    end_s: float | None = None
    """When the coordinator knew that the order was over, however it ended."""

    @property
    def compute_s(self) -> float:
        return self.steps * self.step_s

    @property
    def due_s(self) -> float:
        """When it ends, as things stand."""
        return self.begin_s + self.compute_s + self.overhead_s


@dataclass(slots=True)
class Outcome:
    """A finished run.

    Args:
        entries: the journal.
        jobs: every order, by update id.
        accepted: reports that were good and answered the order in work, before the run was closing.
        closing_s: when the run began to end.
        remembered: version that a rollback goes back to.
        payloads: what a driver would still hold.
        faults: what a driver could not do, in words.
    """

    entries: list[JournalEntry] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    accepted: dict[str, WorkReport] = field(default_factory=dict)
    closing_s: float = math.inf
    remembered: int = 0
    payloads: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def actions(self, kind: type[Action]) -> list[Any]:
        return [action for entry in self.entries for action in entry.actions if isinstance(action, kind)]


Happening = Callable[[float], list[Event]]
BAD: list[dict[str, Any]] = [
    {"samples": 0},
    {"steps": 10**6},
    {"base_version": -1},
    {"loss": math.nan},
    {"loss": math.inf},
    {"compute_s": 0.0},
    {"compute_s": 1e-12},
    {"windows": (Window(1e12, 0.5, 0.5),)},
    {"overhead_s": {"load": -1.0}},
]
MAX_BATCHES = 20_000
SPARE_EPOCHS = 2
NOBODY = -1
"""Whose alarms are: they go off before anything that a silo does at the same instant."""


class FakeCluster:
    """Runs one coordinator through one scenario.

    Args:
        coordinator: decides.
        scenario: what happens.
        watch: called with every entry, before its actions are carried out.
    """

    def __init__(
        self, coordinator: Coordinator, scenario: Scenario, watch: Callable[[JournalEntry], None] = lambda _: None
    ) -> None:
        self._watch = watch
        self._coordinator = coordinator
        self._scenario = scenario
        self._heap: list[tuple[float, int, int, Happening]] = []
        self._serial = 0
        self._silos = {silo.name: (place, silo) for place, silo in enumerate(scenario.silos)}
        self._present: set[str] = set()
        self._orders: Counter[str] = Counter()
        self._current: dict[str, Job] = {}
        self._end_s = math.nan
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Run to the `Stop`; a run that neither stops nor goes on is a fault."""
        for name, (_, silo) in self._silos.items():
            for number, at_s in enumerate(silo.here):
                self._at(at_s, self._lose(name) if number % 2 else self._join(name), name)
            for at_s in silo.restarts:
                self._at(at_s, self._restart(name), name)
        out = self._outcome
        while not self._stands_still and len(out.entries) < MAX_BATCHES:
            now_s, events = self._next_batch()
            if not events:
                continue
            if self._scenario.spare and self._coordinator.unlearned:
                events.append(Spare(now_s, SPARE_EPOCHS))
            entry = self._coordinator.handle(events, now_s)
            out.entries.append(entry)
            self._watch(entry)
            for action in entry.actions:
                self._carry_out(action, now_s)
            if self._coordinator.stopped:
                return out
        out.faults.append("the run neither ends nor goes on" if self._stands_still else "the run goes on for ever")
        return out

    @property
    def _stands_still(self) -> bool:
        """Whether nothing can happen any more but the end by the clock, which would hide that nothing goes on."""
        return not self._heap or (len(self._heap) == 1 and self._heap[0][0] == self._end_s)

    # Time.

    def _at(self, at_s: float, happening: Happening, silo: str | None = None) -> None:
        self._serial += 1
        place = NOBODY if silo is None else self._silos[silo][0]
        heapq.heappush(self._heap, (at_s, place, self._serial, happening))

    def _next_batch(self) -> tuple[float, list[Event]]:
        now_s, poll_s = self._heap[0][0], self._scenario.poll_s
        if poll_s > 0:
            now_s = max(math.ceil(now_s / poll_s) * poll_s, now_s)
        events: list[Event] = []
        while self._heap and self._heap[0][0] <= now_s:
            events += heapq.heappop(self._heap)[3](now_s)
        return now_s, events

    # Silos.

    def _join(self, name: str) -> Happening:
        def happen(now_s: float) -> list[Event]:
            self._void(name, now_s)
            self._present.add(name)
            silo = self._silos[name][1]
            facts = SiloFacts(examples=silo.examples, declared_speed=silo.speed, presence=silo.told(now_s))
            return [SiloJoined(now_s, name, facts)]

        return happen

    def _restart(self, name: str) -> Happening:
        return lambda now_s: self._join(name)(now_s) if name in self._present else []

    def _lose(self, name: str) -> Happening:
        def happen(now_s: float) -> list[Event]:
            if name not in self._present:
                return []
            self._void(name, now_s)
            self._present.discard(name)
            return [SiloLost(now_s, name, "connection lost")]

        return happen

    def _void(self, name: str, now_s: float) -> None:
        if (job := self._current.pop(name, None)) is not None:
            job.void, job.end_s = True, now_s

    # Orders.

    def _dispatch(self, name: str, order: WorkOrder, now_s: float) -> None:
        out = self._outcome
        if name not in self._present or name in self._current or order.update_id in out.jobs:
            out.faults.append(f"order {order.update_id} for {name!r}, which is absent or busy, or sent before")
            return
        silo = self._silos[name][1]
        serial = self._orders[name] = self._orders[name] + 1
        luck = self._scenario.luck(silo, "order", serial)
        step_s = silo.launch_s + min(order.batch_size, silo.memory or order.batch_size) / silo.speed
        step_s *= luck.uniform(1 - silo.jitter, 1 + silo.jitter)
        overhead_s = silo.overhead_s * (luck.uniform(0.0, 2.0) if silo.jitter else 1.0)
        steps = order.max_steps
        if order.budget_s is not None:
            steps = steps_in_time(step_s, steps, order.budget_s, order.overrun)
        job = out.jobs[order.update_id] = Job(name, serial, order, now_s, step_s, steps, overhead_s)
        self._current[name] = job
        for share in self._scenario.told:
            done = max(1, int(share * steps))
            self._at(job.begin_s + done * step_s, self._progress(job, done), name)
        self._at(job.due_s, self._finish(job), name)

    def _progress(self, job: Job, steps: int) -> Happening:
        def happen(now_s: float) -> list[Event]:
            if job.done or steps > job.steps:
                return []
            return [Progressed(now_s, job.silo, job.order.update_id, steps, steps * job.order.batch_size)]

        return happen

    def _halt(self, job: Job, now_s: float) -> None:
        """Stop after the step in work."""
        steps = max(math.floor((now_s - job.begin_s) / job.step_s) + 1, 1)
        if not job.done and steps < job.steps:
            job.steps = steps
            self._at(job.due_s, self._finish(job), job.silo)

    def _finish(self, job: Job) -> Happening:
        def happen(now_s: float) -> list[Event]:
            if job.done:
                return []  # a halted order has two ends on the heap
            job.done = True
            silo = self._silos[job.silo][1]
            in_work = self._current.get(job.silo) is job
            if in_work:
                del self._current[job.silo]
                job.end_s = now_s
                if job.serial in silo.failing:
                    return [WorkFailed(now_s, job.silo, job.order.update_id, "disk full")]
            good = self._arrival(job, silo, now_s)
            lies = job.serial in silo.lying
            if in_work and not lies and now_s <= self._outcome.closing_s:
                self._outcome.accepted[job.order.update_id] = good.report
            events: list[Event] = [self._sent(self._spoilt(good, silo, job.serial) if lies else good)]
            return events + (self._echo(job, good, now_s) if job.serial in silo.echoes else [])

        return happen

    def _echo(self, job: Job, good: UpdateArrived, now_s: float) -> list[Event]:
        """The same update again, at once and much later; a failure of an order that is history; an alarm."""
        pause_s = now_s - job.begin_s
        self._at(now_s + pause_s, lambda at_s: [self._sent(replace(good, at_s=at_s))], job.silo)
        self._at(now_s + pause_s / 2, lambda at_s: [TimerFired(at_s)], job.silo)
        return [self._sent(good), WorkFailed(now_s, job.silo, f"{job.silo}/{job.serial - 1}", "old news")]

    def _sent(self, event: UpdateArrived) -> UpdateArrived:
        """As a driver does: the payload is stored before the coordinator hears of it."""
        self._outcome.payloads[event.meta.update_id] = event.meta.samples
        return event

    def _arrival(self, job: Job, silo: Silo, now_s: float) -> UpdateArrived:
        order, sealed = job.order, self._scenario.sealed
        batch = min(order.batch_size, silo.memory or order.batch_size)
        samples = job.steps * batch
        luck = self._scenario.luck(silo, "machine", job.serial)
        report = WorkReport(
            base_version=order.base_version,
            steps=job.steps,
            samples=samples,
            compute_s=job.compute_s,
            loss=None if sealed else 1.0 / order.round,
            overhead_s={"send": job.overhead_s},
            windows=(Window(samples / job.compute_s, luck.uniform(0.2, 1.0), luck.uniform(0.1, 0.6)),),
            batch_cap=batch if batch < order.batch_size else None,
            evaluation=None if sealed else self._evaluation(order.base_version),
            pooled=self._pooled(order.base_version) if sealed else (),
            presence=silo.told(now_s),
        )
        meta = UpdateMeta.of(job.silo, order, report, silo.examples, nbytes=40)
        return UpdateArrived(now_s, meta, report)

    def _evaluation(self, version: int) -> Evaluation:
        right = self._scenario.accuracy(version) * TEST_SAMPLES
        return Evaluation(MEAN_LOSS * TEST_SAMPLES, right, TEST_SAMPLES)

    def _pooled(self, version: int) -> tuple[PooledFigures, ...]:
        """What silos found in the commit that made ``version``: how good the one before was."""
        if version == 0:
            return ()
        score = Score(version - 1, self._scenario.accuracy(version - 1), MEAN_LOSS)
        return (PooledFigures(version, 1.0 / version, score),)

    def _spoilt(self, event: UpdateArrived, silo: Silo, serial: int) -> UpdateArrived:
        report = replace(event.report, **self._scenario.luck(silo, "lie", serial).choice(BAD))
        meta = replace(event.meta, steps=report.steps, samples=report.samples)
        return UpdateArrived(event.at_s, meta, report)

    # The driver's side.

    def _carry_out(self, action: Action, now_s: float) -> None:
        out = self._outcome
        match action:
            case Dispatch(name, order):
                self._dispatch(name, order, now_s)
            case Commit(version, weights):
                missing = [update_id for update_id in weights if out.payloads.pop(update_id, None) is None]
                if missing:
                    out.faults.append(f"commit {version} needs {missing}, which is not there")
            case Discard(update_id, _):
                out.payloads.pop(update_id, None)
            case HaltEarly(name, update_id):
                if (job := self._in_work(name, update_id)) is not None:
                    self._halt(job, now_s)
            case Probe(name, update_id):
                if (job := self._in_work(name, update_id)) is not None:
                    done = min(max(math.floor((now_s - job.begin_s) / job.step_s), 0), job.steps)
                    self._at(now_s + self._scenario.delay_s, self._progress(job, done), name)
            case Savepoint(version):
                out.remembered = version
            case Rollback(version):
                if version <= out.remembered:
                    out.faults.append(f"version {version} goes back to {out.remembered}, which is not older")
            case WakeAt(at_s):
                self._at(max(at_s, now_s), lambda fired_s: [TimerFired(fired_s)])
                seconds = self._coordinator._policies.stop.seconds
                if seconds is not None and at_s == (self._coordinator._state.begun_s or 0.0) + seconds:
                    self._end_s = at_s
            case Evaluate(version, names):
                out.closing_s = min(out.closing_s, now_s)
                for name in names:
                    silo = self._silos[name][1]
                    takes_s = silo.overhead_s * self._scenario.luck(silo, "evaluate").uniform(0.0, 2.0)
                    answer = self._lose(name) if silo.leaves_at_the_end else self._evaluated(silo, version)
                    self._at(now_s + takes_s, answer, name)
            case Stop():
                out.closing_s = min(out.closing_s, now_s)

    def _in_work(self, name: str, update_id: str) -> Job | None:
        """The silo's order, where it is that one."""
        job = self._current.get(name)
        return job if job is not None and job.order.update_id == update_id else None

    def _evaluated(self, silo: Silo, version: int) -> Happening:
        def happen(now_s: float) -> list[Event]:
            if silo.name not in self._present:
                return []
            evaluation = None if self._scenario.sealed else self._evaluation(version)
            pooled = self._pooled(version) if self._scenario.sealed else ()
            answer = Evaluated(now_s, silo.name, version, evaluation, pooled)
            return [answer, answer] if silo.echoes else [answer]

        return happen


def steps_in_time(step_s: float, most: int, budget_s: float, overrun: float) -> int:
    """Steps of ``step_s`` each, of ``most``, within a budget.

    The first step is always done; a later one only if it begins in time and overruns by its share at most.
    """
    steps = max(min(most, math.ceil(budget_s / step_s)), 1)  # that many begin in time
    while steps > 1 and (steps * step_s - budget_s > overrun * step_s or (steps - 1) * step_s >= budget_s):
        steps -= 1
    return steps
