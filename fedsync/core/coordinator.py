"""The order in which policies are asked, nothing else.

`Coordinator.handle` absorbs a batch of events and answers with actions. It never sleeps, reads a
clock, draws global randomness or touches an array; drivers do. Its state pickles, and feeding it the
events of a journal reproduces every action of that journal.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

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
from fedsync.core.checks import check_evaluation, check_report
from fedsync.core.curve import Curve
from fedsync.core.errors import ConfigError, PolicyError, ProtocolError
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
from fedsync.core.orders import Evaluation, SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.protocols import AnyBarrier, AnyPredictor, SpeedSample, Weigher
from fedsync.core.rng import Stream, derive_seed
from fedsync.core.scores import Scores
from fedsync.core.sizing import LocalWork, Sizing
from fedsync.core.stopping import StopRules
from fedsync.core.views import ClusterView, SiloView, Verdict

MAX_FAILURES = 3
"""Orders that every silo must fail in a row before the run is given up."""


@dataclass(frozen=True, slots=True)
class Policies:
    """Everything that decides, as values.

    Args:
        seed: of the run.
        predictor: forecasts a silo's speed.
        sizing: turns forecasts into batch sizes, steps and learning rates.
        barrier: decides commits and releases.
        weigher: weighs the updates of a commit.
        stop: when the run has done enough.
        declared_speeds: take speeds from what silos declare instead of measuring them.
    """

    seed: int
    predictor: AnyPredictor
    sizing: Sizing
    barrier: AnyBarrier
    weigher: Weigher
    stop: StopRules
    declared_speeds: bool = False


@dataclass(slots=True)
class _State:
    version: int = 0
    silos: dict[str, SiloView] = field(default_factory=dict)
    pending: dict[str, UpdateMeta] = field(default_factory=dict)
    barrier: Any = None
    predictions: dict[str, Any] = field(default_factory=dict)
    found_caps: dict[str, int] = field(default_factory=dict)
    issued: dict[str, int] = field(default_factory=dict)
    scores: Scores = field(default_factory=Scores)
    last_failure: str = ""
    closing: str | None = None
    awaiting: set[str] = field(default_factory=set)
    stopped: bool = False


class Coordinator:
    """Asks the policies in order: absorb, score, stop?, barrier, commit, size, dispatch.

    Args:
        policies: what decides.
    """

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._state = _State(barrier=policies.barrier.init())
        self._recent: deque[JournalEntry] = deque(maxlen=5)

    @property
    def stopped(self) -> bool:
        """Whether `Stop` was given."""
        return self._state.stopped

    @property
    def version(self) -> int:
        """Current model version."""
        return self._state.version

    def handle(self, events: Iterable[Event], now_s: float) -> JournalEntry:
        """Absorb what happened and decide.

        Args:
            events: in order; those of one batch count as simultaneous.
            now_s: monotonic seconds since the run began.

        Returns:
            The entry for the journal, with the actions to carry out in order.

        Raises:
            PolicyError: a policy broke its contract.
            ConfigError: the silos present cannot be served as configured.
        """
        batch = tuple(events)
        actions: list[Action] = []
        for event in batch:
            self._absorb(event, actions)
        reason = "" if self._state.stopped else self._advance(now_s, actions)
        entry = JournalEntry(now_s, batch, tuple(actions), reason)
        self._recent.append(entry)
        return entry

    # Absorbing: every branch leaves the silo either idle or busy with a known order.

    def _absorb(self, event: Event, actions: list[Action]) -> None:
        state = self._state
        match event:
            case SiloJoined(at_s, name, facts):
                self._give_up_order(name, "the silo joined again", actions)
                state.silos[name] = SiloView(facts, since_s=at_s, forecast=self._first_forecast(name, facts))
            case SiloLost(_, name, reason):
                self._give_up_order(name, f"the silo was lost: {reason}", actions)
                state.awaiting.discard(name)
                state.silos.pop(name, None)
            case WorkFailed(at_s, name, update_id, reason):
                if self._order_of(name, update_id) is not None:
                    self._fail(name, at_s, reason)
                    actions.append(Discard(update_id, reason))
            case UpdateArrived(at_s, meta, report):
                self._absorb_update(at_s, meta, report, actions)
            case Progressed(_, name, update_id, steps, _):
                if self._order_of(name, update_id) is not None:
                    state.silos[name] = replace(state.silos[name], progress_steps=steps)
            case Evaluated(_, name, version, evaluation):
                if name in state.awaiting and version == state.version:
                    state.awaiting.discard(name)
                    state.scores.end(version, self._usable(name, evaluation))
            case TimerFired():
                pass

    def _absorb_update(self, at_s: float, meta: UpdateMeta, report: WorkReport, actions: list[Action]) -> None:
        state = self._state
        order = self._order_of(meta.silo, meta.update_id)
        if order is None and meta.update_id in state.pending:
            return  # a duplicate of one that waits for its commit, which goes by the same name
        if order is None:
            actions.append(Discard(meta.update_id, "nobody waits for it: it is late or a duplicate"))
            return
        try:
            check_report(meta.silo, order, meta, report)
        except ProtocolError as error:
            self._fail(meta.silo, at_s, str(error))
            actions.append(Discard(meta.update_id, str(error)))
            return
        state.scores.end(order.base_version, report.evaluation)
        if state.closing is not None:
            actions.append(Discard(meta.update_id, f"the run is over: {state.closing}"))
        else:
            state.pending[meta.update_id] = meta
        if report.batch_cap is not None:
            state.found_caps[meta.silo] = min(report.batch_cap, state.found_caps.get(meta.silo, report.batch_cap))
        silo = state.silos[meta.silo]
        state.silos[meta.silo] = replace(
            silo,
            clock=silo.clock + 1,
            order=None,
            since_s=at_s,
            failures=0,
            samples=silo.samples + report.samples,
            overhead_s=max(at_s - silo.since_s - report.compute_s, 0.0),
            progress_steps=0,
            forecast=self._observe(meta.silo, silo, report),
        )

    def _order_of(self, name: str, update_id: str) -> WorkOrder | None:
        """The order in work at ``name``, if it is the one that ``update_id`` answers."""
        silo = self._state.silos.get(name)
        order = silo.order if silo is not None else None
        return order if order is not None and order.update_id == update_id else None

    def _fail(self, name: str, at_s: float, reason: str) -> None:
        silo = self._state.silos[name]
        assert silo.order is not None
        self._state.scores.end(silo.order.base_version, None)
        self._state.last_failure = f"{name}: {reason}"
        self._state.silos[name] = replace(silo, order=None, since_s=at_s, failures=silo.failures + 1, progress_steps=0)

    def _give_up_order(self, name: str, reason: str, actions: list[Action]) -> None:
        silo = self._state.silos.get(name)
        if silo is not None and silo.order is not None:
            actions.append(Discard(silo.order.update_id, reason))
            self._fail(name, silo.since_s, reason)
        if name in self._state.awaiting:
            self._state.scores.end(self._state.version, None)
            self._state.awaiting.discard(name)

    @staticmethod
    def _usable(name: str, evaluation: Evaluation | None) -> Evaluation | None:
        if evaluation is None:
            return None
        try:
            check_evaluation(name, evaluation)
        except ProtocolError:
            return None
        return evaluation

    # Forecasts.

    def _first_forecast(self, name: str, facts: SiloFacts) -> Curve | None:
        if not self._policies.declared_speeds:
            return self._forecast(name)
        if facts.declared_speed is None:
            raise ConfigError(
                "balancer.speeds",
                f"'declared', but silo {name!r} declares no speed",
                "Give the silo a speed in the silo file, or write `speeds: measured`",
            )
        return Curve(facts.declared_speed)

    def _observe(self, name: str, silo: SiloView, report: WorkReport) -> Curve | None:
        if self._policies.declared_speeds:
            return silo.forecast
        predictor = self._policies.predictor
        before = self._state.predictions.get(name)
        count = len(report.windows)
        sample = SpeedSample(
            speed=report.samples / report.compute_s,
            cpu=sum(window.cpu for window in report.windows) / count if count else None,
            memory=sum(window.memory for window in report.windows) / count if count else None,
        )
        self._state.predictions[name] = predictor.observe(predictor.init() if before is None else before, sample)
        return self._forecast(name)

    def _forecast(self, name: str) -> Curve | None:
        if name not in self._state.predictions:
            return None
        speed = self._policies.predictor.forecast(self._state.predictions[name])
        if speed is None:
            return None
        if not (math.isfinite(speed) and speed > 0):
            raise PolicyError(f"the predictor forecasts a speed of {speed} samples/s for {name!r}", self._recent)
        return Curve(speed)

    # Deciding.

    def _advance(self, now_s: float, actions: list[Action]) -> str:
        state = self._state
        state.scores.settle()
        if state.closing is None:
            hopeless = self._hopeless()
            if hopeless is not None:
                self._stop(hopeless, actions, failed=True)
                return hopeless
            state.closing = self._policies.stop.decide(state.version, now_s, state.scores)
            if state.closing is not None:
                self._close(actions)
            else:
                reason = self._ask_barrier(now_s, actions)
                if state.closing is None:
                    return reason
        if not state.awaiting:
            state.scores.settle()
            self._stop(state.closing, actions, failed=False)
        return state.closing

    def _ask_barrier(self, now_s: float, actions: list[Action]) -> str:
        """Ask until nothing more is committed; the last commit may end the run."""
        state, reasons = self._state, []
        while True:
            view = ClusterView(now_s, state.version, MappingProxyType(state.silos), MappingProxyType(state.pending))
            state.barrier, verdict = self._policies.barrier.decide(state.barrier, view)
            if verdict.reason:
                reasons.append(verdict.reason)
            self._change_model(verdict, actions)
            if verdict.commit:
                state.closing = self._policies.stop.decide(state.version, now_s, state.scores)
                if state.closing is not None:
                    self._close(actions)
                    return "; ".join([*reasons, state.closing])
            self._release(verdict, now_s, actions)
            for name in verdict.stop_now:
                actions.append(HaltEarly(name, self._busy_order(name, "stops").update_id))
            for name in verdict.probe:
                actions.append(Probe(name, self._busy_order(name, "probes").update_id))
            if not verdict.commit:
                if verdict.wake_at_s is not None:
                    actions.append(WakeAt(verdict.wake_at_s))
                return "; ".join(reasons)

    def _change_model(self, verdict: Verdict, actions: list[Action]) -> None:
        state = self._state
        if verdict.rollback:
            state.version += 1
            actions.append(Rollback(state.version))
        if verdict.commit:
            actions.append(self._commit(verdict.commit))
        for update_id in verdict.discard:
            if state.pending.pop(update_id, None) is None:
                raise PolicyError(f"the barrier discards {update_id!r}, which is not pending", self._recent)
            actions.append(Discard(update_id, verdict.reason))
        if verdict.remember:
            actions.append(Remember(state.version))

    def _busy_order(self, name: str, verb: str) -> WorkOrder:
        silo = self._state.silos.get(name)
        if silo is None or silo.order is None:
            raise PolicyError(f"the barrier {verb} {name!r}, which is not at work", self._recent)
        return silo.order

    def _commit(self, update_ids: tuple[str, ...]) -> Commit:
        state = self._state
        version = state.version + 1
        raw: dict[str, float] = {}
        for update_id in sorted(update_ids):
            meta = state.pending.pop(update_id, None)
            if meta is None:
                raise PolicyError(f"the barrier commits {update_id!r}, which is not pending", self._recent)
            weight = self._policies.weigher.weight(meta, version)
            if not (math.isfinite(weight) and weight > 0):
                raise PolicyError(f"the weigher gives {update_id!r} the weight {weight}", self._recent)
            raw[update_id] = weight
        total = sum(raw.values())
        state.version = version
        return Commit(version, {update_id: weight / total for update_id, weight in raw.items()})

    def _release(self, verdict: Verdict, now_s: float, actions: list[Action]) -> None:
        if not verdict.release:
            return
        state = self._state
        work = self._policies.sizing.plan(state.silos, state.found_caps)
        for name in verdict.release:
            silo = state.silos.get(name)
            if silo is None or silo.order is not None:
                raise PolicyError(f"the barrier releases {name!r}, which is not an idle silo", self._recent)
            order = self._order(name, work[name], verdict)
            state.scores.begin(state.version)
            state.silos[name] = replace(silo, order=order, since_s=now_s, progress_steps=0)
            actions.append(Dispatch(name, order))

    def _order(self, name: str, work: LocalWork, verdict: Verdict) -> WorkOrder:
        serial = self._state.issued.get(name, 0) + 1
        self._state.issued[name] = serial
        return WorkOrder(
            update_id=f"{name}/{serial}",
            base_version=self._state.version,
            round=serial,
            batch_size=work.batch_size,
            max_steps=verdict.steps.get(name, work.steps),
            learning_rate=work.learning_rate,
            seed=derive_seed(self._policies.seed, Stream.ORDER, name, serial),
            budget_s=verdict.budget_s.get(name),
            overrun=verdict.overrun,
        )

    # Ending.

    def _hopeless(self) -> str | None:
        silos = self._state.silos.values()
        if silos and all(not silo.busy and silo.failures >= MAX_FAILURES for silo in silos):
            return f"every silo failed {MAX_FAILURES} orders in a row; the last: {self._state.last_failure}"
        return None

    def _close(self, actions: list[Action]) -> None:
        """Have the final version evaluated, unless it already is."""
        state = self._state
        if state.silos and state.scores.settled < state.version:
            state.awaiting = set(state.silos)
            for _ in state.awaiting:
                state.scores.begin(state.version)
            actions.append(Evaluate(state.version, tuple(state.silos)))

    def _stop(self, reason: str, actions: list[Action], *, failed: bool) -> None:
        state = self._state
        left = [*state.pending, *(silo.order.update_id for silo in state.silos.values() if silo.order is not None)]
        actions.extend(Discard(update_id, f"the run is over: {reason}") for update_id in left)
        state.pending.clear()
        state.closing = reason
        state.stopped = True
        actions.append(Stop(reason, failed))
