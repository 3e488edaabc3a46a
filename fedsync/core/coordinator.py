"""Coordinator of a run: gets events, asks the policies, and returns actions, which a driver (main loop) carries out.

`Coordinator.handle` takes a batch of events and a time, and returns actions and a reason. It never sleeps, reads a
clock, draws global randomness or touches an array, so replaying a journal's events on a new coordinator gives the same
actions. It absorbs a whole batch before any decision, so silos that report at the same time are seen together.

States of a silo in `CoordinatorState`:

| state | condition | event | next |
|---|---|---|---|
| absent | not in ``silos`` | `SiloJoined` | idle; absent if its `SiloFacts` are invalid, or an extension refuses it |
| idle | ``order`` is None | the barrier releases it: `Dispatch` | busy |
| busy | has an ``order`` | `UpdateArrived`, and the report is sound | idle; the update is pending |
| | | `WorkFailed`, or the report is not sound | idle, with one more failure; the update is discarded |
| | | `SiloJoined`: it has lost its order | idle; the update is discarded |
| idle, busy | | `SiloLost` | absent; an update in work is discarded |
| failed | idle, `MAX_FAILURES` in a row | as idle; a sound update or `SiloJoined` resets the count | busy, idle |
| any | the operator drops it | `OperatorAsked`; a `SiloJoined` is ignored until readmission | absent |

An update is *in work*, then *pending* until a barrier commits or discards it. Each update is named in exactly one
`Commit` or `Discard`. A late or duplicate answer is discarded too.

States of the run:

| state | condition | decisions |
|---|---|---|
| waiting, running | ``closing`` is None | the barrier is asked; it waits for ``min_silos`` first |
| paused | the same, and an operator paused it | none; see `fedsync.core.operator.operator_commands` |
| closing | ``closing`` has the reason | silos score the last version (`fedsync.evaluation.final_evaluation`) |
| stopped | ``stopped`` | `Stop` was given; later events have no visible effect |

The run closes when a stop rule fires, and stops when all evaluations are in. It stops at once, as failed, when every
silo has failed and no other silo is expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from fedsync.common.errors import ConfigError, FedSyncError, PolicyError, ProtocolError
from fedsync.core.actions import Action, Commit, Discard, KeepBest, Note, Rollback, Savepoint, Stop, WakeAt
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
from fedsync.core.journal import JournalEntry
from fedsync.core.order_lifecycle import fail_order, give_up_order, hurry, lose, release
from fedsync.core.orders import Presence, SiloFacts, Split, UpdateMeta
from fedsync.core.report_checks import check_facts, check_report, usable
from fedsync.core.speed.forecasts import Forecasts
from fedsync.core.speed.sizing import Adaptation, Plan
from fedsync.core.state import COORDINATOR, CoordinatorState, Policies, fill, named
from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.evaluation import final_evaluation as closing
from fedsync.evaluation.version_scores import Scores


class Coordinator:
    """Decision core of a run. Asks the policies in order: absorb, score, stop?, barrier, commit, size, dispatch."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._state = CoordinatorState(
            Forecasts(policies.predictor, policies.declared_speeds, policies.sizing.fitter),
            Adaptation(policies.sizing),
            barrier=policies.barrier.init(),
            scores=Scores(policies.metrics),
        )
        for build in policies.extensions:
            if (extension := build()) is not None:
                self._state.extensions.add(extension)
        if policies.apart:
            self._state.extensions.own("apart")
        self._recent: deque[JournalEntry] = deque(maxlen=5)
        # A cache only: a checkpoint leaves it out.
        self._plan: tuple[int, Plan] | None = None

    @property
    def stopped(self) -> bool:
        return self._state.stopped

    @property
    def version(self) -> int:
        return self._state.version

    @property
    def best(self) -> KeepBest | None:
        leader = self._state.best
        return None if leader.score is None else KeepBest(leader.score, leader.value)

    @property
    def able(self) -> bool:
        """Whether the run can progress: enough silos are present that do not fail, or others are expected."""
        state, least = self._state, self._policies.least
        expected = any(each.expects for each in state.extensions.values())
        return state.closing is not None or expected or state.failures.able(state.silos, least)

    @property
    def paused(self) -> bool:
        return bool(self._state.extensions.paused())

    @property
    def steered(self) -> tuple[Collection[str], Collection[str]]:
        """Ids of the newest answered operator requests, and names of the dropped silos."""
        steering = self._state.extensions.get("steering")
        return getattr(steering, "answered", ()), getattr(steering, "dropped", ())

    @property
    def unlearned(self) -> bool:
        return self._policies.predicts and self._state.forecasts.unlearned

    def state(self) -> Mapping[str, Any]:
        return {**named(self._state, COORDINATOR), "extensions": self._state.extensions.states()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of a coordinator with the same policies; later decisions are identical."""
        fill(self._state, COORDINATOR, state)
        self._state.extensions.restore(state["extensions"])
        self._follow_operator()

    def handle(self, events: Iterable[Event], now_s: float) -> JournalEntry:
        """Absorb events, decide, and return the journal entry; the events of one batch count as simultaneous.

        ``now_s`` is monotonic seconds since the run began.

        Raises:
            PolicyError: a policy broke its contract.
            ConfigError: the present silos cannot be served as configured.
        """
        batch, best = tuple(events), self.best
        actions: list[Action] = []
        # Absorb all events before deciding: else the first silo to join would get the whole global batch.
        for event in batch:
            self._absorb(event, actions)
            for each in self._state.extensions.values():
                each.on_event(event)
        reason = "" if self._state.stopped else self._advance(now_s, actions)
        if self.best is not None and self.best != best:
            # First: the other actions delete its updates, and with them the model that they started from.
            actions.insert(0, self.best)
        entry = JournalEntry(now_s, batch, tuple(actions), reason)
        self._recent.append(entry)
        return entry

    # Absorbing: every branch leaves the silo either idle or busy with a known order.

    def _absorb(self, event: Event, actions: list[Action]) -> None:
        state = self._state
        match event:
            case UpdateArrived():
                self._absorb_update(event, actions)
            case SiloJoined(at_s, name, facts):
                give_up_order(state, name, "the silo joined again", actions)
                self._admit(at_s, name, facts, actions)
            case SiloLost(at_s, name, reason):
                lose(state, name, f"the silo was lost: {reason}", actions)
                for each in state.extensions.values():
                    each.on_loss(name, at_s)
            case WorkFailed(at_s, name, update_id, reason, back_s):
                if state.order_of(name, update_id) is not None:
                    self._mind_window(back_s)
                    excused = any(each.excuses(event) for each in state.extensions.values())
                    fail_order(state, name, at_s, away=excused)
                    state.failures.last_failure = f"{name}: {reason}"
                    actions.append(Discard(update_id, reason))
            case Progressed(_, name, update_id, steps, _):
                order = state.order_of(name, update_id)
                if order is not None:
                    done = min(max(steps, 0), order.max_steps)
                    state.silos[name] = replace(state.silos[name], progress_steps=done)
            case Evaluated(_, name, version, evaluation, pooled):
                if closing.answers(state, self._policies, event):
                    state.attest(name, pooled, self._policies, actions)
                    state.awaiting.discard(name)
                    if event.split is Split.VALIDATION:
                        state.scores.end(version, name, usable(name, evaluation, state.scores.known))
            case Spare(_, epochs):
                state.forecasts.learn(epochs)
            case OperatorAsked():
                self._obey(event, actions)
            case TimerFired():
                pass

    def _admit(self, at_s: float, name: str, facts: SiloFacts, actions: list[Action]) -> None:
        state = self._state
        if not state.extensions.admit(name, facts, at_s):
            return
        try:
            check_facts(name, facts)
            forecast = state.forecasts.first(name, facts)
        except FedSyncError as error:
            # Before the first order, the user can still fix a silo file; later, one silo must not end the whole run.
            if isinstance(error, ConfigError):
                if not state.issued:
                    raise
                actions.append(Note(f"{name} takes no part: {error}"))
            state.silos.pop(name, None)
            state.failures.last_failure = str(error)
            return
        state.silos[name] = SiloView(facts, since_s=at_s, forecast=forecast)
        self._mind_window(facts.presence)
        for each in state.extensions.values():
            each.on_join(name, facts, at_s)

    def _mind_window(self, said: Presence | float | None) -> None:
        if said is not None:
            self._state.extensions.own("attendance")

    def _absorb_update(self, event: UpdateArrived, actions: list[Action]) -> None:
        state, at_s, meta, report = self._state, event.at_s, event.meta, event.report
        order = state.order_of(meta.silo, meta.update_id)
        if order is None and meta.update_id in state.pending:
            return  # a duplicate: discarding it would delete the pending update, which has the same id
        if order is None:
            actions.append(Discard(meta.update_id, "nobody waits for it: it is late or a duplicate"))
            return
        try:
            check_report(meta.silo, order, meta, report)
        except ProtocolError as error:
            fail_order(state, meta.silo, at_s)
            state.failures.last_failure = f"{meta.silo}: {error}"
            actions.append(Discard(meta.update_id, str(error)))
            return
        state.failures.proven.add(meta.silo)
        self._mind_window(report.presence)
        state.end_evaluation(order.base_version, meta.silo, usable(meta.silo, report.evaluation, state.scores.known))
        state.attest(meta.silo, report.pooled, self._policies, actions)
        taken = state.extensions.taken(event, order, state.version)
        if taken != "" and state.closing is not None and not order.scores_only:
            taken = f"the run is over: {state.closing}"
        if taken is None:
            state.pending[meta.update_id] = meta
        elif taken or not order.apart:
            actions.append(Discard(meta.update_id, taken or "an extension keeps it out of the model"))
        if order.scores_only:
            state.pending_evaluations.discard(meta.silo)
        if report.batch_cap is not None:
            state.found_caps[meta.silo] = min(report.batch_cap, state.found_caps.get(meta.silo, report.batch_cap))
            self._plan = None
        silo = state.silos[meta.silo]
        predicts = self._policies.predicts or "attendance" in state.extensions
        forecast = state.forecasts.observe(meta.silo, report, at_s - silo.since_s) if predicts else None
        overhead_s = max(at_s - silo.since_s - report.compute_s, 0.0)
        state.silos[meta.silo] = silo.ended(at_s, report.samples, forecast, overhead_s)
        state.adaptation.observe(meta.silo, report, at_s - silo.since_s)

    def _obey(self, asked: OperatorAsked, actions: list[Action]) -> None:
        from fedsync.core.operator.operator_commands import ReadmitSilo
        from fedsync.core.operator.operator_execution import obey

        facts = obey(self._state, self._policies, asked, actions)
        if facts is not None and isinstance(asked.question, ReadmitSilo):
            self._admit(asked.at_s, asked.question.silo, facts, actions)
        self._follow_operator()

    # Deciding.

    def _advance(self, now_s: float, actions: list[Action]) -> str:
        state = self._state
        state.judge(self._policies, state.scores.settle(), actions)
        if state.begun_s is not None:
            self._set_alarm(state.begun_s, actions, len(actions))
        reason = ""
        if state.closing is None and (paused := state.extensions.paused()):
            return paused
        if state.closing is None:
            hopeless = state.failures.hopeless(state.silos, self._policies.least)
            if hopeless is not None:
                self._stop(hopeless, actions, failed=True)
                return hopeless
            state.closing = state.due(self._policies, now_s)
            if state.closing is not None:
                closing.begin(state, self._policies, actions)
            else:
                before = len(actions)
                reason = self._ask_barrier(now_s, actions)
                if state.begun_s is None and state.issued:
                    state.begun_s = now_s
                    self._set_alarm(now_s, actions, before)
                if state.closing is None:
                    return reason
        if closing.advance(state, self._policies, self._current_plan, tuple(self._recent), now_s, actions):
            self._stop(state.closing, actions, failed=False)
        return reason or state.closing

    def _set_alarm(self, begun_s: float, actions: list[Action], place: int) -> None:
        state, seconds = self._state, self._policies.stop.seconds
        if not state.alarm_set and seconds is not None:
            actions.insert(place, WakeAt(begun_s + seconds))
        state.alarm_set = True

    def _ask_barrier(self, now_s: float, actions: list[Action]) -> str:
        state, reasons = self._state, []
        silos, pending = MappingProxyType(state.silos), MappingProxyType(state.pending)
        work = self._current_plan()
        while True:  # a commit changes the barrier's view, so it is asked again
            view = ClusterView(now_s, state.version, silos, pending, work, self._policies.seed, state.silos)
            view, told = state.extensions.shown(view)
            state.barrier, verdict = self._policies.barrier.decide(state.barrier, view)
            reasons += [*told, *([verdict.reason] if verdict.reason else [])]
            if verdict.commit or verdict.rollback or verdict.discard or verdict.savepoint:
                self._change_model(verdict, actions)
            if verdict.commit:
                state.closing = state.due(self._policies, now_s)
                if state.closing is not None:
                    closing.begin(state, self._policies, actions)
                    return "; ".join([*reasons, state.closing])
            if verdict.release and state.adaptation.advance(state.version, silos, state.found_caps, actions):
                self._plan = None
                work = self._current_plan()
            release(state, self._policies, verdict, work, self._recent, now_s, actions)
            hurry(state, verdict, self._recent, actions)
            if not verdict.commit:
                state.wake_by(verdict.wake_at_s, now_s, actions)
                for each in state.extensions.values():
                    state.wake_by(each.wake_s(now_s), now_s, actions)
                return "; ".join(reasons)

    def _current_plan(self) -> Plan:
        roster = self._state.silos
        if self._plan is None or self._plan[0] != roster.revision:
            self._plan = (roster.revision, self._state.adaptation.plan(roster, self._state.found_caps))
        return self._plan[1]

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
        if verdict.savepoint:
            actions.append(Savepoint(state.version))

    def _follow_operator(self) -> None:
        self._plan = None
        stop = getattr(self._state.extensions.get("steering"), "stop", None)
        if stop is not None:
            self._policies = replace(self._policies, stop=stop)

    def _commit(self, update_ids: tuple[str, ...]) -> Commit:
        state = self._state
        metas: list[UpdateMeta] = []
        for update_id in sorted(update_ids):
            meta = state.pending.pop(update_id, None)
            if meta is None:
                raise PolicyError(f"the barrier commits {update_id!r}, which is not pending", self._recent)
            metas.append(meta)
        state.version += 1
        state.commits += 1
        for each in state.extensions.values():
            each.on_commit(state.version, metas)
        return self._policies.weighed(metas, state.version, tuple(self._recent))

    # Ending.

    def _stop(self, reason: str, actions: list[Action], *, failed: bool) -> None:
        state = self._state
        in_work = (silo.order.update_id for silo in state.silos.values() if silo.order is not None)
        left = [*state.pending, *in_work]
        actions.extend(Discard(update_id, f"the run is over: {reason}") for update_id in left)
        state.pending.clear()
        state.closing = reason
        state.stopped = True
        actions.append(Stop(reason, failed))
