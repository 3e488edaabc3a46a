"""Begin and end of orders: orders from a barrier's verdict, and cleanup after failed orders and lost silos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedsync.common.errors import PolicyError
from fedsync.core.actions import Action, Discard, Dispatch, HaltEarly, Probe
from fedsync.core.orders import LocalWork, WorkOrder
from fedsync.core.state import CoordinatorState, Policies
from fedsync.core.views import Verdict
from fedsync.evaluation import final_evaluation as closing


def fail_order(state: CoordinatorState, name: str, at_s: float, *, away: bool = False) -> None:
    """End a silo's order in work without a usable update; for a silo that is ``away``, no failure is counted."""
    silo = state.silos[name]
    assert silo.order is not None
    if silo.order.scores_only:
        state.pending_evaluations.discard(name)
    if silo.order.apart:
        closing.apart(state).fail(name)
    state.end_evaluation(silo.order.base_version, name, None)
    state.silos[name] = replace(silo.failed(at_s), failures=silo.failures) if away else silo.failed(at_s)


def give_up_order(state: CoordinatorState, name: str, reason: str, actions: list[Action]) -> None:
    silo = state.silos.get(name)
    if silo is not None and silo.order is not None:
        actions.append(Discard(silo.order.update_id, reason))
        fail_order(state, name, silo.since_s)
    if name in state.awaiting:
        if closing.decides(state):
            state.scores.end(state.version, name, None)
        state.awaiting.discard(name)


def lose(state: CoordinatorState, name: str, reason: str, actions: list[Action]) -> None:
    scores = name in state.pending_evaluations
    give_up_order(state, name, reason, actions)
    state.pending_evaluations.discard(name)
    state.silos.pop(name, None)
    state.scores.forget(name)
    if (scores and not (state.pending_evaluations or state.pending)) or (state.scoring_ids and not state.silos):
        closing.sum_again(state, actions)


def release(
    state: CoordinatorState,
    policies: Policies,
    verdict: Verdict,
    work: Mapping[str, LocalWork],
    recent: Sequence[object],
    now_s: float,
    actions: list[Action],
) -> None:
    """Give an order based on the newest version to each released silo. Raises `PolicyError` if a released silo is not
    idle.
    """
    if not verdict.release:
        return
    evaluators = policies.evaluators(state.silos, state.version)
    for name in verdict.release:
        silo = state.silos.get(name)
        if silo is None or silo.order is not None:
            raise PolicyError(f"the barrier releases {name!r}, which is not an idle silo", recent)
        order = state.next_order(name, work[name], verdict, policies.seed, evaluate=name in evaluators)
        if state.extensions:
            order = state.extensions.ordered(order)
        state.silos[name] = silo.begun(order, now_s)
        actions.append(Dispatch(name, order))
        state.scores.begin(state.version, 1, {name} - state.failures.proven if order.evaluate else ())


def hurry(state: CoordinatorState, verdict: Verdict, recent: Sequence[object], actions: list[Action]) -> None:
    """Add early stops (once an order) and progress probes; errors as in `release`."""
    for name in verdict.stop_now:
        update_id = _busy_order(state, name, "stops", recent).update_id
        if state.halted.get(name) != update_id:  # once an order: drivers remember a halt
            state.halted[name] = update_id
            actions.append(HaltEarly(name, update_id))
    actions.extend(Probe(name, _busy_order(state, name, "probes", recent).update_id) for name in verdict.probe)


def _busy_order(state: CoordinatorState, name: str, verb: str, recent: Sequence[object]) -> WorkOrder:
    silo = state.silos.get(name)
    if silo is None or silo.order is None:
        raise PolicyError(f"the barrier {verb} {name!r}, which is not at work", recent)
    return silo.order
