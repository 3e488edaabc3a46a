"""What must hold after every step of a coordinator, whatever a driver tells it and whatever the barrier is.

A `Watch` feeds a coordinator and keeps books of its own, from the events, the barrier's verdicts and the actions. After
each step it compares: what the barrier was shown with what happened, and the actions with what the verdicts ask for.
A broken law is an error whose notes name the law. What was told is kept as lines of a journal, to be told again.
"""

import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fedsync.common import codec
from fedsync.core.actions import (
    Action,
    Attested,
    Commit,
    Discard,
    Dispatch,
    Evaluate,
    KeepBest,
    Note,
    Rollback,
    Stop,
    WakeAt,
)
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Evaluated, Event, Progressed, SiloJoined, SiloLost, UpdateArrived, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import UpdateMeta, WorkOrder, WorkReport
from fedsync.core.state import Policies
from fedsync.core.views import SiloView
from tests.laws.kinds import policies_of
from tests.laws.verdicts import Asked, Spy, carried_out

Case = tuple[str, str, dict[str, Any]]
Change = Callable[[Policies], Policies]
"""Breaks policies on purpose, or leaves them as they are."""

CHECKPOINT = "checkpoint"
STOP = {"rounds": 60, "seconds": 100_000.0}
LAWS: Counter[str] = Counter()
"""How often each law was put to the test since the process began."""


@contextmanager
def law(name: str, times: int = 1) -> Iterator[None]:
    """What is asserted inside is this law; an error is noted to have broken it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"broken: {name}")
        raise
    LAWS[name] += times


def unchanged(policies: Policies) -> Policies:
    return policies


class Watch:
    """A coordinator under observation.

    Args:
        case: the policies.
        change: of the policies, to see a law broken.
    """

    def __init__(self, case: Case, change: Change = unchanged) -> None:
        self.case, self.change = case, change
        self.policies = change(policies_of(case, STOP))
        self._spy = Spy(self.policies.barrier)
        self._coordinator = Coordinator(replace(self.policies, barrier=self._spy))
        self._twin: Coordinator | None = None
        self.script: list[str] = []
        self.broken: str | None = None
        self.now_s = 0.0
        self.calm = False
        self.books = Books(self.policies)
        self.alarms: set[float] = set()
        self.commits: list[int] = []

    def checkpoint(self) -> None:
        """From here on a coordinator that was restored from this one's state decides the same."""
        self._write(CHECKPOINT)
        with self.told():
            saved = pickle.dumps(self._coordinator.state())
            self._twin = Coordinator(self.policies)
            self._twin.restore(pickle.loads(saved))

    def step(self, at_s: float, events: list[Event]) -> JournalEntry:
        """One batch of events; returns what was decided.

        Raises:
            Exception: a law is broken.
        """
        self._write(codec.dumps(JournalEntry(at_s, tuple(events), (), "")))
        self.now_s = at_s
        with self.told():
            return self._checked(at_s, events)

    def _write(self, line: str) -> None:
        if not self.calm:
            self.script.append(line)

    @contextmanager
    def told(self) -> Iterator[None]:
        """An error inside is remembered as the law that it breaks."""
        try:
            yield
        except Exception as error:
            self.broken = self.broken or next(iter(getattr(error, "__notes__", [])), repr(error))
            raise

    def _checked(self, at_s: float, events: list[Event]) -> JournalEntry:
        books, spy = self.books, self._spy
        spy.asked.clear()
        entry = self._coordinator.handle(events, at_s)
        if self._twin is not None:
            with law("a restored coordinator goes on as the first would have"):
                assert self._twin.handle(events, at_s) == entry
        with law("the best is kept before the model changes"):
            assert not any(isinstance(action, KeepBest) for action in entry.actions[1:])
        actions = [action for action in entry.actions if not isinstance(action, Note | Attested | KeepBest)]
        with law("what happened is absorbed in order"):
            discards = [update_id for event in events for update_id in books.absorb(event)]
            head, actions = actions[: len(discards)], actions[len(discards) :]
            assert [action.update_id for action in head if isinstance(action, Discard)] == discards
        if books.begun_s is None and any(isinstance(action, Dispatch) for action in actions):
            books.begun_s = at_s
            with law("the clock of the end runs from the first order"):
                assert actions.pop(0) == WakeAt(books.end_s)
        self.alarms = {alarm for alarm in self.alarms if alarm > at_s}
        books.decided(at_s, actions, spy.asked)
        self._alarms(at_s, entry, spy.asked)
        self.commits.append(books.commits)
        return entry

    def _alarms(self, at_s: float, entry: JournalEntry, asked: list[Asked]) -> None:
        books = self.books
        new = [action.at_s for action in entry.actions if isinstance(action, WakeAt)]
        moved = any(isinstance(action, Commit | Rollback | Dispatch) for action in entry.actions)
        with law("no alarm is set for the past, nor for now where nothing was done"):
            early = [alarm for alarm in new if alarm < at_s or (alarm == at_s and not moved)]
            assert early == [] or early == [books.end_s], f"{early} at {at_s}"
        self.alarms.update(alarm for alarm in new if alarm != books.end_s)
        if books.closing:
            return
        wake_s = asked[-1].verdict.wake_at_s
        if wake_s is not None and wake_s > at_s:
            with law("a barrier is asked again when it wants to be"):
                assert any(alarm <= wake_s for alarm in self.alarms), f"nobody wakes it at {wake_s}"
        busy = any(silo.busy for silo in books.silos.values())
        if books.silos and not busy:
            with law("somebody works, or an alarm is set"):
                assert self.alarms, f"all of {list(books.silos)} are idle for ever"


