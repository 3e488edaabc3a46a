"""What an operator asks of a run that goes on, and what comes of it.

A question is an event like any other (`fedsync.core.events.OperatorAsked`), so it is in the journal, replays, and what
it changes is in checkpoints. Each is answered once (`fedsync.core.actions.OperatorAnswered`); a question that comes
again, as after the server's death, gets the answer that it got and changes nothing.

| question | is refused if | then |
|---|---|---|
| `PauseRun` | the run is paused, or training is over | nothing is decided: no order, no commit, no end |
| `ContinueRun` | the run is not paused | the barrier is asked again, with all that came meanwhile |
| `DropSilo` | it is out already, unknown, or too few would be left | it counts as lost, and stays out when it joins |
| `ReadmitSilo` | it is not out | it joins, if it is there |
| `ChangeStop` | a number is not allowed, or training is over | the run goes by the new rules from now on |

While a run is paused, what silos have in work ends as it would, and its updates wait for the next commit. The clock
goes on: a limit in seconds may be over when the run continues. A silo that is dropped is told to halt, and what it has
in work is discarded. Updates that it had sent before count: they are in the barrier's hands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from fedsync.core.stopping import StopRules

MOST_ROUNDS = 10**12
"""That a run may be told to take; a round a millisecond would be thirty years."""


@dataclass(frozen=True, slots=True)
class PauseRun:
    """Give no order and make no version until `ContinueRun`."""


@dataclass(frozen=True, slots=True)
class ContinueRun:
    """Go on after `PauseRun`."""


@dataclass(frozen=True, slots=True)
class DropSilo:
    """Go on without a silo; ``why`` where no operator wants it, but what the silo did."""

    silo: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReadmitSilo:
    """Take a silo that was dropped in again; ``why`` as in `DropSilo`."""

    silo: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class ChangeStop:
    """End by other rules; None leaves a rule as it is.

    Args:
        rounds: as `fedsync.core.stopping.StopRules`.
        seconds: likewise, since the run began [s].
        target_accuracy: likewise.
    """

    rounds: int | None = None
    seconds: float | None = None
    target_accuracy: float | None = None

    def given(self) -> dict[str, Any]:
        """The rules that change, by name."""
        rules = {"rounds": self.rounds, "seconds": self.seconds, "target_accuracy": self.target_accuracy}
        return {name: value for name, value in rules.items() if value is not None}

    def after(self, rules: StopRules) -> StopRules:
        """The rules that were, with those that change."""
        return replace(rules, **self.given())

    def problem(self) -> str:
        """Why these are no rules; "" if they are."""
        if not self.given():
            return "no rule is named"
        if self.rounds is not None and self.rounds < 1:
            return f"{self.rounds} rounds are none; write 1 or more"
        if self.rounds is not None and self.rounds > MOST_ROUNDS:
            return f"no run has more than {MOST_ROUNDS} rounds; write fewer"
        if self.seconds is not None and not (isfinite(self.seconds) and self.seconds > 0):
            return f"{self.seconds:g} s are no time; write a number greater than 0"
        if self.target_accuracy is not None and not isfinite(self.target_accuracy):
            return f"{self.target_accuracy:g} is no accuracy"
        return ""


OperatorQuestion = PauseRun | ContinueRun | DropSilo | ReadmitSilo | ChangeStop


def wanted(asked: OperatorQuestion) -> str:
    """What a question asks for, in words."""
    return _words(asked)[0]


def said(asked: OperatorQuestion) -> str:
    """A question that was done in words, in the past tense."""
    return _words(asked)[1]


def asker(asked: OperatorQuestion) -> str:
    """The one who wants it, in words."""
    return "this server" if isinstance(asked, DropSilo | ReadmitSilo) and asked.why else "the operator"


def _words(asked: OperatorQuestion) -> tuple[str, str]:
    """What a question asks for, and what was done."""
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
