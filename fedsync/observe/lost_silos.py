"""List of the silos that are missing from a run's result, with time and reason, for tables, notes, reports and pages.

All facts come from the journal. If several reasons hold at the same time, the first counts:

| reason | since | until |
|---|---|---|
| the operator dropped the silo | the drop | the operator readmits the silo |
| the silo is gone without an announced absence | the loss | the silo joins again |
| the last three orders of the silo failed | the first failure of these | an order succeeds, or the silo joins again |
| the run is over, and no version has an update of the silo | the silo joined | |
| the run is over, and a listed silo never joined | the run began | |

Failed orders, failed evaluations, and absences that have ended are also reported at once, and in a note at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedsync.common.errors import RunError
from fedsync.core.availability import Attendance
from fedsync.core.events import SiloJoined, WorkFailed
from fedsync.core.orders import Evaluation, WorkOrder, WorkReport
from fedsync.core.state import MAX_FAILURES

MOST_NEWS, MOST_NAMED = 100, 20
"""Newest messages that are kept; maximum number of silos that notes name."""


@dataclass(frozen=True, slots=True)
class LostSilo:
    """Silo that is missing from the result since ``since_s`` [s after training began]; ``wanted`` if an operator
    dropped it: then it is no failure.
    """

    silo: str
    since_s: float
    why: str
    wanted: bool = False

    @property
    def words(self) -> str:
        return f"{self.silo} is missing since {self.since_s:.1f} s: {self.why}"


@dataclass(slots=True)
class _Part:
    """Contribution of a silo; times as in the journal. ``row`` counts the consecutive failures up to now."""

    joined_s: float
    orders: int = 0
    failed: int = 0
    row: int = 0
    row_s: float = 0.0
    reason: str = ""
    gone_s: float | None = None
    gone: str = ""
    unexpected: bool = False
    returns: int = 0
    away_s: float = 0.0
    dropped_s: float | None = None
    why: str = ""
    counts: bool = False
    evaluated: bool = False
    unevaluated: int = 0


@dataclass(slots=True)
class LostSilos:
    """Tracker of missing silos; `fedsync.observe.ledger.Ledger` passes it the events of the journal.

    Args:
        told: number of all messages, including messages that were evicted.
        evaluates: silos are expected to evaluate; False in simulations of time only.
        sealed: evaluations may be missing because their metrics are sealed.
        log: place that has the reasons of a silo's failures.
        few_scored: number of versions whose score does not count; see `fedsync.evaluation.version_scores.Scores`.
    """

    expected: Collection[str] = ()
    told: int = 0
    over: bool = False
    evaluates: bool = True
    sealed: bool = True
    log: str = "its own log"
    few_scored: int = 0
    _parts: dict[str, _Part] = field(default_factory=dict)
    _news: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_NEWS))
    _attendance: Attendance = field(default_factory=Attendance)
    _spoiled: int = 0
    _suspects: set[str] = field(default_factory=set)

    # Events.

    def join(self, event: SiloJoined) -> None:
        part = self._parts.setdefault(event.silo, _Part(event.at_s))
        if part.gone_s is not None:
            self._tell(f"{event.silo} is back")
            if part.unexpected:
                part.returns, part.away_s = part.returns + 1, part.away_s + event.at_s - part.gone_s
        part.gone_s, part.row = None, 0
        self._attendance.on_join(event.silo, event.facts, event.at_s)

    def lose(self, silo: str, at_s: float, reason: str) -> None:
        self._attendance.on_loss(silo, at_s)
        part = self._part(silo)
        if part.gone_s is None:
            part.gone_s, part.gone = at_s, reason
            part.unexpected = part.dropped_s is None and not self._attendance.away(silo, at_s)
            if part.unexpected:
                self._tell(f"{silo} is lost: {reason}")

    def drop(self, silo: str, at_s: float, why: str = "") -> None:
        """Record a dropped silo; an empty ``why`` means that an operator dropped the silo."""
        part = self._part(silo)
        part.dropped_s, part.why = at_s, why

    def spoil(self, silos: Collection[str]) -> None:
        """Record an unusable encrypted sum: one of its silos sealed invalid values. The suspects are narrowed down to
        the silos that all unusable sums have in common, if there are any.
        """
        if silos:
            self._spoiled += 1
            among = self._suspects & set(silos) or set(silos)
            if among != self._suspects:
                self._suspects = among
                self._tell(f"one of these silos makes sums invalid, which are then ignored: {self._suspected()}")

    def _suspected(self) -> str:
        more = [f"{len(self._suspects) - MOST_NAMED} more"] if len(self._suspects) > MOST_NAMED else []
        return ", ".join([*sorted(self._suspects)[:MOST_NAMED], *more])

    def readmit(self, dropped: Collection[str]) -> None:
        for silo, part in self._parts.items():
            if silo not in dropped:
                part.dropped_s = None

    def begin(self, silo: str) -> None:
        self._part(silo).orders += 1

    def fail(self, event: WorkFailed) -> None:
        if not self._attendance.excuses(event):
            self.refuse(event.silo, event.at_s, event.reason)

    def refuse(self, silo: str, at_s: float, reason: str) -> None:
        part = self._part(silo)
        if not part.row or part.reason != reason:
            self._tell(f"an order of {silo} failed: {reason}")
        part.row_s = part.row_s if part.row else at_s
        part.failed, part.row, part.reason = part.failed + 1, part.row + 1, reason
        if part.row == MAX_FAILURES:
            self._tell(f"{silo} is missing: its last {part.row} orders failed")

    def succeed(self, silo: str, at_s: float, order: WorkOrder, report: WorkReport) -> None:
        part = self._part(silo)
        if part.row >= MAX_FAILURES:
            self._tell(f"{silo} is back")
        part.row = 0
        if report.presence is not None:
            self._attendance.hear(silo, at_s, report.presence)
        if order.evaluate:
            # A visible loss means that the figures are not sealed, so a missing evaluation is a failure.
            self.evaluate(silo, report.evaluation, told=report.loss is not None or not self.sealed)

    def evaluate(self, silo: str, found: Evaluation | None, *, told: bool = False) -> None:
        """Record an evaluation: None if it failed or is sealed, and a failure if metrics are not sealed (``told``)."""
        part = self._part(silo)
        if found is not None:
            part.evaluated |= found.samples > 0
        elif self.evaluates and (told or part.evaluated):
            part.unevaluated += 1
            if part.unevaluated == 1:
                self._tell(f"an evaluation of {silo} failed, which costs no training; {self.log} says why")

    def commit(self, silos: Iterable[str]) -> None:
        for silo in silos:
            self._part(silo).counts = True

    # Results.

    def since(self, told: int) -> list[str]:
        return list(self._news)[len(self._news) - min(self.told - told, len(self._news)) :]

    def missing(self, begin_s: float = 0.0, now_s: float = 0.0) -> list[LostSilo]:
        """Return the silos missing at ``now_s``, by name; training began at ``begin_s`` in the journal's time."""
        made = any(part.counts for part in self._parts.values())
        found = [self._missing(name, part, begin_s, now_s, made=made) for name, part in sorted(self._parts.items())]
        if self.over:
            absent = sorted(set(self.expected) - self._parts.keys())
            found += [LostSilo(name, 0.0, "it never joined") for name in absent]
        return [each for each in found if each is not None]

    def _missing(self, silo: str, part: _Part, begin_s: float, now_s: float, *, made: bool) -> LostSilo | None:
        if part.dropped_s is not None:
            since_s, why = part.dropped_s, part.why or "the operator dropped it"
        elif part.gone_s is not None and not self._attendance.away(silo, now_s):
            since_s, why = part.gone_s, part.gone
        elif part.row >= MAX_FAILURES:
            since_s, why = part.row_s, f"its last {part.row} orders failed, the last by: {part.reason}"
        elif self.over and not part.counts and (part.failed or not part.orders or made):
            since_s = part.joined_s
            why = f"it failed {part.failed} orders, the last by: {part.reason}" if part.failed else "it sent no update"
            why = why if part.orders else "it was given no order"
        else:
            return None
        why += "" if part.counts or not self.over else "; no version has its data"
        return LostSilo(silo, max(since_s - begin_s, 0.0), why, part.dropped_s is not None and not part.why)

    def notes(self, missing: Collection[LostSilo]) -> Iterator[str]:
        if self._spoiled:
            many = f"{self._spoiled} versions lack updates, because one silo made their sums invalid"
            yield f"{many}; possible silos: {self._suspected()}"
        if self.few_scored:
            yield f"{self.few_scored} versions cannot be the best: half of the silos or fewer scored them"
        words = [each.words for each in missing]
        names = {each.silo for each in missing}
        several = any(part.evaluated for part in self._parts.values())
        for name, part in sorted(self._parts.items()):
            if part.failed and name not in names:
                words.append(f"{part.failed} of {part.orders} orders of {name} failed, the last by: {part.reason}")
            if part.returns and name not in names:
                times = "once" if part.returns == 1 else f"{part.returns} times"
                words.append(f"{name} was lost {times}, for {part.away_s:.1f} s in all, the last by: {part.gone}")
            if part.unevaluated:
                words.append(f"{part.unevaluated} evaluations of {name} failed; {self.log} says why")
            if self.over and several and part.counts and not part.evaluated:
                words.append(f"no model was evaluated by {name}: accuracy and loss are of the other silos alone")
        yield from words[:MOST_NAMED]
        if len(words) > MOST_NAMED:
            yield f"and {len(words) - MOST_NAMED} more notes of silos that failed or are missing"

    def fail_unless_tolerated(self, settings: Mapping[str, Any], missing: Collection[LostSilo]) -> None:
        """Raise `RunError` if the strategy (``settings``) does not tolerate the missing silos: ``on_lost_silo`` is
        ``fail``, or the run is over with fewer than ``min_silos`` silos.
        """
        lost = [each for each in missing if not each.wanted]
        if not lost:
            return
        words = "; ".join(each.words for each in lost[:MOST_NAMED])
        if settings.get("on_lost_silo") == "fail":
            raise RunError(f"on_lost_silo is fail, and {words}")
        least, there = settings.get("min_silos") or 0, len(self._parts.keys() - {each.silo for each in lost})
        if self.over and there < least:
            raise RunError(f"the result is of {there} silos, and min_silos is {least}: {words}")

    def _part(self, silo: str) -> _Part:
        return self._parts.setdefault(silo, _Part(0.0))

    def _tell(self, news: str) -> None:
        self.told += 1
        self._news.append(news)


def expected_of(header: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the silo names from the run's silo file, or else from its strategy, given the header of its journal."""
    names: list[str] = []
    for each in header.get("silos") or ():
        count = each.get("count")  # consecutive identical machines are one entry of the header
        names += [str(each["name"])] if count is None else [f"{each['name']}-{number}" for number in range(count)]
    return tuple(names) or tuple((header.get("config") or {}).get("silos") or ())
