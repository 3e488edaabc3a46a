"""Which answers a look of an app's is for.

An app waits for answers to many messages, and looks for all of them each time. Each costs Flower some tenths of a
millisecond to look for, be there an answer or not: with a thousand silos, more than all else. The gate hears of each
answer as it is stored. So a look is for these, and for all only now and then, because Flower makes some answers up by
itself: for nodes that are gone, and messages that are too old. A look brings so many answers at most that nobody else
waits for long; the next one brings others.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flwr.proto.runtime_pb2 import PullAppMessagesRequest

WHOLE_S = 5.0
"""How often a look is for answers to all messages that the app waits for [s]; more seldom where it takes long."""

PAUSE = 20.0
"""Pause after such a look, by how long it took: with thousands of messages, a second where there is much to do."""

MOST_AT_ONCE = 64
"""Answers, of those that are known to be there. An app fetches as many at a time."""


class AnswerLooks:
    """Knows which answers were stored since an app's last look; several threads may ask it.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._stored: defaultdict[int, set[str]] = defaultdict(set)
        self._whole: dict[int, tuple[bytes, float]] = {}
        self._took: dict[int, float | None] = {}

    def stored(self, run: int, answers: str) -> None:
        """An answer to the message ``answers`` is there."""
        with self._lock:
            self._stored[run].add(answers)

    def worth_it(self, token: bytes, run: int, asked: PullAppMessagesRequest) -> bool:
        """Narrow what an app asks for to what may be there; False if nothing is.

        Args:
            token: of the app: another process of the same run has seen nothing.
            run: of the app.
            asked: its request, which is changed.
        """
        now_s = self._clock()
        with self._lock:
            known = sorted(self._stored.pop(run, set()).intersection(asked.message_ids))
            later = set(known[MOST_AT_ONCE:])
            if later:
                self._stored[run] = later
        before, at_s = self._whole.get(run, (b"", -inf))
        whole = before != token or now_s - at_s >= max(WHOLE_S, PAUSE * (self._took.get(run) or 0.0))
        if whole:
            self._whole[run] = token, now_s
            self._took[run] = None
        wanted = [each for each in asked.message_ids if each not in later] if whole else known[:MOST_AT_ONCE]
        del asked.message_ids[:]
        asked.message_ids.extend(wanted)
        return bool(wanted)

    def done(self, run: int) -> None:
        """The last look of a run's app has its answers."""
        if run in self._took and self._took[run] is None:
            self._took[run] = self._clock() - self._whole[run][1]

    def any(self, run: int) -> bool:
        """Whether an answer is there that no look was for."""
        with self._lock:
            return bool(self._stored.get(run))
