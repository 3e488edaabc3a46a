"""Counts of a silo's orders within the last hour, over all runs and restarts.

The counts of each minute are kept in one small file of the silo, which is replaced as a whole. A minute counts until it
is an hour old, so no hour exceeds the owner's limit. Minutes in the future, after a clock was set back, count as well.

A disk write costs milliseconds. So a trainer reserves a thousandth of the hourly limit at a time, then uses this
portion in memory. The unused rest of a portion counts too, after the minute or the process ends.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedsync.common.errors import ConfigError, LimitReached
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import taken

_MINUTES = 60
_PORTION = 1000
_LOCK_S = 10.0


class OrderCounts:
    """Order counts of a silo in a file that trainers of several runs share; ``most`` is the hourly limit by kind."""

    def __init__(self, file: Path, most: Mapping[str, int]) -> None:
        self._file = file
        self._most = most
        self._minute, self._left = 0, Counter[str]()
        self._alone = threading.Lock()

    def take(self, *kinds: str) -> None:
        """Count one more of each kind.

        Raises `LimitReached`, and counts nothing, beyond the owner's limit; `ConfigError` if the file is damaged, or
        cannot be written.
        """
        with self._alone:
            minute = int(time.time() // 60)
            if minute != self._minute:
                self._minute, self._left = minute, Counter()
            missing = [kind for kind in kinds if not self._left[kind]]
            if missing:
                self._left.update(self._count(missing, minute))
            self._left.subtract(kinds)

    def _count(self, kinds: Sequence[str], minute: int) -> dict[str, int]:
        with taken(self._file.with_suffix(".lock"), _LOCK_S) as got:
            if not got:
                raise ConfigError(str(self._file), "somebody keeps it locked", "End other trainers of this silo")
            portions = {}
            known = {kind: self._recent(counts, minute) for kind, counts in self._load().items()}
            for kind in kinds:
                counts = known.setdefault(kind, Counter())
                portions[kind] = min(max(1, self._most[kind] // _PORTION), self._most[kind] - counts.total())
                if portions[kind] < 1:
                    problem = f"{counts.total()} {kind} within an hour, which is what this silo's owner allows"
                    raise LimitReached("limits", problem, f"Wait, or have the owner raise limits.{kind}_per_hour")
                counts[str(minute)] += portions[kind]
            write_atomically(self._file, json.dumps(known).encode(), OWNER_FILE)
            return portions

    @staticmethod
    def _recent(counts: Mapping[str, int], minute: int) -> Counter[str]:
        return Counter({key: count for key, count in counts.items() if int(key) >= minute - _MINUTES})

    def _load(self) -> dict[str, dict[str, int]]:
        try:
            known: dict[str, dict[str, int]] = json.loads(self._file.read_bytes())
            if all(type(n) is int and int(key) for counts in known.values() for key, n in counts.items()):
                return known
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, AttributeError):
            pass
        raise ConfigError(str(self._file), "damaged: nobody knows how many orders there were", "Remove it")
