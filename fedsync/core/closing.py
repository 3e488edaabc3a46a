"""How a run ends: the last version is scored, then it stops.

| step | what goes out | until |
|---|---|---|
| tally | where figures are sealed: orders that only score; what is in work is halted | all are in, failed or lost |
| commit | likewise: their updates, which change nothing, as one more version | |
| evaluate | `Evaluate`, with the newest version; where figures are sealed, with the sum of scores | all have answered |

Sealed figures can be added up in a version only. So the last version of training is scored by a version that follows
it, under all rules that hold for versions: who must be in it, what it is built on, and that there is one of it. A silo
evaluates one model for the server once, so a run does not end while silos are at work on the newest version, which they
have evaluated then. Only a time limit ends it there, and leaves that version without a score.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedsync.core.actions import Action, Discard, Dispatch, Evaluate, HaltEarly
from fedsync.core.sizing import Plan
from fedsync.core.state import MAX_FAILURES, CoordinatorState, Policies
from fedsync.core.stopping import StopRules
from fedsync.core.views import Verdict


def due(state: CoordinatorState, policies: Policies, now_s: float) -> str | None:
    """Why the run should end now; None if it should go on."""
    rules = policies.stop
    if policies.tally and _evaluated(state):
        rules = StopRules(seconds=rules.seconds)
    return rules.decide(state.commits, now_s, state.scores, state.passes)


def begin(state: CoordinatorState, policies: Policies, actions: list[Action]) -> None:
    """Training is over."""
    if not (policies.tally and state.commits) or _evaluated(state):
        _evaluate(state, policies, actions)
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
    """Take the next step; whether all are behind.

    Args:
        state: of the run, which is closing.
        policies: of the run.
        plan: the work of each silo.
        recent: entries of the journal, for errors.
        now_s: seconds since the run began.
        actions: of the coordinator.
    """
    if not state.evaluating:
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
        _evaluate(state, policies, actions)
    return not state.awaiting


def _evaluate(state: CoordinatorState, policies: Policies, actions: list[Action]) -> None:
    """Have the newest version evaluated, unless all silos already did, or nobody is to evaluate anything."""
    state.evaluating = True
    if state.silos and policies.evaluate and not state.scores.covers(state.version, state.silos):
        state.awaiting = set(state.silos)
        state.scores.restart(state.version)
        state.scores.begin(state.version, len(state.awaiting))
        actions.append(Evaluate(state.version, tuple(state.silos)))


def _evaluated(state: CoordinatorState) -> bool:
    """Whether silos have evaluated the newest version for an update that is in work or waits for its commit."""
    version = state.version
    waiting = any(meta.base_version == version for meta in state.pending.values())
    return waiting or state.scores.under_way(version)
