"""Operator requests to a run: pause, continue, drop and readmit silos, change the stop rules.

A request is an ordinary event (`fedsync.core.events.OperatorAsked`), so it is journaled and replayed, and checkpoints
contain its effect. Each request is answered once (`fedsync.core.actions.OperatorAnswered`). A repeated request, for
example after a crash of the server, gets the same answer and changes nothing.

| request | refused if | effect |
|---|---|---|
| `PauseRun` | the run is paused, or training is over | no decisions: no order, no commit, no end |
| `ContinueRun` | the run is not paused | the barrier is called with all events of the pause |
| `DropSilo` | it is dropped or unknown, or too few silos would be left | it counts as lost, and stays out if it joins |
| `ReadmitSilo` | the silo is not dropped | the silo joins if it is connected |
| `ChangeStop` | a number is invalid, or training is over | the new rules hold from now on |

During a pause, running orders finish, and their updates wait for the next commit. The clock continues, so a limit in
seconds may have passed when the run continues. The running order of a dropped silo is halted and discarded. Its earlier
updates count, because the barrier already has them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from fedsync.core.stopping import StopRules

MOST_ROUNDS = 10**12
"""Largest allowed number of rounds; at a round a millisecond, thirty years."""


@dataclass(frozen=True, slots=True)
class PauseRun:
    """Request to make no orders and no versions until `ContinueRun`."""


@dataclass(frozen=True, slots=True)
class ContinueRun:
    """Request to end a pause."""


@dataclass(frozen=True, slots=True)
class DropSilo:
    """Request to continue without a silo. ``why`` is the silo's misconduct if the server itself asks, else empty."""

    silo: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReadmitSilo:
    """Request to readmit a dropped silo; ``why`` as in `DropSilo`."""

    silo: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class ChangeStop:
    """Request to change stop rules, as in `fedsync.core.stopping.StopRules`; None keeps a rule."""

    rounds: int | None = None
    seconds: float | None = None
    target_accuracy: float | None = None

    def given(self) -> dict[str, Any]:
        rules = {"rounds": self.rounds, "seconds": self.seconds, "target_accuracy": self.target_accuracy}
        return {name: value for name, value in rules.items() if value is not None}

    def after(self, rules: StopRules) -> StopRules:
        return replace(rules, **self.given())

    def problem(self) -> str:
        if not self.given():
            return "no rule is named"
        if self.rounds is not None and self.rounds < 1:
            return f"{self.rounds} rounds are too few; write 1 or more"
        if self.rounds is not None and self.rounds > MOST_ROUNDS:
            return f"no run has more than {MOST_ROUNDS} rounds; write fewer"
        if self.seconds is not None and not (isfinite(self.seconds) and self.seconds > 0):
            return f"{self.seconds:g} s is no duration; write a number greater than 0"
        if self.target_accuracy is not None and not isfinite(self.target_accuracy):
            return f"{self.target_accuracy:g} is no accuracy"
        return ""


OperatorQuestion = PauseRun | ContinueRun | DropSilo | ReadmitSilo | ChangeStop


def wanted(asked: OperatorQuestion) -> str:
    return _words(asked)[0]


def said(asked: OperatorQuestion) -> str:
    return _words(asked)[1]


def asker(asked: OperatorQuestion) -> str:
    return "this server" if isinstance(asked, DropSilo | ReadmitSilo) and asked.why else "the operator"


def _words(asked: OperatorQuestion) -> tuple[str, str]:
    match asked:
        case PauseRun():
            return "pause the run", "paused the run"
        case ContinueRun():
            return "continue the run", "continued the run"
        case DropSilo(silo, why):
            return f"drop {silo}", f"dropped {silo}" + (f": {why}" if why else "")
        case ReadmitSilo(silo, why):
            return f"readmit {silo}", f"readmitted {silo}" + (f": {why}" if why else "")
        case ChangeStop():
            rules = _rules(asked)
            return f"end the run by {rules}", f"changed when the run ends: {rules}"


def _rules(asked: ChangeStop) -> str:
    return ", ".join(f"{name} {value:.15g}" for name, value in asked.given().items()) or "nothing"
