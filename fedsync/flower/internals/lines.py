"""Who is connected to a SuperLink: how many at most, and who has to go when there are too many.

A line is a connection. Whose it is, nobody knows before a request on it proves it; until then it is a stranger's.

| there are | so that | this goes |
|---|---|---|
| ``connections`` lines | the next one has a place | the oldest stranger's |
| ``connections_per_address`` strangers' lines from one address | one machine does not have all places | its oldest |
| `MOST_OF_ONE` lines of one silo | one silo does not have all places | its oldest without a request, else the new one |

Strangers never push out a silo, an operator or an app. A newcomer is never turned away for strangers: an honest silo
needs a fraction of a second until it is known, and is not the oldest then. Nothing here waits or reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

Key = TypeVar("Key")

LINES_OF_A_SUPERNODE = 4
"""A look that is held, a heartbeat, and two parts of a message."""

MOST_OF_ONE = 16
"""Lines of one silo."""

OWN_FILES = 80
"""Files that a SuperLink has open beside its lines: libraries, database, logs."""

TRUSTED = 0
"""Stands for the server's own programs and operators, where a silo has its number. No node has this one."""


@dataclass(slots=True, eq=False)
class Line:
    """One connection.

    Args:
        table: which it is in.
        address: of the peer.
        cut: ends it at once.
    """

    table: Lines
    address: str
    cut: Callable[[], None]
    owner: int | None = None
    """Number of the silo's node, `TRUSTED`, or None of a stranger."""

    busy: bool = False
    """Whether there is a request on it that is not answered."""

    held: bool = False
    """Whether that request waits for something to happen."""

    def belongs_to(self, owner: int) -> bool:
        """Note whose connection it is; False if its owner has too many of them, all of which have requests."""
        return self.owner == owner or self.table.known(self, owner)

    def release(self) -> None:
        """Note that it has ended."""
        self.table.release(self)


@dataclass(slots=True)
class Lines:
    """All connections.

    Args:
        most: of them.
        most_per_address: of strangers from one address; 0 for no such limit.
    """

    most: int
    most_per_address: int
    _all: dict[Line, None] = field(default_factory=dict)
    _strangers: dict[Line, None] = field(default_factory=dict)
    _by_address: dict[str, dict[Line, None]] = field(default_factory=dict)
    _by_owner: dict[int, dict[Line, None]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, address: str, cut: Callable[[], None]) -> Line | None:
        """Take a new connection in, for which another may have to go; None if it has to go itself."""
        there = self._by_address.get(address, {})
        if 0 < self.most_per_address <= len(there):
            self._end(next(iter(there)))
        if len(self._all) >= self.most and not self.cut_oldest():
            return None
        line = Line(self, address, cut)
        self._all[line] = self._strangers[line] = None
        self._by_address.setdefault(address, {})[line] = None
        return line

    def cut_oldest(self) -> bool:
        """End the stranger's connection that has been there longest; False if there is none."""
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._end(oldest)
        return oldest is not None

    def cut_held(self) -> None:
        """End the connections whose requests wait for something to happen: the server ends, and nothing will."""
        for line in [line for line in self._all if line.held]:
            self._end(line)

    def known(self, line: Line, owner: int) -> bool:
        """See `Line.belongs_to`."""
        if line not in self._all:
            return True
        own = self._by_owner.get(owner, {})
        if owner != TRUSTED and len(own) >= MOST_OF_ONE:
            idle = next((other for other in own if not other.busy), None)
            if idle is None:
                return False
            self._end(idle)
        self._forget(line)
        line.owner = owner
        self._all[line] = None
        self._by_owner.setdefault(owner, {})[line] = None
        return True

    def release(self, line: Line) -> None:
        """See `Line.release`."""
        if line in self._all:
            self._forget(line)

    def _end(self, line: Line) -> None:
        self._forget(line)
        line.cut()

    def _forget(self, line: Line) -> None:
        del self._all[line]
        self._strangers.pop(line, None)
        _drop(self._by_address, line.address, line)
        if line.owner is not None:
            _drop(self._by_owner, line.owner, line)


def _drop(groups: dict[Key, dict[Line, None]], key: Key, line: Line) -> None:
    """Take a line out of its group, and the group with its last line."""
    lines = groups.get(key, {})
    lines.pop(line, None)
    if not lines:
        groups.pop(key, None)


def most_lines(wanted: int, files: int) -> int:
    """How many connections a process may have that may have so many files."""
    return max(1, min(wanted, files - OWN_FILES))
