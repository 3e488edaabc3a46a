"""Progress display of a running run: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TimeElapsedColumn

from fedsync.observe.ledger import Ledger
from fedsync.observe.rounds import Round
from fedsync.observe.terminal import Terminal, WordsColumn


class RunProgress(AbstractContextManager["RunProgress"]):
    """Progress display of one run with at most ``rounds`` rounds, None if only time bounds it. Rounds within
    ``every_s`` wall-clock seconds of the last shown round are skipped.
    """

    def __init__(
        self, console: Terminal, label: str, rounds: int | None, every_s: float = 0.0, *, trained: bool = True
    ) -> None:
        self._console = console
        self._label = label
        self._rounds = rounds
        self._every_s = every_s
        self._trained = trained
        self._before: int | None = None
        self._asked = self._told = 0
        self._shown = 0
        self._begin_s, self._shown_s = 0.0, -math.inf
        self._bar = (
            Progress(
                SpinnerColumn(),
                WordsColumn("{task.description}", "bold"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                WordsColumn("{task.fields[state]}"),
                console=console,
            )
            if console.is_terminal
            else None
        )
        self._task = self._bar.add_task(label, total=rounds, state="starting") if self._bar else None

    def __enter__(self) -> Self:
        (self._bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def follow(self, ledger: Ledger) -> None:
        """Show news since the last call; rounds known at the first call belong to an earlier process, so skip them."""
        self._rounds = ledger.steered.stop.get("rounds", self._rounds)
        if self._before is None:
            self._begin_s = time.monotonic()  # only now: processes and libraries take long to start
            self._before, self._asked = len(ledger.rounds), ledger.steered.asked
            self._shown = self._before
        self._show_operator(ledger)
        for news in ledger.lost.since(self._told):
            self._console.print(f"{self._label:<12} {news}", style="red", soft_wrap=True)
        self._told = ledger.lost.told
        if len(ledger.rounds) == self._shown:
            return
        first = self._shown
        if self._every_s > 0:
            now_s = time.monotonic()
            if ledger.stopped is None and now_s < self._shown_s + self._every_s:
                return
            first, self._shown_s = len(ledger.rounds) - 1, now_s
        self._shown = len(ledger.rounds)
        for number, row in enumerate(ledger.rounds[first:], first + 1):
            self._show(number, row, ledger)

    def _show_operator(self, ledger: Ledger) -> None:
        for mark in ledger.steered.since(self._asked):
            text = f"{mark.who} may not {mark.text}: {mark.refused}" if mark.refused else f"{mark.who} {mark.text}"
            self._console.print(
                f"{self._label:<12} {text}, {mark.at_s:.1f} s after the server began",
                markup=False, soft_wrap=True,
            )  # fmt: skip
        if self._asked < ledger.steered.asked and self._bar is not None and self._task is not None:
            self._bar.update(self._task, total=self._rounds)
        self._asked = ledger.steered.asked

    def _show(self, number: int, row: Round, ledger: Ledger) -> None:
        """Show a round; ``number`` counts rounds from 1, and is below the version after a rollback."""
        share = row.silos[row.slowest]
        # A version is evaluated at the start of the next round, so the newest accuracy is one round old.
        accuracy = "-" if ledger.accuracy is None else f"{ledger.accuracy:.3f}"
        loss = ledger.loss_words(row)
        slowest = f"slowest {row.slowest} ({share.compute_s + share.overhead_s:.1f} s)"
        if self._bar is not None and self._task is not None:
            scores = f"{f'accuracy {accuracy}' if ledger.accuracy is not None else loss}  " if self._trained else ""
            state = f"{scores}{slowest}  {self._eta(number)}"
            self._bar.update(self._task, completed=number, state=state)
            return
        total = f"/{self._rounds}" if self._rounds else ""
        scores = f"{loss:<12}  accuracy {accuracy:>5}  " if self._trained else ""
        self._console.print(
            f"{self._label:<12} round {number:>4}{total}  {row.at_s:>9.1f} s  {scores}{slowest}  {self._eta(number)}",
            soft_wrap=True,
        )

    def _eta(self, done: int) -> str:
        if not self._rounds:
            return ""
        left_s = (time.monotonic() - self._begin_s) / (done - (self._before or 0)) * max(self._rounds - done, 0)
        return f"ETA {int(left_s // 60)}:{int(left_s % 60):02d}"
