"""How a run ends: silos answer questions about what came of it, then it stops.

| step | what goes out | until |
|---|---|---|
| tally | where figures are sealed: orders that only score; what is in work is halted | all are in, failed or lost |
| commit | likewise: their updates, which change nothing, as one more version | |
| questions | `Evaluate`, one question of `QUESTIONS` after the other | all have answered |

| question | why | not asked if |
|---|---|---|
| last version, validation split | it may be the best; sealed, it brings the sum of scores | all have evaluated it |
| last version, test split | what the run came to, by samples that decided nothing | nobody has a validation split |
| best version, test split | likewise | likewise, or it is the last |

Sealed figures can be added up in a version only. So the last version of training is scored by a version that follows
it, under all rules that hold for versions: who must be in it, what it is built on, and that there is one of it. A silo
evaluates one model for the server once, so a run does not end while silos are at work on the newest version, which they
have evaluated then. Only a time limit ends it there, and leaves that version without a score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedsync.core.actions import Action, Discard, Dispatch, Evaluate, HaltEarly
from fedsync.core.events import Evaluated
from fedsync.core.orders import Split, Subject
from fedsync.core.sizing import Plan
from fedsync.core.state import MAX_FAILURES, CoordinatorState, Policies
from fedsync.core.stopping import StopRules
from fedsync.core.views import Verdict

QUESTIONS = ((Subject.LAST, Split.VALIDATION), (Subject.LAST, Split.TEST), (Subject.BEST, Split.TEST))
"""In this order: the first may still change which version is the best."""


def due(state: CoordinatorState, policies: Policies, now_s: float) -> str | None:
    """Why the run should end now; None if it should go on."""
    rules = policies.stop
    if policies.tally and _evaluated(state):
        rules = StopRules(seconds=rules.seconds)
    return rules.decide(state.commits, now_s, state.scores, state.passes)


def begin(state: CoordinatorState, policies: Policies, actions: list[Action]) -> None:
    """Training is over."""
    if not (policies.tally and state.commits) or _evaluated(state):
        _ask(state, policies, actions)
        return
    actions.extend(Discard(update_id, f"the run is over: {state.closing}") for update_id in state.pending)
    state.pending.clear()
    here = [name for name, silo in state.silos.items() if silo.failures < MAX_FAILURES]
    here.sort(key=lambda name: state.silos[name].busy)
    state.owing = set(here[: policies.tally])
    for name in here[: policies.tally]:
        order = state.silos[name].order
        if order is not None and state.halted.get(name) != order.update_id:
            state.halted[name] = order.update_id
            actions.append(HaltEarly(name, order.update_id))


def advance(
    state: CoordinatorState,
    policies: Policies,
    plan: Callable[[], Plan],
    recent: Sequence[object],
    now_s: float,
    actions: list[Action],
) -> bool:
    """Take the next steps; whether all are behind.

    Args:
        state: of the run, which is closing.
        policies: of the run.
        plan: the work of each silo.
        recent: entries of the journal, for errors.
        now_s: seconds since the run began.
        actions: of the coordinator.
    """
    if not state.asked:
        for name in [name for name in state.silos if name in state.owing and not state.silos[name].busy]:
            order = replace(state.next_order(name, plan()[name], Verdict(), policies.seed), learning_rate=0.0)
            state.silos[name] = state.silos[name].begun(order, now_s)
            actions.append(Dispatch(name, order))
        if state.owing:
            return False
        if state.pending:
            metas = [state.pending.pop(update_id) for update_id in sorted(state.pending)]
            state.version += 1
            actions.append(policies.weighed(metas, state.version, recent))
    while not state.awaiting and state.asked < len(QUESTIONS):
        _ask(state, policies, actions)
    return not state.awaiting


def answers(state: CoordinatorState, event: Evaluated) -> bool:
    """Whether it is the answer of a silo that the last question waits for."""
    asked = (event.subject, event.split) == QUESTIONS[state.asked - 1]
    return event.silo in state.awaiting and asked and event.version == _version(state, event.subject)


def decides(state: CoordinatorState) -> bool:
    """Whether the answers to the last question may change which version is the best."""
    return QUESTIONS[state.asked - 1][1] is Split.VALIDATION


def _ask(state: CoordinatorState, policies: Policies, actions: list[Action]) -> None:
    """Ask the next question, if it is worth asking, and anybody is to evaluate anything."""
    subject, split = QUESTIONS[state.asked]
    state.asked += 1
    version = _version(state, subject)
    if not (state.silos and policies.evaluate):
        return
    if split is Split.VALIDATION:
        if state.scores.covers(version, state.silos):
            return
        state.scores.restart(version)
        state.scores.begin(version, len(state.silos))
    elif policies.tally or not _worth_testing(state, subject):
        return
    state.awaiting = set(state.silos)
    actions.append(Evaluate(version, tuple(state.silos), split, subject))


def _worth_testing(state: CoordinatorState, subject: Subject) -> bool:
    """Whether the test split tells of a model what nobody knows yet."""
    known = subject is Subject.BEST and state.best.version in (-1, state.version)
    return not known and any(silo.facts.validates for silo in state.silos.values())


def _version(state: CoordinatorState, subject: Subject) -> int:
    return state.best.version if subject is Subject.BEST else state.version


def _evaluated(state: CoordinatorState) -> bool:
    """Whether silos have evaluated the newest version for an update that is in work or waits for its commit."""
    version = state.version
    waiting = any(meta.base_version == version for meta in state.pending.values())
    return waiting or state.scores.under_way(version)
