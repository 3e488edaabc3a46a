"""Live terminal view of a running or finished run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table

from fedsync.common.errors import ConfigError
from fedsync.core.journal import JournalEntry
from fedsync.extras.watch.absences import AWAY, DROPPED, GONE, Absences
from fedsync.observe.ledger import KEPT_ROUNDS, Ledger
from fedsync.observe.lost_silos import MOST_NAMED
from fedsync.observe.rounds import EndedOrder
from fedsync.observe.run_state import (
    NO_RUN,
    before_its_beginning,
    is_cut_off,
    natural,
    read_summary,
    resumes_itself,
    way_on,
    why_failed,
)
from fedsync.observe.steered import SteeredRun
from fedsync.observe.tables import new_table, silo_table
from fedsync.observe.tail import Tail
from fedsync.observe.terminal import Terminal, words

MOST_ROWS = 40

MOST_ABSENCES = 12
"""Number of newest absences kept for each silo and reason."""

_POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class _Pace:
    """Speed [samples/s] and overhead [s] of a silo's last order."""

    speed: float
    overhead_s: float


class LiveRun:
    """Current state of a run, updated entry by entry from its journal."""

    def __init__(self, header: dict[str, Any], on_end: Callable[[EndedOrder], None] = lambda ended: None) -> None:
        self._on_end = on_end
        self._config: dict[str, Any] = header.get("config") or {}
        self.steered = SteeredRun(self._config.get("stop"))
        self.ledger = Ledger.of(header, on_end=self._end, keep=KEPT_ROUNDS, steered=self.steered)
        self.runtime = str(header.get("runtime", ""))
        self.absences = Absences(MOST_ABSENCES)
        self._paces: dict[str, _Pace] = {}
        self._last_s = 0.0
        self.cut_off = False

    def add(self, entry: JournalEntry) -> None:
        self.ledger.add(entry)
        self._last_s = entry.at_s
        self.absences.add(entry)

    def _end(self, ended: EndedOrder) -> None:
        self._on_end(ended)
        if ended.report is not None:
            compute_s = ended.report.compute_s
            overhead_s = max(ended.end_s - ended.begin_s - compute_s, 0.0)
            self._paces[ended.silo] = _Pace(ended.report.samples / compute_s, overhead_s)

    def now_s(self, quiet_s: float) -> float:
        """Return the run's time ``quiet_s`` wall-clock seconds after the last entry; virtual time does not advance."""
        return self._last_s if self.virtual or self.ledger.stopped or self.cut_off else self._last_s + quiet_s

    @property
    def name(self) -> str:
        return str(self._config.get("name", ""))

    @property
    def virtual(self) -> bool:
        return self.runtime == "virtual"

    def speed(self, name: str) -> float | None:
        pace = self._paces.get(name)
        return None if pace is None else pace.speed

    def left_s(self) -> float | None:
        stop, rounds, bounds = self.steered.stop, self.ledger.rounds, []
        if stop.get("rounds") and rounds:
            bounds.append(max(stop["rounds"] - len(rounds), 0) * rounds[-1].at_s / len(rounds))
        if stop.get("seconds"):
            bounds.append(max(stop["seconds"] - self.ledger.seconds, 0.0))
        return min(bounds) if bounds else None

    def order_left_s(self, name: str, now_s: float) -> float | None:
        """Return the expected seconds until the silo's order ends; None without an order, or after the run's end."""
        silo, pace = self.ledger.silos[name], self._paces.get(name)
        if silo.order is None or pace is None or self.cut_off:
            return None
        train_s = silo.order.planned_samples / pace.speed
        if silo.order.budget_s is not None:
            train_s = min(train_s, silo.order.budget_s)
        return max(silo.since_s + train_s + pace.overhead_s - now_s, 0.0)

    def state_of(self, name: str, now_s: float) -> str:
        why = self.absences.why(name, now_s)
        if self.ledger.silos[name].order is not None and why != DROPPED:
            return "cut off" if self.cut_off else "working"
        return why if why in (DROPPED, AWAY, GONE) else "idle"

    def note_end(self, *, summary: bool, gone: bool) -> None:
        """Note whether the run ended without its regular stop, so that no silo works for it: ``cut_off``.

        ``summary``: the summary file exists; check this, and ``gone``, before reading the newest entries.
        """
        self.cut_off = self.ledger.stopped is None and (summary or gone)

    def view(self, quiet_s: float = 0.0, way_on: str = "") -> Group:
        rows = [self._headline(quiet_s), *([words(way_on)] if way_on else [])]
        rows += [words(f"Note: {each.words}", "red") for each in self.ledger.missing()[:MOST_NAMED]]
        return Group(*rows, self._table(self.now_s(quiet_s)))

    def _headline(self, quiet_s: float) -> RenderableType:
        ledger, total = self.ledger, self.steered.stop.get("rounds")
        rounds, accuracy, left_s = ledger.rounds, ledger.accuracy, self.left_s()
        unit = "virtual s" if self.virtual else "s"
        parts = [
            f"{self.name} ({self.runtime})",
            f"round {len(rounds)}" + (f"/{total}" if total else ""),
            "loss -" if ledger.training_loss is None else f"loss {ledger.training_loss:.4f}",
            "accuracy -" if accuracy is None else f"accuracy {accuracy:.4f}",
            f"{ledger.seconds:.1f} {unit}",
        ]
        if ledger.stopped is not None:
            parts.append(f"stopped: {ledger.stopped.reason}")
        elif self.cut_off:
            parts.append("cut off")
        elif self.steered.paused:
            parts.append("paused by the operator")
        else:
            parts.append("ETA -" if left_s is None else f"ETA {left_s:.0f} {unit}")
            if quiet_s >= 10:
                parts.append(f"nothing new for {quiet_s:.0f} s")
        return words("  ".join(parts), "bold")

    def _table(self, now_s: float) -> Table:
        columns = ("silo", "state", "order", "batch", "samples/s", "ETA s", "waiting")
        table = new_table(None, *columns, left=columns[:2])
        summary = self.ledger.summary()
        whole_s, waited = summary["seconds"], {silo["name"]: silo["wait_s"] for silo in summary["silos"]}
        silos = self.ledger.silos
        for name in sorted(silos, key=natural)[:MOST_ROWS]:
            silo = silos[name]
            pace, left_s = self._paces.get(name), self.order_left_s(name, now_s)
            table.add_row(
                name,
                self.state_of(name, now_s),
                str(silo.order.round if silo.order is not None else silo.orders + silo.failures + silo.taken),
                str(silo.batch_size or "-"),
                "-" if pace is None else f"{pace.speed:.1f}",
                "-" if left_s is None else f"{left_s:.1f}",
                f"{waited[name] / whole_s:.1%}" if whole_s else "-",
            )
        if len(silos) > MOST_ROWS:
            table.caption = f"and {len(silos) - MOST_ROWS} more"
        return table


