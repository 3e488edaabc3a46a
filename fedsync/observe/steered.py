"""History of operator commands (pause, drop, ...) in a run and their effects, from the run's journal."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsync.core.actions import OperatorAnswered
from fedsync.core.events import OperatorAsked, SiloLost
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import (
    ChangeStop,
    ContinueRun,
    DropSilo,
    OperatorQuestion,
    PauseRun,
    ReadmitSilo,
    asker,
    said,
    wanted,
)

MOST_ASKED = 50


@dataclass(frozen=True, slots=True)
class OperatorMark:
    """Operator command with its outcome; ``refused`` is the reason of a refusal, "" if it was executed."""

    at_s: float
    text: str
    refused: str
    who: str = "the operator"


def answered_in(entry: JournalEntry) -> list[tuple[OperatorQuestion, str]]:
    """Return commands that an entry answers for the first time, each with the reason of its refusal, or ""."""
    asked = {event.request: event.question for event in entry.events if isinstance(event, OperatorAsked)}
    answers = [action for action in entry.actions if isinstance(action, OperatorAnswered) and not action.again]
    return [(asked[one.request], one.refused) for one in answers if one.request in asked]


def drops_in(entry: JournalEntry) -> list[SiloLost]:
    """Return dropped silos as `SiloLost` events for the ledger; the reason is empty if an operator dropped the silo."""
    done = [question for question, refused in answered_in(entry) if not refused]
    return [SiloLost(entry.at_s, each.silo, each.why) for each in done if isinstance(each, DropSilo)]


class SteeredRun:
    """State that operator commands changed; updated entry by entry from a journal."""

    def __init__(self, stop: Mapping[str, Any] | None = None) -> None:
        self.stop: dict[str, Any] = {key: value for key, value in (stop or {}).items() if value is not None}
        self.paused = False
        self.dropped: set[str] = set()
        self.marks: deque[OperatorMark] = deque(maxlen=MOST_ASKED)
        self.asked = 0

    def add(self, entry: JournalEntry) -> list[SiloLost]:
        for question, refused in answered_in(entry):
            self.asked += 1
            text = wanted(question) if refused else said(question)
            self.marks.append(OperatorMark(entry.at_s, text, refused, asker(question)))
            if not refused:
                self._change(question)
        return drops_in(entry)

    def since(self, asked: int) -> list[OperatorMark]:
        new = min(self.asked - asked, len(self.marks))
        return list(self.marks)[len(self.marks) - new :]

    def _change(self, question: OperatorQuestion) -> None:
        match question:
            case PauseRun() | ContinueRun():
                self.paused = isinstance(question, PauseRun)
            case DropSilo(name):
                self.dropped.add(name)
            case ReadmitSilo(name):
                self.dropped.discard(name)
            case ChangeStop():
                self.stop.update(question.given())
