"""Detection of hung work in a trainer whose other threads still answer.

`fedsync.silo.session.liveness` detects a trainer that does not answer. This module detects training that waits for ever
for a lock, a disk or a device that is gone. Then no local step ends, and neither the trainer nor its child processes
use processor time. A busy trainer is never treated as hung, however long a step takes. A thread cannot be killed, so
the whole trainer ends after it has reported the error; the next message starts another.

| work | counts as hung after |
|---|---|
| the shipped loop, or an evaluation by it | ten minutes without a sign of life |
| a loop of the user's own, which may wait for another machine; an emulated machine, which sleeps | never |
| any of them, once the server has given it up or it blocks a queued order | a minute |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Self

import psutil

from fedsync.common import foreign
from fedsync.common.errors import Hanging

logger = foreign.logger(__name__)

LOOK_S = 5.0
"""Pause between two checks [s]."""

PATIENCE_S = 600.0
"""Time without a sign of life after which the shipped loop counts as hung [s]."""

UNWANTED_S = 60.0
"""The same limit for work whose result nobody waits for [s]."""

_LEAST_SHARE = 0.02
"""Share of a processor that counts as a sign of life. Progress replies take less."""


@dataclass(frozen=True, slots=True)
class StepSigns:
    """Signs of life of running work: steps and processor time [s] at the last check, and time without a sign [s]."""

    steps: int = -1
    cpu_s: float = 0.0
    still_s: float = 0.0

    def after(self, steps: int, cpu_s: float) -> StepSigns:
        """Add a check; silence counts in checks, not in time, so that a suspended machine does no harm."""
        # A child process that ends takes its processor time out of the sum, so less time is no sign of life either.
        lives = steps != self.steps or cpu_s - self.cpu_s > _LEAST_SHARE * LOOK_S
        return StepSigns(steps, cpu_s, 0.0 if lives else self.still_s + LOOK_S)


class HangWatch:
    """Context manager that watches the work of its thread from another thread.

    Args:
        unwanted: returns whether nobody waits for the work.
        where: returns the code line of a thread, for people.
        waits: the work may wait for any length of time.
        found: called once with the error if the work hangs.
    """

    def __init__(
        self,
        what: str,
        steps: Callable[[], int],
        unwanted: Callable[[], bool],
        found: Callable[[Hanging], None],
        where: Callable[[int], str],
        *,
        waits: bool,
    ) -> None:
        self._what, self._steps, self._unwanted, self._found = what, steps, unwanted, found
        self._where, self._waits = where, waits
        self._over = threading.Event()
        self._thread = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        threading.Thread(target=self._look, daemon=True).start()
        return self

    def __exit__(self, *what: object) -> None:
        self._over.set()

    def _look(self) -> None:
        signs = StepSigns()
        while not self._over.wait(LOOK_S):
            signs = signs.after(self._steps(), _processor_s())
            patience_s = UNWANTED_S if self._unwanted() else inf if self._waits else PATIENCE_S
            if signs.still_s >= patience_s:
                self._found(self._error(signs))
                return

    def _error(self, signs: StepSigns) -> Hanging:
        logger.warning("%s hangs here:", self._what)
        where = self._where(self._thread)
        return Hanging(
            f"{self._what} hangs, after {signs.steps} steps, in {where}: for {signs.still_s:.0f} s no step ended and "
            "no processor time was taken. The trainer ends, and the next message starts another"
        )


def _processor_s() -> float:
    """Processor time of this process and its living descendants, without the calling thread [s].

    Listing descendants reads the whole process table. On a busy machine that alone would look like a sign of life.
    """
    own = psutil.Process()
    taken = -time.thread_time()
    for each in (own, *own.children(recursive=True)):
        try:
            times = each.cpu_times()
        except psutil.Error:
            continue
        taken += float(times.user + times.system)
    return taken
