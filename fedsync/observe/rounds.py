"""Rounds of a run, as its books have them: all, or where a run may last for weeks, the newest.

What is left of older ones is their number, and an outline: when they were, with loss and accuracy, of every round at
first, then of every second, every fourth and so on. So the books do not grow with the length of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, overload

from fedsync.observe.shares import SiloShare

MOST_OUTLINED = 2048
"""Points of an outline."""


@dataclass(slots=True)
class Round:
    """One commit.

    Args:
        round: model version it made.
        at_s: when, since training began.
        seconds: since the commit before.
        loss: mean training loss a sample over the updates in it. Where losses are sealed, what silos attest of all
            commits since the last that has one; None for those between.
        silos: share of every silo that has an update in it.
        accuracy: of the version, once silos have evaluated it, or attest what they found together.
        test_loss: mean loss on the test splits, likewise.
        metrics: figures that silos reported, pooled over the updates in it, and those of evaluations of the version.
        tested: samples behind the latter.
        numbers: all that the version scored, by name.
        found: what each silo that evaluated it found, likewise.
    """

    round: int
    at_s: float
    seconds: float
    loss: float | None
    silos: dict[str, SiloShare]
    accuracy: float | None = None
    test_loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    tested: dict[str, int] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    found: dict[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def slowest(self) -> str:
        """The silo whose update came last."""
        return min(self.silos, key=lambda name: self.silos[name].wait_s)


class RoundPoint(NamedTuple):
    """What a curve shows of a round: when it was committed [s], and training loss and accuracy, if they are known."""

    at_s: float
    loss: float | None
    accuracy: float | None


class Rounds:
    """Rounds by their place in the run, from 0; those that were let go are counted, but are not there.

    Args:
        kept: the first ones.
    """

    def __init__(self, kept: Iterable[Round] = ()) -> None:
        self._kept = list(kept)
        self._gone = 0
        self._outline: list[RoundPoint] = []
        self._every = 1

    def __len__(self) -> int:
        """How many there were, with those that were let go."""
        return self._gone + len(self._kept)

    def __iter__(self) -> Iterator[Round]:
        """Those that are there, oldest first."""
        return iter(self._kept)

    @overload
    def __getitem__(self, place: int) -> Round: ...

    @overload
    def __getitem__(self, place: slice) -> list[Round]: ...

    def __getitem__(self, place: int | slice) -> Round | list[Round]:
        """A round by its place, or of a span those that are there; raises IndexError where it is not."""
        if isinstance(place, slice):
            return [self._kept[at - self._gone] for at in range(*place.indices(len(self))) if at >= self._gone]
        at = range(len(self))[place] - self._gone
        if at < 0:
            raise IndexError(f"round {place} was let go; {len(self._kept)} are there")
        return self._kept[at]

    def append(self, row: Round) -> None:
        self._kept.append(row)

    @property
    def here(self) -> int:
        """How many are there."""
        return len(self._kept)

    def let_go(self, until: int) -> list[Round]:
        """Keep only the outline of the rounds before this place; returns those that were still there."""
        count = max(until - self._gone, 0)
        over, self._kept = self._kept[:count], self._kept[count:]
        for row in over:
            if self._gone % self._every == 0:
                self._outline.append(_point(row))
            self._gone += 1
            if len(self._outline) > MOST_OUTLINED:
                self._outline, self._every = self._outline[::2], 2 * self._every
        return over

    def points(self) -> list[RoundPoint]:
        """The run's curve: the outline, and every round that is there."""
        return [*self._outline, *map(_point, self._kept)]


def _point(row: Round) -> RoundPoint:
    return RoundPoint(row.at_s, row.loss, row.accuracy)


class RoundBooks(Protocol):
    """Books that know which rounds are over: a `fedsync.observe.ledger.Ledger`."""

    rounds: Rounds

    def closed(self, known: int = 0) -> int:
        """As `fedsync.observe.ledger.Ledger.closed`."""


class RoundFeed:
    """Hands out every round of a ledger once, as soon as its scores are known or cannot come any more."""

    def __init__(self) -> None:
        self._next = 0

    def closed(self, ledger: RoundBooks) -> list[Round]:
        """Rounds that were not handed out before, in order."""
        begin, self._next = self._next, ledger.closed(self._next)
        return ledger.rounds[begin : self._next]
