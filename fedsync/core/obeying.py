"""How a coordinator does what its operator asks; what may be asked is in `fedsync.core.steering`."""

from __future__ import annotations

from dataclasses import replace

from fedsync.core.actions import Action, HaltEarly, Note, OperatorAnswered
from fedsync.core.departures import lose
from fedsync.core.events import OperatorAsked
from fedsync.core.orders import SiloFacts
from fedsync.core.presence import Presence
from fedsync.core.state import CoordinatorState, Policies
from fedsync.core.steering import ChangeStop, ContinueRun, DropSilo, PauseRun, ReadmitSilo, asker, said
from fedsync.core.stopping import StopRules

_OVER = "training is over, and what is left is the last evaluation"
_DROPPED = "the operator dropped the silo"


def obey(state: CoordinatorState, policies: Policies, asked: OperatorAsked, actions: list[Action]) -> SiloFacts | None:
    """Answer a question, and do what it wants unless it is refused.

    Args:
        state: of the run.
        policies: of the run, as they are by now.
        asked: the question.
        actions: of the coordinator.

    Returns:
        What a silo says of itself that is to be admitted now; None where there is none.
    """
    before = state.steering.answered.get(asked.request)
    if before is not None:
        actions.append(replace(before, again=True))
        return None
    over = _OVER if state.closing is not None else ""
    refused = asked.problem or over or state.steering.refusal(asked.question, state.silos, state.issued, policies.least)
    answer = OperatorAnswered(asked.request, refused)
    state.steering.remember(answer)
    actions.append(answer)
    if refused:
        return None
    actions.append(Note(f"{asker(asked.question)} {said(asked.question)}, {asked.at_s:.1f} s after the run began"))
    return _do(state, policies.stop, asked, actions)


def _do(state: CoordinatorState, rules: StopRules, asked: OperatorAsked, actions: list[Action]) -> SiloFacts | None:
    steering = state.steering
    match asked.question:
        case PauseRun() | ContinueRun():
            steering.paused = isinstance(asked.question, PauseRun)
        case DropSilo(name, why):
            silo = state.silos.get(name)
            steering.dropped[name] = None
            window = state.attendance.windows.pop(name, None)  # nobody waits for it to be back
            presence = None if window is None else Presence(*window)
            steering.keeps_out(name, None if silo is None else replace(silo.facts, presence=presence))
            if silo is not None:
                actions.extend(HaltEarly(name, order.update_id) for order in silo.orders)
            lose(state, name, why or _DROPPED, actions)
        case ReadmitSilo(name):
            return steering.readmit(name, asked.at_s)
        case ChangeStop() as changed:
            steering.stop = changed.after(rules)
            if changed.seconds is not None:
                state.timed = False
            if changed.rounds is not None and rules.rounds is not None and changed.rounds > rules.rounds:
                told = f"silos whose owners confirmed {rules.rounds} rounds train no further: `approve` in silo.yaml"
                actions.append(Note(told))
    return None