class Books:
    """What the coordinator should know, worked out from what happened, in plain steps.

    Args:
        policies: of the coordinator.
    """

    def __init__(self, policies: Policies) -> None:
        self.policies, self.stop = policies, policies.stop
        self.silos: dict[str, SiloView] = {}
        self.pending: dict[str, UpdateMeta] = {}
        self.speeds: dict[str, float] = {}
        self.overheads: dict[str, list[float]] = {}
        self.found_caps: dict[str, int] = {}
        self.issued: Counter[str] = Counter()
        self.orders: dict[str, tuple[str, WorkOrder]] = {}
        self.newest: dict[str, int] = {}
        self.proven: set[str] = set()
        self.fate: dict[str, str] = {}
        self.halted: set[str] = set()
        self.version = self.commits = 0
        self.closing = self.stopped = False
        self.begun_s: float | None = None
        self.awaiting: set[str] = set()

    @property
    def end_s(self) -> float:
        """When the clock ends the run, if nothing else does."""
        return (self.begun_s or 0.0) + (math.inf if self.stop.seconds is None else self.stop.seconds)

    # What happens.

    def absorb(self, event: Event) -> list[str]:
        """Take note of an event; returns the updates that it has discarded."""
        match event:
            case UpdateArrived(at_s, meta, report):
                return self._arrived(at_s, meta, report)
            case SiloJoined(at_s, name, facts):
                gone = self._given_up(name)
                self.awaiting.discard(name)
                if 1 <= facts.examples <= 10**9:
                    self.silos[name] = SiloView(facts, since_s=at_s)
                else:
                    self.silos.pop(name, None)
                return gone
            case SiloLost(_, name, _):
                gone = self._given_up(name)
                self.silos.pop(name, None)
                self.awaiting.discard(name)
                self.newest.pop(name, None)
                return gone
            case WorkFailed(at_s, name, update_id, _) if self.in_work(name) == update_id:
                self._fail(name, at_s)
                return [update_id]
            case Progressed(_, name, update_id, steps, _) if self.in_work(name) == update_id:
                order = self.orders[update_id][1]
                self.silos[name] = replace(self.silos[name], progress_steps=min(max(steps, 0), order.max_steps))
            case Evaluated(_, name, version) if name in self.awaiting and version == self.version:
                self.awaiting.discard(name)
        return []

    def in_work(self, name: str) -> str | None:
        """Update id of the silo's order in work."""
        silo = self.silos.get(name)
        return silo.order.update_id if silo is not None and silo.order is not None else None

    def _given_up(self, name: str) -> list[str]:
        update_id = self.in_work(name)
        if update_id is None:
            return []
        self.fate[update_id] = "discarded"
        return [update_id]

    def _fail(self, name: str, at_s: float) -> None:
        silo = self.silos[name]
        self.fate[self.in_work(name) or ""] = "discarded"
        self.silos[name] = replace(silo, order=None, since_s=at_s, failures=silo.failures + 1, progress_steps=0)

    def _arrived(self, at_s: float, meta: UpdateMeta, report: WorkReport) -> list[str]:
        name, update_id = meta.silo, meta.update_id
        if self.in_work(name) != update_id:
            return [] if update_id in self.pending else [update_id]
        silo, order = self.silos[name], self.orders[update_id][1]
        if not good(order, meta, report):
            self._fail(name, at_s)
            return [update_id]
        self.proven.add(name)
        overhead_s = max(at_s - silo.since_s - report.compute_s, 0.0)
        self.silos[name] = SiloView(
            silo.facts, clock=silo.clock + 1, since_s=at_s, samples=silo.samples + report.samples, overhead_s=overhead_s
        )
        speed, newest = report.samples / report.compute_s, getattr(self.policies.predictor, "alpha", 1.0)
        self.speeds[name] = newest * speed + (1 - newest) * self.speeds.get(name, speed)
        self.overheads[name] = [*self.overheads.get(name, []), overhead_s][-3:]
        if report.batch_cap is not None:
            self.found_caps[name] = min(report.batch_cap, self.found_caps.get(name, report.batch_cap))
        if report.evaluation is not None and report.evaluation.samples > 0 and not self.closing:
            self.newest[name] = order.base_version
        if self.closing:
            self.fate[update_id] = "discarded"
            return [update_id]
        self.pending[update_id] = meta
        return []

    # What is decided.

    def decided(self, at_s: float, actions: list[Action], asked: list[Asked]) -> None:
        """Compare what was done with what the barrier asked for; ``actions`` are those after the absorbing."""
        if self.stopped:
            with law("a stop is final"):
                assert actions == []
                assert asked == []
            return
        if self.closing:
            self._end(actions)
            return
        if self._hopeless():
            with law("a run in which every silo fails is given up"):
                self._stop(actions, failed=True)
            return
        for one in asked:
            self._not_over(at_s)
            actions = carried_out(self, one, actions, lambda: self._over(at_s), law)
        last = asked[-1].verdict if asked else None
        if self._over(at_s):
            with law("a run ends when its rule says so"):
                self._close(actions)
            return
        with law("a barrier is asked until it commits nothing more"):
            assert last is not None
            assert not last.commit
        with law("nothing is done that the barrier did not ask for"):
            assert actions == []

    def _over(self, at_s: float) -> bool:
        rounds = self.stop.rounds
        return (rounds is not None and self.commits >= rounds) or (self.begun_s is not None and at_s >= self.end_s)

    def _not_over(self, at_s: float) -> None:
        with law("nothing is decided any more in a run that is over"):
            assert not self._over(at_s)

    def _hopeless(self) -> bool:
        silos = self.silos.values()
        if not silos or any(silo.busy or silo.failures < 3 for silo in silos):
            return False
        return self.proven <= self.silos.keys() or min(silo.failures for silo in silos) >= 1000

    def _close(self, actions: list[Action]) -> None:
        self.closing = True
        if actions and isinstance(actions[0], Evaluate):
            ask = actions.pop(0)
            assert ask == Evaluate(self.version, tuple(self.silos))
            self.awaiting = set(self.silos)
        else:
            unknown = [name for name in self.silos if self.newest.get(name) != self.version]
            assert not unknown, f"{unknown} do not evaluate the last version"
        self._end(actions)

    def _end(self, actions: list[Action]) -> None:
        if self.awaiting:
            with law("the last version waits for every evaluation"):
                assert actions == []
        else:
            with law("a run is over once all have answered"):
                self._stop(actions, failed=False)

    def _stop(self, actions: list[Action], *, failed: bool) -> None:
        left = {*self.pending, *(order for name in self.silos if (order := self.in_work(name)) is not None)}
        named = [action.update_id for action in actions[:-1] if isinstance(action, Discard)]
        with law("the end names all that is left"):
            assert isinstance(actions[-1], Stop)
            assert actions[-1].failed is failed
            assert len(named) == len(actions) - 1
            assert set(named) == left
            assert len(named) == len(left)
        self.fate.update(dict.fromkeys(named, "discarded"))
        self.pending.clear()
        self.closing = self.stopped = True


def good(order: WorkOrder, meta: UpdateMeta, report: WorkReport) -> bool:
    """Whether a report may count, in the words of the protocol."""
    most = report.steps * order.batch_size
    return (
        report.base_version == order.base_version
        and 1 <= report.steps <= order.max_steps
        and 1 <= report.samples <= most
        and (meta.steps, meta.samples) == (report.steps, report.samples)
        and (report.loss is None or math.isfinite(report.loss))
        and 0 < report.compute_s < math.inf
        and all(0 <= seconds <= 1e9 for seconds in report.overhead_s.values())
        and all(1e-9 <= speed <= 1e9 for speed in (report.samples / report.compute_s, *_speeds(report)))
        and (report.batch_cap is None or report.batch_cap >= 1)
    )


def _speeds(report: WorkReport) -> list[float]:
    return [window.speed for window in report.windows]
