"""Translation of a barrier's verdict into actions: new orders, early stops and progress probes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedsync.common.errors import PolicyError
from fedsync.core.actions import Action, Dispatch, HaltEarly, Probe
from fedsync.core.orders import LocalWork, WorkOrder
from fedsync.core.state import CoordinatorState, Policies
from fedsync.core.views import Verdict


def release(
    state: CoordinatorState,
    policies: Policies,
    verdict: Verdict,
    work: Mapping[str, LocalWork],
    recent: Sequence[object],
    now_s: float,
    actions: list[Action],
) -> None:
    """Give each released silo, and each silo that may queue, an order based on the newest version.

    Changes ``state`` and appends to ``actions``; ``recent`` journal entries are for errors.

    Raises:
        PolicyError: a released silo is not idle, or a silo with a queued order does not have exactly one order.
    """
    chosen = (*verdict.release, *verdict.queue)
    if not chosen:
        return
    evaluators, idle = policies.evaluators(state.silos, state.version), len(verdict.release)
    for place, name in enumerate(chosen):
        silo = state.silos.get(name)
        if place < idle and (silo is None or silo.order is not None):
            raise PolicyError(f"the barrier releases {name!r}, which is not an idle silo", recent)
        if silo is None or len(silo.orders) != (place >= idle):
            raise PolicyError(f"the barrier queues an order for {name!r}, which has not just one in work", recent)
        # A silo evaluates each version at most once.
        evaluated = silo.order is not None and silo.order.base_version == state.version
        evaluate = name in evaluators and not evaluated
        order = state.next_order(name, work[name], verdict, policies.seed, evaluate=evaluate)
        if state.extensions:
            order = state.extensions.ordered(order)
        state.silos[name] = silo.begun(order, now_s)
        actions.append(Dispatch(name, order))
    state.scores.begin(state.version, len(chosen))


def hurry(state: CoordinatorState, verdict: Verdict, recent: Sequence[object], actions: list[Action]) -> None:
    """Add early stops (once an order) and progress probes; arguments and errors as in `release`."""
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
