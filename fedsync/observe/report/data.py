"""What a report shows, extracted from the files of a run's folder."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from fedsync.common.errors import ConfigError
from fedsync.config.sections.evaluation import UNASKED
from fedsync.core.actions import Commit, Dispatch
from fedsync.core.events import SiloJoined
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import SiloFacts
from fedsync.observe.absences import Absences, Span
from fedsync.observe.ledger import Ledger
from fedsync.observe.lost_silos import expected_of
from fedsync.observe.quality.evaluations import metrics_of
from fedsync.observe.report.forecast import Predictions
from fedsync.observe.report.read_json import read_object
from fedsync.observe.report.read_results import read_results
from fedsync.observe.report.results import Results
from fedsync.observe.shares import EndedOrder
from fedsync.observe.tail import Tail

FIGURES = frozenset(
    {"strategy", "runtime", "seed", "rounds", "seconds", "accuracy", "loss", "target_accuracy", "seconds_to_target"}
    | {"stopped_by", "notes", "samples", "utilisation", "wait_fraction", "bytes_up", "bytes_down", "silos"}
)
"""What a report shows of a summary."""

SILO_FIGURES = frozenset({"name", "failures", "compute_s", "overhead_s", "wait_s"})
"""What it shows of each silo in it."""


@dataclass(frozen=True, slots=True)
class OrderSpan:
    """One order of one silo; times in seconds since training began.

    Args:
        silo: who worked.
        begin_s: when the order was sent.
        end_s: when its update came, it failed, or training ended.
        batch_size: samples a local step.
        done: an update came of it.
        compute_s: of the time, seconds of training; 0 unless ``done``.
        samples: processed; 0 unless ``done``.
        predicted: speed that the predictor forecast when the order was sent [samples/s], or None.
    """

    silo: str
    begin_s: float
    end_s: float
    batch_size: int
    done: bool = False
    compute_s: float = 0.0
    samples: int = 0
    predicted: float | None = None

    @property
    def speed(self) -> float | None:
        """Samples per second of training, or None where there was none."""
        return self.samples / self.compute_s if self.compute_s > 0 else None


@dataclass(frozen=True, slots=True)
class Point:
    """One commit; ``accuracy`` where it was evaluated, a share of right answers or what else the task scores.

    ``staleness`` has one number for each update in it: versions that were committed since the one the silo started
    from. ``metrics`` are pooled over its updates.
    """

    round: int
    at_s: float
    loss: float | None
    accuracy: float | None
    staleness: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunData:
    """One run as the report sees it.

    Args:
        label: what the report calls it.
        summary: as in ``summary.json``; worked out from the journal where the run did not end.
        config: the resolved strategy, as YAML.
        silos: all that ever joined, by name.
        points: one for every commit.
        orders: in the order in which they ended.
        overhead_s: seconds by kind, as silos told; the rest of the overhead they cannot know.
        forecasts: why orders have no forecast, or "".
        ended: the run came to an end of its own.
        results: how good its models are.
        examples: training samples that each silo told; empty where figures are sealed.
        unvalidated: silos that said that they hold out no validation split.
        absences: why silos had no order where they did not merely wait, by silo; in seconds since training began.
        version: of FedSync, that ran it; "" where that is not known.
    """

    label: str
    summary: Mapping[str, Any]
    config: str
    silos: tuple[str, ...] = ()
    points: tuple[Point, ...] = ()
    orders: tuple[OrderSpan, ...] = ()
    overhead_s: Mapping[str, float] | None = None
    forecasts: str = ""
    ended: bool = True
    results: Results = field(default_factory=Results)
    examples: Mapping[str, int] = field(default_factory=dict)
    unvalidated: tuple[str, ...] = ()
    absences: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    version: str = ""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The resolved strategy; empty where it cannot be read."""
        try:
            parsed = yaml.safe_load(self.config)
        except yaml.YAMLError:
            return {}
        return parsed if isinstance(parsed, dict) else {}

    @property
    def clock(self) -> str:
        """What a second of this run is."""
        return "virtual seconds" if self.summary["runtime"] == "virtual" else "seconds"

    @property
    def updates_by_staleness(self) -> Counter[int]:
        """How many updates were committed with which staleness."""
        return Counter(number for point in self.points for number in point.staleness)


def read_run(folder: Path) -> RunData:
    """Read a run's folder.

    Of a run without a journal there is only the summary.

    Raises:
        ConfigError: the folder holds no run.
        FedSyncError: a file in it is damaged; names the line.
    """
    summary = read_summary(folder / "summary.json")
    run = _read_books(folder, summary)
    return replace(run, results=read_results(folder, summary, run.settings))


