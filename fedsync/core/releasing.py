"""What a barrier's verdict means for silos: who gets an order, who is to stop, who is to say how far it is."""

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
    """Give who is released, or may have one queued, an order from the newest version.

    Args:
        state: of the run.
        policies: of the run.
        verdict: of the barrier.
        work: of each silo.
        recent: entries of the journal, for errors.
        now_s: seconds since the run began.
        actions: of the coordinator.

    Raises:
        PolicyError: somebody is released who is not idle, or gets an order queued without having just one in work.
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
        # A silo evaluates a version once.
        evaluated = silo.order is not None and silo.order.base_version == state.version
        evaluate = name in evaluators and not evaluated
        order = state.next_order(name, work[name], verdict, policies.seed, evaluate=evaluate)
        if state.extensions:
            order = state.extensions.ordered(order)
        state.silos[name] = silo.begun(order, now_s)
        actions.append(Dispatch(name, order))
    state.scores.begin(state.version, len(chosen))


def hurry(state: CoordinatorState, verdict: Verdict, recent: Sequence[object], actions: list[Action]) -> None:
    """Tell who is to stop, once an order, and ask who is to say how far it is; arguments and errors as `release`'s."""
    for name in verdict.stop_now:
        update_id = _busy_order(state, name, "stops", recent).update_id
        if state.halted.get(name) != update_id:  # once for an order: drivers do not forget
            state.halted[name] = update_id
            actions.append(HaltEarly(name, update_id))
    actions.extend(Probe(name, _busy_order(state, name, "probes", recent).update_id) for name in verdict.probe)


def _busy_order(state: CoordinatorState, name: str, verb: str, recent: Sequence[object]) -> WorkOrder:
    silo = state.silos.get(name)
    if silo is None or silo.order is None:
        raise PolicyError(f"the barrier {verb} {name!r}, which is not at work", recent)
    return silo.order
