"""Measurements from a run's journal: step times, overheads and absences of each silo's machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fedsync.common.errors import FedSyncError
from fedsync.config.cluster import SiloConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.events import SERVER_RESTARTED, Event, SiloJoined, SiloLost, UpdateArrived
from fedsync.core.journal import JournalEntry, read_journal
from fedsync.core.orders import SiloFacts, WorkReport
from fedsync.model.plain_replica import RECEIVED
from fedsync.observe.ledger import Ledger
from fedsync.observe.rounds import EndedOrder, Round

TRAVEL = "travel"
"""Kind of overhead: duration of an order beyond everything that its silo reports."""

TRANSFER = "transfer"
"""Kind of overhead reported by virtual silos with a bandwidth."""

_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive local steps of one order, from ``at_s`` after the start of the run, of mean duration ``step_s``.

    ``order`` counts orders from 0; ``steps`` is fractional for a window of an order; ``batch`` is samples a step.
    """

    order: int
    at_s: float
    step_s: float
    steps: float
    batch: float


@dataclass(slots=True)
class SiloRecord:
    """Record of one silo.

    Args:
        facts: facts of the last join.
        overheads: seconds by kind, one entry an order.
        sizes: transferred bytes (both directions), one entry an order.
        ups: duration of each connected period [s].
        downs: duration of each finished absence [s].
        here_s: begin of the current connected period, or None.
    """

    facts: SiloFacts
    joined_s: float
    stretches: list[Stretch] = field(default_factory=list)
    overheads: list[Mapping[str, float]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    ups: list[float] = field(default_factory=list)
    downs: list[float] = field(default_factory=list)
    lost_s: float | None = None
    here_s: float | None = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Machine records of a run.

    ``emulated`` are the entries of the run's silo file by name. ``silos`` is in the order of this file or of joining.
    """

    config: StrategyConfig
    runtime: str
    model_bytes: int
    emulated: Mapping[str, SiloConfig]
    silos: Mapping[str, SiloRecord]
    rounds: tuple[Round, ...]


def read_record(folder: Path) -> RunRecord:
    """Read the machine records from the journal in a run's folder.

    Raises:
        FedSyncError: the journal is invalid or truncated, or nothing was trained; the error names the file.
        OSError: the journal cannot be read.
    """
    path = folder / "journal.jsonl"
    header, entries = read_journal(path)
    try:
        config = StrategyConfig.model_validate(header["config"])
        model_bytes = int(header["model_bytes"])
        reader = _MachineReader(model_bytes)
        ledger = Ledger(model_bytes=model_bytes, on_end=reader.end)
        for entry in entries:
            reader.add(entry)
            ledger.add(entry)
            reader.settle(entry.events)
        groups = [SiloConfig.model_validate(group) for group in header["silos"] or []]
        emulated = {silo.name: silo for group in groups for silo in group.expanded()}
        names = [name for name in emulated if name in reader.silos]
        silos = {name: reader.silos[name] for name in dict.fromkeys([*names, *reader.silos])}
        runtime = str(header["runtime"])
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FedSyncError(f"{path}: not the journal of a run: {problem:.200}") from error
    if not ledger.rounds or not any(silo.stretches for silo in silos.values()):
        raise FedSyncError(f"{path}: this run trained nothing, so no machine can be fitted to it")
    return RunRecord(config, runtime, model_bytes, emulated, silos, tuple(ledger.rounds))


def seconds_a_round(rounds: Iterable[Round]) -> float | None:
    """Return the mean time between commits [s], without the first commit, whose round includes loading."""
    ends = [row.at_s for row in rounds]
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


class _MachineReader:
    """Reader of journal entries, next to a `Ledger` that tracks the outcome of each order."""

    def __init__(self, model_bytes: int) -> None:
        self.silos: dict[str, SiloRecord] = {}
        self._model_bytes = model_bytes
        self._uploads: dict[str, int] = {}
        self._now_s = 0.0

    def add(self, entry: JournalEntry) -> None:
        if not self._now_s <= entry.at_s < _LONGEST_S:
            raise ValueError(f"an entry at {entry.at_s:g} s comes after one at {self._now_s:g} s")
        self._now_s = entry.at_s
        for event in entry.events:
            match event:
                case SiloJoined(at_s, name, facts):
                    self._join(name, facts, at_s)
                case SiloLost(at_s, name, reason) if name in self.silos and reason != SERVER_RESTARTED:
                    silo = self.silos[name]
                    if silo.here_s is not None:
                        silo.ups.append(at_s - silo.here_s)
                        silo.here_s, silo.lost_s = None, at_s
                case UpdateArrived(_, meta, _):
                    self._uploads[meta.update_id] = meta.nbytes

    def _join(self, name: str, facts: SiloFacts, at_s: float) -> None:
        silo = self.silos.setdefault(name, SiloRecord(facts, at_s))
        silo.facts = facts
        if silo.lost_s is not None:
            silo.downs.append(at_s - silo.lost_s)
            silo.lost_s = None
        if silo.here_s is None:
            silo.here_s = at_s

    def settle(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, UpdateArrived):
                self._uploads.pop(event.meta.update_id, None)

    def end(self, ended: EndedOrder) -> None:
        report, silo = ended.report, self.silos[ended.silo]
        if report is None or ended.order.scores_only or ended.order.apart:
            return
        took_s = ended.end_s - ended.begin_s
        if not (report.steps >= 1 and report.samples >= 1 and 0 < report.compute_s < _LONGEST_S and took_s >= 0):
            raise ValueError(f"the report of order {ended.order.update_id!r:.80} has impossible times")
        known = {kind: max(float(seconds), 0.0) for kind, seconds in report.overhead_s.items()}
        told_s = report.compute_s + sum(known.values())
        if not math.isfinite(told_s):
            raise ValueError(f"the report of order {ended.order.update_id!r:.80} has impossible times")
        down = report.metrics.get(RECEIVED, self._model_bytes)
        silo.overheads.append({**known, TRAVEL: max(took_s - told_s, 0.0)})
        silo.sizes.append(int(down) + self._uploads.get(ended.order.update_id, 0))
        train_s = ended.begin_s + (took_s - report.compute_s) / 2
        silo.stretches += _stretches(len(silo.overheads) - 1, train_s, report)


def _stretches(number: int, begin_s: float, report: WorkReport) -> list[Stretch]:
    batch, speeds = report.samples / report.steps, [window.speed for window in report.windows]
    if not speeds or not all(0 < speed < math.inf for speed in speeds) or len(speeds) > report.steps:
        return [Stretch(number, begin_s, report.compute_s / report.steps, report.steps, batch)]
    steps = report.steps / len(speeds)
    whole_s = sum(steps * batch / speed for speed in speeds)
    found = []
    for speed in speeds:
        step_s = batch / speed * report.compute_s / whole_s
        found.append(Stretch(number, begin_s, step_s, steps, batch))
        begin_s += steps * step_s
    return found