def _read_books(folder: Path, summary: Mapping[str, Any] | None) -> RunData:
    journal, config = folder / "journal.jsonl", _text(folder / "config.yaml")
    if not journal.is_file():
        if summary is None:
            raise ConfigError(str(folder), "no run: neither journal.jsonl nor summary.json is there", "Name its folder")
        _check_whole(folder / "summary.json", summary)
        return RunData(_label(folder), summary, config)
    tail, books = Tail(journal), None
    for entry in tail.entries():
        books = books or _Books(tail.header or {})
        books.add(entry)
    if books is None:
        raise ConfigError(str(folder), "the run has not begun", "Wait for its first line in journal.jsonl")
    return books.close(_label(folder), config, summary)


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read several runs, whose labels then differ.

    Raises:
        ConfigError: a folder holds no run.
        FedSyncError: a file is damaged; names the line.
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
    """One pass over a journal."""

    def __init__(self, header: dict[str, Any]) -> None:
        self._header = header
        self._ledger = Ledger(
            header.get("target_accuracy"),
            int(header.get("model_bytes") or 0),
            on_end=self._end,
            measured=metrics_of(header.get("config") or {}),
        )
        self._ledger.lost.expected = expected_of(header)
        predictions = Predictions.of(header)
        self._forecasts = predictions if isinstance(predictions, str) else ""
        self._predictions = None if isinstance(predictions, str) else predictions
        self._begin_s: float | None = None
        self._facts: dict[str, SiloFacts] = {}
        self._bases: dict[str, int] = {}
        self._spans: list[OrderSpan] = []
        self._staleness: dict[int, tuple[int, ...]] = {}
        self._overhead_s: Counter[str] = Counter()
        self._absences = Absences()
        self._now_s = 0.0

    def add(self, entry: JournalEntry) -> None:
        self._ledger.add(entry)
        self._absences.add(entry)
        self._now_s = entry.at_s
        if self._predictions is not None:
            self._predictions.add(entry)
        for event in entry.events:
            if isinstance(event, SiloJoined):
                self._facts[event.silo] = event.facts
        for action in entry.actions:
            match action:
                case Dispatch():
                    self._begin_s = entry.at_s if self._begin_s is None else self._begin_s
                case Commit(version, weights):
                    bases = [self._bases.pop(update_id) for update_id in weights if update_id in self._bases]
                    self._staleness[version] = tuple(version - 1 - base for base in bases)

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
        sealed = (settings.get("cipher") or {}).get("metrics") == "sealed"
        silos = tuple(sorted(ledger.silos, key=natural))
        points = tuple(
            Point(row.round, row.at_s, row.loss, row.accuracy, self._staleness.get(row.round, ()), row.metrics)
            for row in ledger.rounds
        )
        books = ledger.summary()
        if settings.get("evaluation", {}).get("metrics", ()) is None:
            books["notes"] = [*books["notes"], UNASKED]
        return RunData(
            label,
            {**identity, **books},
            config,
            silos,
            points,
            tuple(self._spans),
            dict(self._overhead_s),
            self._forecasts,
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
        if report is not None:
            self._bases[order.update_id] = order.base_version
            self._overhead_s.update({kind: float(seconds) for kind, seconds in report.overhead_s.items()})
        span = OrderSpan(
            ended.silo,
            ended.begin_s - begin_s,
            ended.end_s - begin_s,
            order.batch_size,
            report is not None,
            0.0 if report is None else min(report.compute_s, ended.end_s - ended.begin_s),
            0 if report is None else report.samples,
            None if self._predictions is None else self._predictions.speeds.get(order.update_id),
        )
        self._spans.append(span)


def natural(name: str) -> list[tuple[int, str]]:
    """For sorting: ``silo-2`` comes before ``silo-10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _label(folder: Path) -> str:
    return folder.resolve().name


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _check_whole(path: Path, summary: Mapping[str, Any]) -> None:
    """Check that a summary has all that a report shows; a run without a journal has nothing else.

    Raises:
        ConfigError: it has not; names the file and what is missing.
    """
    missing = [repr(key) for key in sorted(FIGURES - summary.keys())]
    silos = summary["silos"]
    if not isinstance(silos, list) or not all(isinstance(silo, dict) for silo in silos):
        missing.append("a list of silos")
    else:
        found = {key for silo in silos for key in SILO_FIGURES - silo.keys()}
        missing += [f"{key!r} of a silo" for key in sorted(found)]
    if missing:
        remedy = "Name the folder of a run, or put the run's journal.jsonl beside it"
        raise ConfigError(str(path), f"not a whole summary: {', '.join(missing)} missing", remedy)


def read_summary(path: Path) -> dict[str, Any] | None:
    """A ``summary.json``; see `read_object`."""
    return read_object(path, "silos", "strategy")
