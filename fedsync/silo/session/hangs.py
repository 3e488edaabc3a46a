"""Finds out that what a trainer is at hangs, while its other threads answer.

`fedsync.silo.session.liveness` sees a trainer that answers nobody. This sees one whose training waits for ever for a lock, a
disk or a device that is gone: no local step ends, and neither the trainer nor a process that it started takes processor
time. One that computes, however long a step takes, is let be. Nobody can end a thread, so the whole trainer ends, once
it has told who asks; the next message starts another.

| at work | counts as hanging after |
|---|---|
| the shipped loop, or an evaluation by it | ten minutes without a sign of life |
| a loop of the user's own, which may wait for another machine; an emulated machine, which sleeps | never |
| any of them, that the server has given up, or that keeps an order waiting | a minute |
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
"""Pause between two looks [s]."""

PATIENCE_S = 600.0
"""Time without a sign of life after which the shipped loop hangs [s]."""

UNWANTED_S = 60.0
"""The same of what nobody waits for any more [s]."""

_LEAST_SHARE = 0.02
"""Share of a processor that is a sign of life. Answering that an order is in work takes less."""


@dataclass(frozen=True, slots=True)
class StepSigns:
    """What has been seen of work that is done.

    Args:
        steps: that had ended at the last look.
        cpu_s: processor time that had been taken by then [s].
        still_s: for which there was no sign of life [s].
    """

    steps: int = -1
    cpu_s: float = 0.0
    still_s: float = 0.0

    def after(self, steps: int, cpu_s: float) -> StepSigns:
        """With one more look; a look, not a time, so that a machine that was asleep does no harm."""
        # A process that has ended takes its time along, so less is no sign of life either.
        lives = steps != self.steps or cpu_s - self.cpu_s > _LEAST_SHARE * LOOK_S
        return StepSigns(steps, cpu_s, 0.0 if lives else self.still_s + LOOK_S)


class HangWatch:
    """Watches what the thread does that enters it, from another one. A context manager.

    Args:
        what: it is, for people.
        steps: how many have ended.
        unwanted: whether nobody waits for it any more.
        where: the line at which a thread stands, for people.
        waits: it may wait for something for as long as it likes.
        found: called with the error if it hangs, once.
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
