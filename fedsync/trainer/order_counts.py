"""How often a silo was asked for something within the last hour, over all runs and restarts.

Counts are kept a minute each, in one small file of the silo that is replaced as a whole. A minute counts until it is an
hour old, so within any hour there is never more than the owner allows. Minutes that lie ahead, after a clock was set
back, count as well.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import taken
from fedsync.core.errors import ConfigError, LimitReached

_MINUTES = 60
_LOCK_S = 10.0


class OrderCounts:
    """Counts of a silo.

    Args:
        file: where they are kept; trainers of several runs share it.
        most: within an hour, of each kind.
    """

    def __init__(self, file: Path, most: Mapping[str, int]) -> None:
        self._file = file
        self._most = most

    def take(self, *kinds: str) -> None:
        """Count one more of each kind; nothing is counted where it is refused.

        Raises:
            LimitReached: one would be more than the owner allows.
            ConfigError: the file is damaged, or cannot be written.
        """
        with taken(self._file.with_suffix(".lock"), _LOCK_S) as got:
            if not got:
                raise ConfigError(str(self._file), "somebody keeps it locked", "End other trainers of this silo")
            minute = int(time.time() // 60)
            known = {kind: self._recent(counts, minute) for kind, counts in self._load().items()}
            for kind in kinds:
                counts = known.setdefault(kind, Counter())
                if counts.total() >= self._most[kind]:
                    problem = f"{counts.total()} {kind} within an hour, which is what this silo's owner allows"
                    raise LimitReached("limits", problem, f"Wait, or have the owner raise limits.{kind}_per_hour")
                counts[str(minute)] += 1
            write_atomically(self._file, json.dumps(known).encode(), OWNER_FILE)

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