def watch(
    folder: Path,
    console: Terminal,
    *,
    wall: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Show a run until it has ended; `ConfigError` without a run, `FedSyncError` for a damaged journal."""
    journal, summary = folder / "journal.jsonl", folder / "summary.json"
    if not journal.is_file():
        if (done := read_summary(folder)) is not None:
            console.print(silo_table(done))
            return
        if before_its_beginning(folder) is None:
            raise ConfigError(str(folder), NO_RUN, "Name the folder that --out named")
    tail, run, news_s, told = Tail(journal), None, wall(), ""
    # Without a terminal, only the final state is printed.
    live = Live(console=console, auto_refresh=False) if console.is_terminal else None
    with live or nullcontext():
        while True:
            # Check these before reading: the server writes the summary, and exits, after the last entry.
            ended, gone = summary.is_file(), is_cut_off(folder)
            for entry in tail.entries():
                run = run or LiveRun(tail.header or {})
                run.add(entry)
                news_s = wall()
            before = before_its_beginning(folder) or "nothing has happened yet"
            view: Group = Group(words(before))
            if run is None:
                ended = ended or why_failed(folder) is not None
                if live is None and before != told and not ended:
                    console.print(view)
                    told = before
            else:
                run.note_end(summary=ended, gone=gone)
                # At a terminal, the user may wait for a manual resume; virtual runs cannot be resumed.
                final = run.cut_off and (live is None or run.virtual) and not resumes_itself(folder)
                ended |= run.ledger.stopped is not None or final
                view = run.view(wall() - news_s, way_on(run.runtime, folder) if run.cut_off else "")
            if live is not None:
                live.update(view, refresh=True)
            if ended:
                break
            pause(_POLL_S)
    if live is None:
        console.print(view)
