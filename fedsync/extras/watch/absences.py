"""Reasons why silos were idle or absent (without an order) in a run, from the run's journal.

If several reasons hold at the same time, the first counts:

| reason | begins | ends |
|---|---|---|
| dropped | the operator drops the silo | the operator readmits the silo |
| away | the announced window of the silo ends (`fedsync.core.availability`) | the next window begins |
| gone | the silo is lost; before the first join: the run begins | the silo joins |
| paused | the operator pauses the run | the operator continues the run |
| waiting | none of the above | |
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from fedsync.core.availability import Attendance
from fedsync.core.events import Event, SiloJoined, SiloLost, UpdateArrived, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.operator.operator_commands import ContinueRun, DropSilo, OperatorQuestion, PauseRun, ReadmitSilo
from fedsync.observe.steered import answered_in

DROPPED, AWAY, GONE, PAUSED, WAITING = "dropped", "away", "gone", "paused", "waiting"
REASONS = (DROPPED, AWAY, GONE, PAUSED)
"""In order of precedence."""

EVERYBODY = ""
"""Pseudo silo name for pauses of the whole run."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time span without an order, in seconds, and its reason."""

    begin_s: float
    end_s: float
    why: str


def pieces(begin_s: float, end_s: float, absences: Iterable[Span]) -> list[Span]:
    """Split an idle time of a silo by reason, without gaps; neighbouring spans have different reasons.

    ``absences``: absences of the silo, in any order; they may overlap.
    """
    near = [each for each in absences if each.begin_s < end_s and each.end_s > begin_s]
    inside = {at_s for each in near for at_s in (each.begin_s, each.end_s) if begin_s < at_s < end_s}
    found: list[Span] = []
    for since_s, until_s in pairwise(sorted({begin_s, end_s, *inside})):
        reasons = {each.why for each in near if each.begin_s <= since_s and until_s <= each.end_s}
        why = next((reason for reason in REASONS if reason in reasons), WAITING)
        if found and found[-1].why == why:
            since_s = found.pop().begin_s
        found.append(Span(since_s, until_s, why))
    return found


@dataclass(slots=True)
class Absences:
    """Absences of all silos, updated entry by entry from a journal.

    ``keep``: number of newest absences kept for each silo and reason; None keeps all.
    """

    keep: int | None = None
    _over: defaultdict[tuple[str, str], deque[Span]] = field(init=False)
    _since_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _attendance: Attendance = field(default_factory=Attendance)
    _known: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._over = defaultdict(lambda: deque(maxlen=self.keep))

    def add(self, entry: JournalEntry) -> None:
        for event in entry.events:
            self._hear(event)
        for question, refused in answered_in(entry):
            if not refused:
                self._obey(question, entry.at_s)

    def of(self, silo: str, now_s: float) -> list[Span]:
        """Return the kept absences of a silo until ``now_s``, including pauses of the run."""
        found = [span for who in (silo, EVERYBODY) for why in REASONS for span in self._over.get((who, why), ())]
        open_s = [(since_s, now_s, why) for (who, why), since_s in self._since_s.items() if who in (silo, EVERYBODY)]
        until_s, back_s = self._attendance.windows.get(silo, (now_s, now_s))
        return [*found, *(Span(*each) for each in (*open_s, (until_s, min(back_s, now_s), AWAY)) if each[0] < each[1])]

    def why(self, silo: str, now_s: float) -> str:
        known = [reason for reason in REASONS if {(silo, reason), (EVERYBODY, reason)} & self._since_s.keys()]
        if self._attendance.away(silo, now_s):
            known.append(AWAY)
        return next((reason for reason in REASONS if reason in known), WAITING)

    def _hear(self, event: Event) -> None:
        attendance = self._attendance
        match event:
            case SiloJoined(at_s, silo, facts):
                if silo not in self._known:
                    self._known.add(silo)
                    self._since_s[silo, GONE] = 0.0
                self._end(silo, GONE, at_s)
                self._move(silo, at_s, lambda: attendance.on_join(silo, facts, at_s))
            case SiloLost(at_s, silo, _):
                self._since_s.setdefault((silo, GONE), at_s)
                self._move(silo, at_s, lambda: attendance.on_loss(silo, at_s))
            case UpdateArrived(at_s, meta, report):
                self._move(meta.silo, at_s, lambda: attendance.hear(meta.silo, at_s, report.presence))
            case WorkFailed(at_s, silo):
                self._move(silo, at_s, lambda: attendance.excuses(event))

    def _obey(self, question: OperatorQuestion, at_s: float) -> None:
        match question:
            case PauseRun():
                self._since_s[EVERYBODY, PAUSED] = at_s
            case ContinueRun():
                self._end(EVERYBODY, PAUSED, at_s)
            case DropSilo(silo):
                self._since_s[silo, DROPPED] = at_s
            case ReadmitSilo(silo):
                self._end(silo, DROPPED, at_s)

    def _end(self, silo: str, why: str, at_s: float) -> None:
        since_s = self._since_s.pop((silo, why), at_s)
        if since_s < at_s:
            self._over[silo, why].append(Span(since_s, at_s, why))

    def _move(self, silo: str, at_s: float, change: Callable[[], object]) -> None:
        """Change a silo's window, and record the time that the silo was away under the old window."""
        before = self._attendance.windows.get(silo)
        change()
        if before is not None and before[0] < at_s and self._attendance.windows.get(silo) != before:
            self._over[silo, AWAY].append(Span(before[0], min(before[1], at_s), AWAY))
