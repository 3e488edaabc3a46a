"""A cluster made of random numbers: silos that join, get lost, fail, lie, repeat themselves and come late.

It drives a `Coordinator` in virtual time as a real driver would, with a dictionary in place of the payloads, and
keeps its own books of what really happened, for the laws to compare with. After ``calm_s`` nothing bad happens any
more, so that a run can be expected to go on and to end.
"""

import heapq
import itertools
import math
import random
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
    TimerFired,
    UpdateArrived,
    WorkFailed,
)
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, SiloFacts, UpdateMeta, Window, WorkOrder, WorkReport


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to a run.

    Args:
        seed: of everything random.
        silos: how many there will be.
        chaos: probability of each kind of mishap, for every order, before ``calm_s``.
        calm_s: when mishaps end.
        poll_s: events are seen at multiples of this only; 0 sees each at its instant.
    """

    seed: int
    silos: int = 4
    chaos: float = 0.0
    calm_s: float = 0.0
    poll_s: float = 0.0


@dataclass(slots=True)
class Job:
    """An order at a silo.

    ``step_ends`` are seconds since it began; ``steps`` may be cut by a budget or a halt. ``void`` once the silo
    was lost or came anew: whatever it still sends is late.
    """

    silo: str
    order: WorkOrder
    begin_s: float
    step_ends: list[float]
    steps: int
    overhead_s: float
    void: bool = False
    done: bool = False
    end_s: float | None = None
    """When the coordinator knew that the order was over, however it ended."""


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
        """All actions of one kind, in order."""
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


class FakeCluster:
    """Runs one coordinator through one scenario.

    Args:
        coordinator: decides.
        scenario: what happens.
    """

    def __init__(self, coordinator: Coordinator, scenario: Scenario) -> None:
        self._coordinator = coordinator
        self._scenario = scenario
        self._random = random.Random(scenario.seed)
        self._heap: list[tuple[float, int, Happening]] = []
        self._serial = 0
        self._speeds: dict[str, float] = {}
        self._present: set[str] = set()
        self._current: dict[str, Job] = {}
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Run to the `Stop`; a run that neither stops nor goes on is a fault."""
        for index in range(self._scenario.silos):
            name = f"silo-{index}"
            self._speeds[name] = 100.0 * 2 ** self._random.uniform(-1.0, 1.0)
            late = self._random.random() < 0.3 and self._scenario.chaos > 0 and index > 0
            self._at(self._random.uniform(0.0, self._scenario.calm_s) if late else 0.0, self._join(name))
        out = self._outcome
        while self._heap and len(out.entries) < MAX_BATCHES:
            now_s, events = self._next_batch()
            entry = self._coordinator.handle(events, now_s)
            out.entries.append(entry)
            for action in entry.actions:
                self._carry_out(action, now_s)
            if self._coordinator.stopped:
                return out
        out.faults.append("the run neither ends nor goes on" if not self._heap else "the run goes on for ever")
        return out

    # Time.

    def _at(self, at_s: float, happening: Happening) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (at_s, self._serial, happening))

    def _next_batch(self) -> tuple[float, list[Event]]:
        now_s, poll_s = self._heap[0][0], self._scenario.poll_s
        if poll_s > 0:
            now_s = max(math.ceil(now_s / poll_s) * poll_s, now_s)
        events: list[Event] = []
        while self._heap and self._heap[0][0] <= now_s:
            events += heapq.heappop(self._heap)[2](now_s)
        return now_s, events

    def _mishap(self, now_s: float) -> bool:
        return now_s < self._scenario.calm_s and self._random.random() < self._scenario.chaos

    # Silos.

    def _join(self, name: str) -> Happening:
        def happen(now_s: float) -> list[Event]:
            self._void(name, now_s)
            self._present.add(name)
            facts = SiloFacts(examples=5000, declared_speed=self._speeds[name])
            return [SiloJoined(now_s, name, facts)]

        return happen

    def _lose(self, name: str) -> Happening:
        def happen(now_s: float) -> list[Event]:
            if name not in self._present:
                return []
            self._void(name, now_s)
            self._present.discard(name)
            self._at(now_s + self._random.uniform(0.1, 5.0), self._join(name))
            return [SiloLost(now_s, name, "connection lost")]

        return happen

    def _void(self, name: str, now_s: float) -> None:
        job = self._current.pop(name, None)
        if job is not None:
            job.void, job.end_s = True, now_s

    # Orders.

    def _dispatch(self, name: str, order: WorkOrder, now_s: float) -> None:
        out = self._outcome
        if name not in self._present or name in self._current or order.update_id in out.jobs:
            out.faults.append(f"order {order.update_id} for {name!r}, which is absent or busy, or sent before")
        step_s = order.batch_size / self._speeds[name]
        ends, end = [], 0.0
        for _ in range(order.max_steps):
            end += step_s * self._random.uniform(0.9, 1.1)
            ends.append(end)
        steps = len(ends)
        if order.budget_s is not None:
            steps = _steps_in_time(ends, order.budget_s, order.overrun)
        job = Job(name, order, now_s, ends, steps, overhead_s=self._random.uniform(0.0, 0.2))
        out.jobs[order.update_id] = self._current[name] = job
        for share in (0.25, 0.5, 0.75):
            done = max(1, int(share * steps))
            self._at(now_s + ends[done - 1], self._progress(job, done))
        self._at(self._end_of(job), self._finish(job))
        if self._mishap(now_s):
            self._at(now_s + self._random.uniform(0.0, 2.0), self._lose(name))
        if self._mishap(now_s):  # it starts anew without having been missed
            self._at(now_s + self._random.uniform(0.0, 2.0), self._join(name))
        if self._mishap(now_s):
            self._at(now_s + self._random.uniform(0.0, 2.0), lambda at_s: [TimerFired(at_s)])
        if self._mishap(now_s):
            stale = f"{name}/{order.round - 1}"
            self._at(now_s + 0.1, lambda at_s: [WorkFailed(at_s, name, stale, "old news")])

    @staticmethod
    def _end_of(job: Job) -> float:
        return job.begin_s + job.step_ends[job.steps - 1] + job.overhead_s

    def _progress(self, job: Job, steps: int) -> Happening:
        def happen(now_s: float) -> list[Event]:
            if job.done or steps > job.steps:
                return []
            return [Progressed(now_s, job.silo, job.order.update_id, steps, steps * job.order.batch_size)]

        return happen

    def _halt(self, job: Job, now_s: float) -> None:
        """Stop after the step in work."""
        steps = next((i for i, e in enumerate(job.step_ends, start=1) if job.begin_s + e > now_s), job.steps)
        if not job.done and steps < job.steps:
            job.steps = steps
            self._at(self._end_of(job), self._finish(job))

    def _finish(self, job: Job) -> Happening:
        def happen(now_s: float) -> list[Event]:
            if job.done:
                return []  # a halted order has two ends on the heap
            job.done = True
            in_work = self._current.get(job.silo) is job
            if in_work:
                del self._current[job.silo]
                job.end_s = now_s
                if self._mishap(now_s):
                    return [WorkFailed(now_s, job.silo, job.order.update_id, "disk full")]
            good = self._arrival(job, now_s)
            bad = in_work and self._mishap(now_s)
            event = self._spoilt(good) if bad else good
            if in_work and not bad and now_s <= self._outcome.closing_s:
                self._outcome.accepted[job.order.update_id] = good.report
            events: list[Event] = [self._sent(event)]
            if self._mishap(now_s):
                delay = self._random.choice([0.0, 1.0, 10.0])
                self._at(now_s + delay, lambda at_s: [self._sent(replace(good, at_s=at_s))])
            return events

        return happen

    def _sent(self, event: UpdateArrived) -> UpdateArrived:
        """As a driver does: the payload is stored before the coordinator hears of it."""
        self._outcome.payloads[event.meta.update_id] = event.meta.samples
        return event

    @staticmethod
    def _arrival(job: Job, now_s: float) -> UpdateArrived:
        order, samples = job.order, job.steps * job.order.batch_size
        compute_s = job.step_ends[job.steps - 1]
        speed = samples / compute_s
        report = WorkReport(
            base_version=order.base_version,
            steps=job.steps,
            samples=samples,
            compute_s=compute_s,
            loss=1.0 / order.round,
            overhead_s={"send": job.overhead_s},
            windows=(Window(speed, 0.5, 0.25),),
            evaluation=Evaluation(2.0 * 50, 25.0, 50),
        )
        meta = UpdateMeta(
            update_id=order.update_id,
            silo=job.silo,
            base_version=order.base_version,
            steps=job.steps,
            samples=samples,
            examples=5000,
            nbytes=40,
            loss=report.loss,
        )
        return UpdateArrived(now_s, meta, report)

    def _spoilt(self, event: UpdateArrived) -> UpdateArrived:
        report = replace(event.report, **self._random.choice(BAD))
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
                job = self._current.get(name)
                if job is not None and job.order.update_id == update_id:
                    self._halt(job, now_s)
            case Probe(name, update_id):
                job = self._current.get(name)
                if job is not None and job.order.update_id == update_id:
                    done = sum(job.begin_s + end <= now_s for end in job.step_ends[: job.steps])
                    self._at(now_s + 0.01, self._progress(job, done))
            case Savepoint(version):
                out.remembered = version
            case Rollback(version):
                if version <= out.remembered:
                    out.faults.append(f"version {version} goes back to {out.remembered}, which is not older")
            case WakeAt(at_s):
                # The one for the end by the clock is left out: it would hide that nothing else goes on.
                if at_s != self._coordinator._policies.stop.seconds:
                    self._at(max(at_s, now_s), lambda fired_s: [TimerFired(fired_s)])
            case Evaluate(version, names):
                out.closing_s = min(out.closing_s, now_s)
                for name in names:
                    self._at(now_s + self._random.uniform(0.0, 0.5), self._evaluated(name, version))
            case Stop():
                out.closing_s = min(out.closing_s, now_s)

    def _evaluated(self, name: str, version: int) -> Happening:
        def happen(now_s: float) -> list[Event]:
            if self._mishap(now_s):
                return self._lose(name)(now_s)
            answer = Evaluated(now_s, name, version, Evaluation(2.0 * 50, 25.0, 50))
            return [answer, answer] if self._mishap(now_s) else [answer]

        return happen


def _steps_in_time(ends: list[float], budget_s: float, overrun: float) -> int:
    """The first step is always done; a later one only if it begins in time and overruns by its share at most."""
    for steps, (begin, end) in enumerate(itertools.pairwise(ends), start=1):
        if begin >= budget_s or end - budget_s > overrun * (end - begin):
            return steps
    return len(ends)
