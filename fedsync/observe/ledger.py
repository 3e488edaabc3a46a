"""Ledger of a run: totals, rounds and scores, computed from the event log (journal) alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedsync.core.actions import Attested, Commit, Discard, Dispatch, Evaluate, KeepBest, Note, Stop
from fedsync.core.events import Evaluated, Event, SiloJoined, SiloLost, UpdateArrived, WorkFailed
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import PooledFigures, Score, Split, Subject, UpdateMeta, WorkOrder, WorkReport, mean_loss
from fedsync.core.report_checks import sound, usable
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.version_scores import Scores, Settled, numbers_of
from fedsync.model.broadcast_compression import HEAD_BYTES
from fedsync.model.plain_replica import RECEIVED
from fedsync.observe.lost_silos import LostSilo, LostSilos, expected_of
from fedsync.observe.quality.evaluations import FinalScores, JudgedModels
from fedsync.observe.rounds import (
    EndedOrder,
    MetricPool,
    Round,
    Rounds,
    SiloTotals,
    WaitingUpdate,
    pooled,
    shares_of,
    step_notes,
    with_tested,
)
from fedsync.observe.steered import SteeredRun

_LATEST = 64
"""Number of newest rounds that may still wait for attested figures, so disagreeing silos do not block the ledger."""

MOST_OPEN = 4096
"""Maximum age of a round, in rounds, that may still get a score."""

KEPT_ROUNDS = 1000
"""Newest rounds kept in memory; a run may last for weeks."""

MOST_NOTES = 1000


@dataclass(slots=True)
class Ledger:
    """Totals, rounds and scores of a run, updated entry by entry from its journal.

    Args:
        model_bytes: download size of an order, unless the silo reports that it received fewer bytes.
        detail: keep every silo's share of every round; otherwise only the share of the slowest silo.
        measured: metrics of the run; None if unknown, and evaluations are then accepted without a check of metrics.
        keep: number of newest rounds kept, None for all. Older rounds are removed only when they are closed, so a
            reader that follows the ledger entry by entry sees all rounds.
    """

    target_accuracy: float | None = None
    model_bytes: int = 0
    detail: bool = True
    on_end: Callable[[EndedOrder], None] | None = None
    measured: tuple[AnyMetric, ...] | None = None
    keep: int | None = None
    steered: SteeredRun = field(default_factory=SteeredRun)
    lost: LostSilos = field(default_factory=LostSilos)
    rounds: Rounds = field(default_factory=Rounds)
    silos: dict[str, SiloTotals] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stopped: Stop | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    metrics: MetricPool = field(default_factory=MetricPool)
    tested: FinalScores = field(init=False)
    judged: JudgedModels = field(default_factory=JudgedModels)
    best: KeepBest | None = None
    last: Score | None = None
    accuracy: float | None = None
    _begin_s: float | None = None
    _end_s: float = 0.0
    _closing: bool = False
    _final: int = 0
    _awaiting: set[str] = field(default_factory=set)
    _arrived: dict[str, WaitingUpdate] = field(default_factory=dict)
    _by_version: dict[int, Round] = field(default_factory=dict)
    _scores: Scores = field(init=False)
    _last_scored: int = 0
    _loss: float | None = None
    _sealed: bool = False
    _over: int = 0
    _reached_s: float | None = None

    def __post_init__(self) -> None:
        self._scores, self.tested = Scores(self.measured or ()), FinalScores(self.measured)

    @classmethod
    def of(cls, header: Mapping[str, Any], **options: Any) -> Ledger:
        log = "a warning of this run" if header.get("runtime") == "virtual" else "its own log"
        lost = LostSilos(expected_of(header), log=log)
        return cls(header.get("target_accuracy"), int(header.get("model_bytes") or 0), lost=lost, **options)

    def add(self, entry: JournalEntry) -> None:
        self._let_go()
        if not self._closing:
            self._end_s = entry.at_s
        discarded = {action.update_id: action.reason for action in entry.actions if isinstance(action, Discard)}
        for event in entry.events:
            self._add_event(event, discarded)
        if entry.steered:
            for drop in self.steered.add(entry):
                self._lose(drop.silo, drop.at_s, taken=True)
                self.lost.drop(drop.silo, drop.at_s, drop.reason)
                self._scores.forget(drop.silo, dropped=True)
            self.lost.readmit(self.steered.dropped)
        self._settle()
        for action in entry.actions:
            match action:
                case Dispatch(_, order) if order.scores_only or order.apart:
                    self._end_training(int(order.after == 0))
                case Dispatch(name, order):
                    self._dispatch(entry.at_s, name, order)
                case Commit(version, weights):
                    self._commit(entry.at_s, version, list(weights))
                case Evaluate(version, names, Split.VALIDATION):
                    self._close(version, names)
                case Evaluate(_, names):
                    self.bytes_down += self.model_bytes * len(names)
                    self.tested.ask(action)
                case Discard(update_id, _):
                    self._arrived.pop(update_id, None)
                case Attested(figures):
                    self._attest(figures)
                case KeepBest():
                    self.best = action
                    self.judged.keep(action)
                case Note(text):
                    self.notes = [*self.notes[1 - MOST_NOTES :], text]
                case Stop():
                    self.cut_off()
                    self.stopped, self.lost.over = action, True

    def _let_go(self) -> None:
        if self.keep is None or self.rounds.here < 2 * self.keep:
            return
        self._over = self.closed(self._over)
        for row in self.rounds.let_go(min(self._over, len(self.rounds) - self.keep)):
            del self._by_version[row.round]
            if self._reached_s is None and self.target_accuracy is not None and row.reaches(self.target_accuracy):
                self._reached_s = row.at_s

    def closed(self, known: int = 0) -> int:
        """Count the rounds, from the first, whose score is final: scored, or with no evaluation pending."""
        if self.stopped is not None:
            return len(self.rounds)
        while known < len(self.rounds) and self._is_closed(known):
            known += 1
        return known

    def _is_closed(self, index: int) -> bool:
        if len(self.rounds) - index > MOST_OPEN:
            return True
        version = self.rounds[index].round
        if self._sealed and len(self.rounds) - index <= _LATEST:
            return version <= self._last_scored
        return version <= self._last_scored or (index + 1 < len(self.rounds) and not self._scores.under_way(version))

    @property
    def seconds(self) -> float:
        return 0.0 if self._begin_s is None else self._end_s - self._begin_s

    @property
    def training_loss(self) -> float | None:
        return next((row.loss for row in reversed(self.rounds[-_LATEST:]) if row.loss is not None), None)

    def loss_words(self, row: Round) -> str:
        known = self.training_loss if row.loss is None else row.loss  # sealed losses arrive one commit late
        name, value = ("loss", known) if known is not None or self._loss is None else ("test loss", self._loss)
        return f"{name} -" if value is None else f"{name} {value:.4f}"

    @property
    def seconds_to_target(self) -> float | None:
        if self.target_accuracy is None or self._reached_s is not None:
            return self._reached_s
        return self.seconds_to(self.target_accuracy)

    def seconds_to(self, accuracy: float) -> float | None:
        return next((row.at_s for row in self.rounds if row.reaches(accuracy)), None)

    def missing(self) -> list[LostSilo]:
        return self.lost.missing(self._begin_s or 0.0, self._end_s)

    def summary(self) -> dict[str, Any]:
        available, missing = len(self.silos) * self.seconds, self.missing()
        busy = {
            name: silo.busy_s + (self._end_s - silo.since_s if silo.order is not None else 0.0)
            for name, silo in self.silos.items()
        }
        return {
            "rounds": len(self.rounds),
            "commits": len(self.rounds),
            "seconds": self.seconds,
            "accuracy": self.accuracy,
            "loss": self._loss,
            "scored_round": self._last_scored or None,
            "target_accuracy": self.target_accuracy,
            "seconds_to_target": self.seconds_to_target,
            "stopped_by": self.stopped.reason if self.stopped else None,
            "notes": [*self.notes, *self.lost.notes(missing), *step_notes(self.silos)],
            "lost": [{"silo": each.silo, "since_s": each.since_s, "why": each.why} for each in missing],
            "samples": sum(silo.samples for silo in self.silos.values()),
            "utilisation": sum(s.compute_s for s in self.silos.values()) / available if available else 0.0,
            "wait_fraction": 1 - sum(busy.values()) / available if available else 0.0,
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "metrics": self.metrics.values(),
            **self.tested.kept(None if self.best is None else self.best.score, self.last),
            "silos": [
                {
                    "name": name,
                    "orders": silo.orders,
                    "failures": silo.failures,
                    "steps": silo.steps,
                    "samples": silo.samples,
                    "compute_s": silo.compute_s,
                    "overhead_s": busy[name] - silo.compute_s,
                    "wait_s": self.seconds - busy[name],
                    "batch_size": silo.batch_size,
                    "metrics": silo.metrics.values(),
                }
                for name, silo in sorted(self.silos.items())
            ],
        }

    def models(self) -> dict[tuple[Split, Subject], Settled]:
        found = {**self.judged.models(), **self.tested.models()}
        last = found.get((Split.TEST, Subject.LAST))
        if last is not None and self.best is not None and self.best.score.version == last.score.version:
            found.setdefault((Split.TEST, Subject.BEST), last)  # one model, so silos evaluate it once
        return found

    def _add_event(self, event: Event, discarded: Mapping[str, str]) -> None:
        match event:
            case UpdateArrived(at_s, meta, report):
                self._arrive(at_s, meta, report, discarded)
            case SiloJoined(at_s, name, facts):
                self.judged.validates |= facts.validates
                self._lose(name, at_s)
                self.silos.setdefault(name, SiloTotals(since_s=at_s))
                self.lost.join(event)
            case SiloLost(at_s, name, reason):
                self._lose(name, at_s)
                self.lost.lose(name, at_s, reason)
                self._scores.forget(name)
            case WorkFailed(at_s, name, update_id, _):
                if self._order_of(name, update_id) is not None:
                    self._end_order(name, at_s, None)
                    self.lost.fail(event)
            case Evaluated(split=Split.TEST) as told:
                self.tested.answer(told)
            case Evaluated(_, name, version) as told:
                if name in self._awaiting and version == self._final:
                    self._awaiting.discard(name)
                    self.lost.evaluate(name, told.evaluation)
                    self._evaluated(version, name, told)

    def _lose(self, name: str, at_s: float, *, taken: bool = False) -> None:
        self._end_order(name, at_s, None, taken=taken)
        if name in self._awaiting:
            self._awaiting.discard(name)
            self._scores.end(self._final, name, None)

    def _close(self, version: int, names: tuple[str, ...]) -> None:
        self._end_training(len(names))
        self._final = version
        self._awaiting = set(names)
        self._scores.restart(version)
        self._scores.begin(version, len(names))

    def _end_training(self, asked: int = 1) -> None:
        self.cut_off()
        self._closing = True
        self.bytes_down += self.model_bytes * asked

    def cut_off(self) -> None:
        """End training: running orders count as busy time until now, neither as done nor as failed."""
        for name, silo in self.silos.items():
            if silo.order is not None:
                self._free(name, silo, silo.order, self._end_s, None)

    def _free(self, name: str, silo: SiloTotals, order: WorkOrder, at_s: float, report: WorkReport | None) -> None:
        begin_s = silo.end(at_s)
        if self.on_end is not None:
            self.on_end(EndedOrder(name, order, begin_s, at_s, report))

    def _order_of(self, name: str, update_id: str) -> WorkOrder | None:
        silo = self.silos.get(name)
        return None if silo is None else silo.order_of(update_id)

    def _dispatch(self, at_s: float, name: str, order: WorkOrder) -> None:
        if self._begin_s is None:
            self._begin_s = at_s
        self.silos[name].begin(order, at_s)
        self.lost.begin(name)
        self.bytes_down += self.model_bytes
        self._scores.begin(order.base_version, 1, [name] if order.evaluate and not self.silos[name].orders else ())

    def _arrive(self, at_s: float, meta: UpdateMeta, report: WorkReport, discarded: Mapping[str, str]) -> None:
        self.bytes_up += meta.nbytes
        received = report.metrics.get(RECEIVED)
        if received is not None and 0 <= received <= self.model_bytes + HEAD_BYTES:
            self.bytes_down += int(received) - self.model_bytes
        order = self._order_of(meta.silo, meta.update_id)
        if order is None:
            return
        # A refused report is discarded at once. A barrier may discard sound reports too, so both checks are needed.
        if meta.update_id in discarded and not sound(order, meta, report):
            self._end_order(meta.silo, at_s, None)
            self.lost.refuse(meta.silo, at_s, discarded[meta.update_id])
            return
        self.lost.succeed(meta.silo, at_s, order, report)
        busy_s = at_s - self.silos[meta.silo].since_s
        self._end_order(meta.silo, at_s, report)
        self._arrived[meta.update_id] = WaitingUpdate(meta, report, order.batch_size, at_s, busy_s)

    def _end_order(self, name: str, at_s: float, report: WorkReport | None, *, taken: bool = False) -> None:
        silo = self.silos.get(name)
        if silo is None or silo.order is None:
            return
        self._evaluated(silo.order.base_version, name, report)
        self._free(name, silo, silo.order, at_s, report)
        if report is None:
            silo.taken, silo.failures = silo.taken + taken, silo.failures + (not taken)
            return
        silo.orders += 1
        silo.steps += report.steps
        silo.samples += report.samples
        silo.compute_s += report.compute_s
        if report.metrics:
            silo.metrics.add(report.metrics, report.samples)
            self.metrics.add(report.metrics, report.samples)

    def _commit(self, at_s: float, version: int, update_ids: list[str]) -> None:
        arrivals = [self._arrived.pop(update_id) for update_id in update_ids if update_id in self._arrived]
        if not arrivals:
            return  # the commit has scores only
        self.lost.commit(arrival.meta.silo for arrival in arrivals)
        reports = [arrival.report for arrival in arrivals]
        loss = mean_loss(reports)
        self._sealed = loss is None
        since_s = at_s - (self._begin_s or 0.0)
        seconds = since_s - (self.rounds[-1].at_s if self.rounds else 0.0)
        # `max` takes the first of simultaneous arrivals, as `Round.slowest` does.
        kept = arrivals if self.detail or len(arrivals) == 1 else [max(arrivals, key=lambda arrival: arrival.at_s)]
        shares, metrics = shares_of(kept, at_s), pooled(reports)
        row = self._by_version[version] = Round(version, since_s, seconds, loss, shares, metrics=metrics)
        self.rounds.append(row)

    def _evaluated(self, version: int, name: str, told: WorkReport | Evaluated | None) -> None:
        known, row = None if self.measured is None else self._scores.known, self._by_version.get(version)
        found = usable(name, told.evaluation if told else None, known)
        self._scores.end(version, name, found)
        if found is not None and row is not None:
            row.metrics = with_tested(row.metrics, row.tested, found.metrics)
            if self.detail:
                row.found[name] = numbers_of(found, self.measured or ())

    def _settle(self) -> None:
        settled = self._scores.settle()
        for each in settled:
            self._score(each.score, counts=each.counts)
            self.lost.few_scored += not (each.counts or self._scores.starting)
        if settled:
            self.judged.settle(settled)

    def _score(self, score: Score, *, counts: bool = True) -> None:
        row = self._by_version.get(score.version)
        if row is not None:
            row.accuracy, row.test_loss, row.numbers, row.counts = score.accuracy, score.loss, score.numbers, counts
        # A rollback creates a version without a row, and this version may be the final model.
        if self.last is None or score.version >= self.last.version:
            self.last = score
        if score.version >= max(1, self._last_scored):
            self._last_scored, self.accuracy, self._loss = score.version, score.accuracy, score.loss

    def _attest(self, figures: PooledFigures) -> None:
        self.lost.spoil(figures.spoiled)
        if figures.split is Split.TEST:
            if (score := figures.score) is not None:
                if figures.subject is Subject.LAST and self.last is not None:
                    # Versions made only to answer questions do not change the model.
                    score = replace(score, version=self.last.version)
                self.tested.attest(figures.subject, score)
            return
        row = self._by_version.get(figures.version)
        if row is not None:
            row.loss = figures.loss
        if figures.score is not None:
            self._score(figures.score)
            self.judged.settle([Settled(figures.score, {})])
