"""Execution of operator requests in the coordinator."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, cast

from fedsync.core.actions import Action, HaltEarly, Note, OperatorAnswered
from fedsync.core.availability import Attendance
from fedsync.core.events import OperatorAsked
from fedsync.core.extension import Extension
from fedsync.core.operator.operator_commands import (
    ChangeStop,
    ContinueRun,
    DropSilo,
    OperatorQuestion,
    PauseRun,
    ReadmitSilo,
    asker,
    said,
)
from fedsync.core.order_lifecycle import lose
from fedsync.core.orders import Presence, SiloFacts
from fedsync.core.state import CoordinatorState, Policies
from fedsync.core.stopping import StopRules

_OVER = "training is over, and what is left is the last evaluation"
_DROPPED = "the operator dropped the silo"
_PAUSED = "paused by the operator"

MOST_ANSWERS = 64
"""Newest answers that a run keeps, to recognise duplicate requests."""


def _moved(facts: SiloFacts, by_s: float) -> SiloFacts:
    """Count the window's durations from ``by_s`` earlier; drop the window if the next one has begun."""
    said = facts.presence
    if said is None:
        return facts
    left_s, back_s = said.left_s + by_s, said.back_s + by_s
    return replace(facts, presence=Presence(max(left_s, 0.0), back_s) if back_s > 0 else None)


@dataclass(slots=True)
class Steering(Extension):
    """Changes by operators: an extension of the coordinator from the first operator request on.

    Args:
        dropped: excluded silos, with their facts while they are connected; windows count from the start of the run.
        stop: the changed stop rules; None if unchanged.
        answered: the newest answers, by request.
    """

    name: ClassVar[str] = "steering"
    paused: bool = False
    dropped: dict[str, SiloFacts | None] = field(default_factory=dict)
    stop: StopRules | None = None
    answered: dict[str, OperatorAnswered] = field(default_factory=dict)

    def admits(self, name: str, facts: SiloFacts, at_s: float) -> bool:
        return not self.keeps_out(name, facts, at_s)

    def on_loss(self, name: str, at_s: float) -> None:
        self.keeps_out(name, None)

    def pauses(self) -> str:
        return _PAUSED if self.paused else ""

    def keeps_out(self, name: str, facts: SiloFacts | None, at_s: float = 0.0) -> bool:
        """Return whether a silo stays out. Store its facts at ``at_s``, or None if it is gone."""
        if name in self.dropped:
            self.dropped[name] = None if facts is None else _moved(facts, at_s)
        return name in self.dropped

    def readmit(self, name: str, at_s: float) -> SiloFacts | None:
        facts = self.dropped.pop(name)
        return None if facts is None else _moved(facts, -at_s)

    def remember(self, answer: OperatorAnswered) -> None:
        self.answered[answer.request] = answer
        for old in list(self.answered)[:-MOST_ANSWERS]:
            del self.answered[old]

    def refusal(self, asked: OperatorQuestion, here: Collection[str], known: Mapping[str, int], least: int) -> str:
        match asked:
            case PauseRun() if self.paused:
                return "the run is paused already"
            case ContinueRun() if not self.paused:
                return "the run is not paused"
            case DropSilo(name) if name in self.dropped:
                return f"{name!r} is out already"
            case DropSilo(name) if name not in here and name not in known:
                return f"no silo is called {name!r}; here are {', '.join(sorted(here)) or 'none'}"
            case DropSilo(name) if name in here and len(here) == 1:
                return f"{name!r} is the only silo that is here; pause the run instead, or change when it ends"
            case DropSilo(name) if name in here and len(here) - 1 < least:
                return f"{len(here) - 1} silos would be left, and silos decrypt no sum of fewer than {least} (cipher)"
            case ReadmitSilo(name) if name not in self.dropped:
                out = f"dropped are {', '.join(sorted(self.dropped))}" if self.dropped else "no silo is"
                return f"{name!r} was not dropped; {out}"
            case ChangeStop():
                return asked.problem()
        return ""


def steering_of(state: CoordinatorState) -> Steering:
    return cast("Steering", state.extensions.own(Steering.name))


def obey(state: CoordinatorState, policies: Policies, asked: OperatorAsked, actions: list[Action]) -> SiloFacts | None:
    """Answer a request, and carry it out unless refused; return the facts of a silo to admit now, if any."""
    steering = steering_of(state)
    before = steering.answered.get(asked.request)
    if before is not None:
        actions.append(replace(before, again=True))
        return None
    over = _OVER if state.closing is not None else ""
    refused = asked.problem or over or steering.refusal(asked.question, state.silos, state.issued, policies.least)
    answer = OperatorAnswered(asked.request, refused)
    steering.remember(answer)
    actions.append(answer)
    if refused:
        return None
    actions.append(Note(f"{asker(asked.question)} {said(asked.question)}, {asked.at_s:.1f} s after the server began"))
    return _do(state, policies.stop, asked, actions)


def _do(state: CoordinatorState, rules: StopRules, asked: OperatorAsked, actions: list[Action]) -> SiloFacts | None:
    steering = steering_of(state)
    match asked.question:
        case PauseRun() | ContinueRun():
            steering.paused = isinstance(asked.question, PauseRun)
        case DropSilo(name, why):
            silo = state.silos.get(name)
            steering.dropped[name] = None
            attendance = state.extensions.get(Attendance.name)
            presence = attendance.forget(name) if isinstance(attendance, Attendance) else None
            steering.keeps_out(name, None if silo is None else replace(silo.facts, presence=presence))
            if silo is not None and silo.order is not None:
                actions.append(HaltEarly(name, silo.order.update_id))
            lose(state, name, why or _DROPPED, actions)
            state.scores.forget(name, dropped=True)
        case ReadmitSilo(name):
            return steering.readmit(name, asked.at_s)
        case ChangeStop() as changed:
            steering.stop = changed.after(rules)
            if changed.seconds is not None:
                state.alarm_set = False
            if changed.rounds is not None and rules.rounds is not None and changed.rounds > rules.rounds:
                told = f"silos whose owners confirmed {rules.rounds} rounds train no further: `approve` in silo.yaml"
                actions.append(Note(told))
    return None
