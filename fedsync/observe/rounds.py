"""Rounds of a run in its ledger: all rounds, or only the newest rounds of a long run; and the figures of a round.

Removed rounds leave their count and an outline: time, loss and accuracy of selected rounds. The outline first has every
round, then every second, every fourth and so on. So memory does not grow with the length of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, overload

from fedsync.observe.shares import SiloShare

MOST_OUTLINED = 2048


@dataclass(slots=True)
class Round:
    """One commit.

    Args:
        at_s: seconds since training began.
        loss: mean training loss per sample over the updates of the commit. Sealed losses are attested over all commits
            since the previous attested loss; the commits between have None.
        silos: share of every silo with an update in the commit.
        metrics: figures that silos reported, pooled over updates, and figures of evaluations of the version.
        tested: number of samples behind the evaluation figures in ``metrics``, by name.
        found: scores of each silo that evaluated the version, by name.
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
        return min(self.silos, key=lambda name: self.silos[name].wait_s)


class RoundPoint(NamedTuple):
    """Point of a run's curve: commit time, training loss and accuracy, if known."""

    at_s: float
    loss: float | None
    accuracy: float | None


class Rounds:
    """Rounds by index in the run, from 0; removed rounds still count in the indices."""

    def __init__(self, kept: Iterable[Round] = ()) -> None:
        self._kept = list(kept)
        self._gone = 0
        self._outline: list[RoundPoint] = []
        self._every = 1

    def __len__(self) -> int:
        return self._gone + len(self._kept)

    def __iter__(self) -> Iterator[Round]:
        return iter(self._kept)

    @overload
    def __getitem__(self, place: int) -> Round: ...

    @overload
    def __getitem__(self, place: slice) -> list[Round]: ...

    def __getitem__(self, place: int | slice) -> Round | list[Round]:
        """Return a round by index, or the kept rounds of a slice.

        Raises:
            IndexError: the round does not exist, or was removed.
        """
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
        return len(self._kept)

    def let_go(self, until: int) -> list[Round]:
        """Reduce the rounds before index ``until`` to the outline, and return the removed rounds."""
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
        return [*self._outline, *map(_point, self._kept)]


def _point(row: Round) -> RoundPoint:
    return RoundPoint(row.at_s, row.loss, row.accuracy)


class RoundBooks(Protocol):
    """Interface of `fedsync.observe.ledger.Ledger` that `RoundFeed` uses."""

    rounds: Rounds

    def closed(self, known: int = 0) -> int:
        """As `fedsync.observe.ledger.Ledger.closed`."""


class RoundFeed:
    """Feed that returns every round of a ledger once, as soon as its scores are final."""

    def __init__(self) -> None:
        self._next = 0

    def closed(self, ledger: RoundBooks) -> list[Round]:
        """Return the newly closed rounds, in order."""
        begin, self._next = self._next, ledger.closed(self._next)
        return ledger.rounds[begin : self._next]


ROUND = ("seconds", "loss", "accuracy", "test_loss")

SHARE = ("batch_size", "steps", "samples", "compute_s", "overhead_s", "wait_s")


class Figure(NamedTuple):
    """One number of a silo in a round, or of the whole round if ``silo`` is None."""

    name: str
    value: float
    silo: str | None = None


def figures(row: Round) -> Iterator[Figure]:
    """Yield all known figures of a round, without reported metrics that have the name of a FedSync figure."""
    own = ((name, getattr(row, name)) for name in ROUND)
    yield from (Figure(name, value) for name, value in own if value is not None)
    other = {**row.metrics, **row.numbers}
    yield from (Figure(name, value) for name, value in other.items() if name not in ROUND)
    for silo, share in row.silos.items():
        yield from (Figure(name, getattr(share, name), silo) for name in SHARE)
        yield from (Figure(name, value, silo) for name, value in share.metrics.items() if name not in SHARE)
