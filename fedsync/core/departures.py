"""Cleanup of orders that end without an update, and of lost silos."""

from __future__ import annotations

from dataclasses import replace

from fedsync.core.actions import Action, Discard
from fedsync.core.state import MAX_FAILURES, CoordinatorState
from fedsync.evaluation import final_evaluation as closing


def fail_order(state: CoordinatorState, name: str, at_s: float, *, away: bool = False) -> None:
    """End a silo's order in work without a usable update; no failure is counted for a silo that is ``away``."""
    silo = state.silos[name]
    assert silo.order is not None
    if silo.order.scores_only:
        state.pending_evaluations.discard(name)
    if silo.order.apart:
        closing.apart(state).fail(name)
    state.end_evaluation(silo.order.base_version, name, None)
    state.silos[name] = replace(silo.failed(at_s), failures=silo.failures) if away else silo.failed(at_s)
    if state.silos[name].failures >= MAX_FAILURES:
        state.passes.leave(name)


def give_up_orders(state: CoordinatorState, name: str, reason: str, actions: list[Action]) -> None:
    """Discard all orders of a silo that has lost them."""
    silo = state.silos.get(name)
    for order in () if silo is None else silo.orders:
        actions.append(Discard(order.update_id, reason))
        fail_order(state, name, state.silos[name].since_s)
    if name in state.awaiting:
        if closing.decides(state):
            state.scores.end(state.version, name, None)
        state.awaiting.discard(name)


def lose(state: CoordinatorState, name: str, reason: str, actions: list[Action]) -> None:
    """Remove a silo, with its orders."""
    give_up_orders(state, name, reason, actions)
    state.awaiting.discard(name)
    state.pending_evaluations.discard(name)
    state.silos.pop(name, None)
    state.scores.forget(name)
    state.passes.leave(name)
