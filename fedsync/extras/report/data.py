"""Data of a report, extracted from the files of a run's folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fedsync.common.errors import ConfigError
from fedsync.config.sections.evaluation import UNASKED
from fedsync.core.actions import Dispatch
from fedsync.core.events import SiloJoined
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import SiloFacts
from fedsync.extras.report.read_results import read_results
from fedsync.extras.report.results import Results
from fedsync.extras.watch.absences import Absences, Span
from fedsync.observe.ledger import Ledger
from fedsync.observe.quality.evaluations import metrics_of
from fedsync.observe.rounds import EndedOrder, RoundPoint
from fedsync.observe.run_state import NO_RUN, natural, read_summary, why_failed
from fedsync.observe.tail import Tail


@dataclass(frozen=True, slots=True)
class OrderSpan:
    """One order of one silo; times in seconds since training began.

    Args:
        end_s: arrival of the update, failure of the order, or end of training.
        compute_s: seconds of training; 0 unless ``done``.
    """

    silo: str
    begin_s: float
    end_s: float
    batch_size: int
    done: bool = False
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RunData:
    """Report data of one run.

    Args:
        summary: as in ``summary.json``, computed from the journal.
        examples: number of training samples of each silo; empty if metrics are sealed.
        unvalidated: silos without a validation split.
        absences: idle time of each silo other than plain waiting, with reasons, in seconds since training began.
    """

    label: str
    summary: Mapping[str, Any]
    config: str
    silos: tuple[str, ...] = ()
    points: tuple[RoundPoint, ...] = ()
    orders: tuple[OrderSpan, ...] = ()
    ended: bool = True
    results: Results = field(default_factory=Results)
    examples: Mapping[str, int] = field(default_factory=dict)
    unvalidated: tuple[str, ...] = ()
    absences: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    version: str = ""

    @property
    def noisy(self) -> str:
        """Sentence about the noise in the scores of a private run; "" where scores have none."""
        noise = (self.settings.get("privacy") or {}).get("score_noise")
        many = "" if noise is None else f"with a deviation of {noise:g} right predictions at each silo"
        return many and f"Scores have noise, {many}, which the intervals leave out"

    @property
    def settings(self) -> Mapping[str, Any]:
        try:
            parsed = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @property
    def clock(self) -> str:
        return "virtual seconds" if self.summary["runtime"] == "virtual" else "seconds"


def read_run(folder: Path) -> RunData:
    """Read a run's folder, which has a journal.

    Raises:
        ConfigError: the folder has no run.
        FedSyncError: a file is damaged; the message names the line.
    """
    summary = read_summary(folder)
    run = _read_books(folder, summary)
    return replace(run, results=read_results(folder, summary, run.settings))


def _read_books(folder: Path, summary: Mapping[str, Any] | None) -> RunData:
    journal, settings = folder / "journal.jsonl", folder / "config.yaml"
    config = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""
    if not journal.is_file():
        raise ConfigError(str(folder), NO_RUN, "Name the folder of a run with a journal")
    tail, books = Tail(journal), None
    for entry in tail.entries():
        books = books or _Books(tail.header or {})
        books.add(entry)
    if books is None:
        raise ConfigError(str(folder), "the run has not begun", "Wait for its first line in journal.jsonl")
    run, why = books.close(folder.resolve().name, config, summary), why_failed(folder)
    if why is None:
        return run
    notes = [f"The run has no regular end: {why}", *run.summary["notes"]]
    return replace(run, summary={**run.summary, "stopped_by": why, "notes": notes}, ended=True)


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read several runs, and number equal labels to make them unique.

    Raises:
        ConfigError: a folder has no run.
        FedSyncError: a file is damaged; the message names the line.
    """
    runs = [read_run(folder) for folder in folders]
    counts = Counter(run.label for run in runs)
    seen: Counter[str] = Counter()
    for index, run in enumerate(runs):
        if counts[run.label] > 1:
            seen[run.label] += 1
            runs[index] = replace(run, label=f"{run.label} ({seen[run.label]})")
    return runs


class _Books:
    """Collector of report data in one pass over a journal."""

    def __init__(self, header: dict[str, Any]) -> None:
        self._header = header
        self._ledger = Ledger.of(header, on_end=self._end, measured=metrics_of(header.get("config") or {}))
        self._begin_s: float | None = None
        self._facts: dict[str, SiloFacts] = {}
        self._spans: list[OrderSpan] = []
        self._absences = Absences()
        self._now_s = 0.0

    def add(self, entry: JournalEntry) -> None:
        self._ledger.add(entry)
        self._absences.add(entry)
        self._now_s = entry.at_s
        for event in entry.events:
            if isinstance(event, SiloJoined):
                self._facts[event.silo] = event.facts
        if self._begin_s is None and any(isinstance(action, Dispatch) for action in entry.actions):
            self._begin_s = entry.at_s

    def close(self, label: str, config: str, summary: Mapping[str, Any] | None) -> RunData:
        ledger, header, known = self._ledger, self._header, summary or {}
        ledger.cut_off()
        settings = header.get("config") or {}
        identity = {
            "strategy": settings.get("name", label),
            "runtime": header.get("runtime", ""),
            "seed": settings.get("seed"),
            "sealed_share": known.get("sealed_share"),
        }
        sealed = ((cipher := settings.get("cipher") or {}).get("inner") or cipher).get("metrics") == "sealed"
        silos = tuple(sorted(ledger.silos, key=natural))
        books = ledger.summary()
        unasked = [UNASKED] if settings.get("evaluation", {}).get("metrics", ()) is None else []
        books["notes"] = [*known.get("notes", books["notes"]), *unasked]  # the journal lacks the aggregator's
        return RunData(
            label,
            {**identity, **books},
            config,
            silos,
            tuple(ledger.rounds.points()),
            tuple(self._spans),
            ledger.stopped is not None,
            examples={} if sealed else {name: self._facts[name].examples for name in silos},
            unvalidated=tuple(name for name in silos if not self._facts[name].validates),
            absences={name: self._absent(name) for name in silos},
            version=str(header.get("fedsync", "")),
        )

    def _absent(self, name: str) -> tuple[Span, ...]:
        begin_s = self._begin_s or 0.0
        spans = self._absences.of(name, self._now_s)
        return tuple(Span(each.begin_s - begin_s, each.end_s - begin_s, each.why) for each in spans)

    def _end(self, ended: EndedOrder) -> None:
        begin_s, order, report = self._begin_s or 0.0, ended.order, ended.report
        span = OrderSpan(
            ended.silo,
            ended.begin_s - begin_s,
            ended.end_s - begin_s,
            order.batch_size,
            report is not None,
            0.0 if report is None else min(report.compute_s, ended.end_s - ended.begin_s),
        )
        self._spans.append(span)
