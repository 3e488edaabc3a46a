"""Plain values of a running or finished run for a web page.

All lists are bounded, however long the run is. Each call reads only the new entries of the journal.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

from fedsync.core.actions import Commit, Note, Rollback
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import JOURNAL, JournalEntry
from fedsync.extras.report.style import thin
from fedsync.extras.watch.absences import WAITING, pieces
from fedsync.extras.watch.live import LiveRun
from fedsync.observe.lost_silos import MOST_NAMED
from fedsync.observe.rounds import EndedOrder
from fedsync.observe.run_state import SUMMARY, before_its_beginning, is_cut_off, natural, way_on
from fedsync.observe.tail import Tail

MOST_SILOS, MOST_SPANS, MOST_POINTS, MOST_DECISIONS, MOST_COMMITS = 200, 24, 300, 40, 200
_LONGEST = 400


class RunView:
    """Thread-safe view of a run, updated from the journal in the run's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = Tail(folder / JOURNAL)
        self._lock = threading.Lock()
        self._run: LiveRun | None = None
        self._spans: defaultdict[str, deque[EndedOrder]] = defaultdict(lambda: deque(maxlen=MOST_SPANS))
        self._decisions: deque[dict[str, Any]] = deque(maxlen=MOST_DECISIONS)
        self._commits: deque[float] = deque(maxlen=MOST_COMMITS)
        self._sent_bytes: Counter[str] = Counter()
        self._entries = 0
        self._news_s = time.monotonic()

    def look(self) -> dict[str, Any]:
        """Return the current state of the run as plain JSON values. Raises `FedSyncError` if the journal is damaged."""
        with self._lock:
            # Check these before reading: the server writes the summary, and exits, after the last entry.
            summary, gone = (self._folder / SUMMARY).is_file(), is_cut_off(self._folder)
            for entry in self._tail.entries():
                self._run = self._run or LiveRun(self._tail.header or {}, self._ended)
                self._run.add(entry)
                self._add(entry)
            if self._run is None:
                return {"entries": 0, "title": self._folder.name, "why": before_its_beginning(self._folder)}
            self._run.note_end(summary=summary, gone=gone)
            return self._shown(self._run)

    def _ended(self, ended: EndedOrder) -> None:
        self._spans[ended.silo].append(ended)

    def _add(self, entry: JournalEntry) -> None:
        self._entries += 1
        self._news_s = time.monotonic()
        for event in entry.events:
            if isinstance(event, UpdateArrived):
                self._sent_bytes[event.meta.silo] += event.meta.nbytes
        made = [action for action in entry.actions if isinstance(action, Commit | Rollback)]
        self._commits.extend(entry.at_s for _ in made)
        notes = [action.text for action in entry.actions if isinstance(action, Note)]
        told = Counter(type(action).__name__ for action in entry.actions if not isinstance(action, Note))
        if notes or (entry.reason and entry.actions):
            did = ", ".join(f"{name} x{count}" if count > 1 else name for name, count in told.items())
            reason = "; ".join([*notes, *([entry.reason] if entry.reason else [])])
            self._decisions.append({"at_s": entry.at_s, "did": did[:_LONGEST], "reason": reason[:_LONGEST]})

    def _shown(self, run: LiveRun) -> dict[str, Any]:
        ledger, steered, cut = run.ledger, run.steered, run.cut_off
        quiet_s = time.monotonic() - self._news_s
        summary, now_s = ledger.summary(), run.now_s(quiet_s)
        ended = ledger.stopped is not None
        state = "stopped" if ended else "cut off" if cut else "paused" if steered.paused else "running"
        why = way_on(run.runtime, self._folder) if cut else ledger.stopped.reason if ledger.stopped else None
        names = sorted(ledger.silos, key=natural)
        waited = {silo["name"]: silo["wait_s"] for silo in summary["silos"]}
        return {
            "entries": self._entries,
            "title": run.name,
            "virtual": run.virtual,
            "state": state,
            "why": None if why is None else why[:_LONGEST],
            "now_s": now_s,
            "quiet_s": quiet_s,
            "left_s": None if ended or cut or steered.paused else run.left_s(),
            "rounds": len(ledger.rounds),
            "stop": {key: value for key, value in steered.stop.items() if isinstance(value, int | float)},
            "loss": ledger.training_loss,
            "accuracy": ledger.accuracy,
            "utilisation": summary["utilisation"],
            "bytes_up": summary["bytes_up"],
            "bytes_down": summary["bytes_down"],
            "more_silos": max(len(names) - MOST_SILOS, 0),
            "silos": [self._silo(run, name, now_s, waited[name], summary["seconds"]) for name in names[:MOST_SILOS]],
            "points": [list(point) for point in thin(ledger.rounds.points(), MOST_POINTS)],
            "commits": list(self._commits),
            "decisions": list(self._decisions),
            "operator": [[mark.at_s, mark.text[:_LONGEST], mark.refused[:_LONGEST]] for mark in steered.marks],
            "lost": [each.words[:_LONGEST] for each in ledger.missing()[:MOST_NAMED]],
            "dropped_away": sorted(steered.dropped - ledger.silos.keys()),
        }

    def _silo(self, run: LiveRun, name: str, now_s: float, wait_s: float, whole_s: float) -> dict[str, Any]:
        silo = run.ledger.silos[name]
        return {
            "name": name,
            "state": run.state_of(name, now_s),
            "orders": silo.orders,
            "failures": silo.failures,
            "batch": silo.batch_size,
            "speed": run.speed(name),
            "waiting": wait_s / whole_s if whole_s else None,
            "bytes_up": self._sent_bytes[name],
            "left_s": run.order_left_s(name, now_s),
            "since_s": None if silo.order is None else silo.since_s,
            # Begin, seconds of training (None for an order without a report), end.
            "spans": [
                [one.begin_s, None if one.report is None else one.report.compute_s, one.end_s]
                for one in self._spans[name]
            ],
            # Begin, end and reason of idle time, except plain waiting.
            "absences": [
                [one.begin_s, one.end_s, one.why]
                for one in pieces(0.0, now_s, run.absences.of(name, now_s))
                if one.why != WAITING
            ][-MOST_SPANS:],
        }
