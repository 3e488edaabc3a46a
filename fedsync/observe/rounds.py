"""Rounds of a run, each silo's work in them, and the metrics that silos report.

A ledger holds all rounds, or only the newest rounds of a long run. Removed rounds leave their count and an outline:
time, loss and accuracy of selected rounds. A full outline drops every second entry, which bounds its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, overload

from fedsync.core.orders import MISSIZED, UNCHANGED, UpdateMeta, WorkOrder, WorkReport

MOST_NAMES = 256
"""Maximum number of names in a pool, because a silo could send new names with every order."""


def pooling(name: str) -> Literal["largest", "sum", "mean"]:
    """Return how values of several orders or silos are pooled, from the name of a figure, which ends in its unit.

    | name | pooled | example |
    |---|---|---|
    | begins with ``peak_`` or ``max_`` | largest | ``peak_memory_bytes`` |
    | ends in ``_s``, ``_j``, ``_wh``, ``_bytes`` or ``_count``, without ``_per_`` | sum | ``energy_j`` |
    | any other | mean, weighted by samples | ``gradient_norm``, ``tokens_per_s`` |
    """
    if name.startswith(("peak_", "max_")):
        return "largest"
    return "sum" if name.endswith(("_s", "_j", "_wh", "_bytes", "_count")) and "_per_" not in name else "mean"


class MetricPool:
    """Pooled metrics of several orders."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, int]] = {}

    def add(self, metrics: Mapping[str, float], samples: int) -> None:
        for name, value in metrics.items():
            total, weight = self._parts.get(name, (0.0, 0))
            if not weight and len(self._parts) == MOST_NAMES:
                continue
            match pooling(name):
                case "largest":
                    self._parts[name] = (max(value, total) if weight else value, 1)
                case "sum":
                    self._parts[name] = (total + value, 1)
                case "mean":
                    self._parts[name] = (total + value * samples, weight + samples)

    def values(self) -> dict[str, float]:
        """Return the pooled metrics by name; safe to call while another thread adds."""
        return {name: total / weight for name, (total, weight) in sorted(self._parts.copy().items())}


def with_tested(
    metrics: Mapping[str, float], tested: dict[str, int], evaluation: Mapping[str, tuple[float, int]]
) -> dict[str, float]:
    """Add an evaluation to a version's metrics; evaluation metrics are always means over test samples. ``tested``, the
    number of samples behind each metric, is updated in place.
    """
    means = dict(metrics)
    for name, (mean, samples) in evaluation.items():
        before = tested.get(name, 0)
        tested[name] = before + samples
        means[name] = mean if not before else means[name] + (mean - means[name]) * samples / tested[name]
    return means


def pooled(parts: Iterable[WorkReport | SiloShare]) -> dict[str, float]:
    pool = MetricPool()
    for part in parts:
        if part.metrics:
            pool.add(part.metrics, part.samples)
    return pool.values()


_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class SiloShare:
    """Contribution of one silo to a round; ``wait_s`` is the time from the update's arrival to the commit."""

    batch_size: int
    steps: int
    samples: int
    compute_s: float
    overhead_s: float
    wait_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class WaitingUpdate:
    """An update that waits for its commit; ``busy_s`` is the duration of its order at the silo."""

    meta: UpdateMeta
    report: WorkReport
    batch_size: int
    at_s: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class EndedOrder:
    """A finished order; times as in the journal. ``report`` is None if the order failed or training ended first."""

    silo: str
    order: WorkOrder
    begin_s: float
    end_s: float
    report: WorkReport | None


@dataclass(slots=True)
class SiloTotals:
    """Totals of one silo over a run; ``busy_s`` is compute plus overhead, ``taken`` counts orders that ended because an
    operator dropped the silo: these are no failures.
    """

    orders: int = 0
    failures: int = 0
    taken: int = 0
    steps: int = 0
    samples: int = 0
    compute_s: float = 0.0
    busy_s: float = 0.0
    batch_size: int = 0
    order: WorkOrder | None = None
    since_s: float = 0.0
    metrics: MetricPool = field(default_factory=MetricPool)

    def begin(self, order: WorkOrder, at_s: float) -> None:
        self.order, self.since_s, self.batch_size = order, at_s, order.batch_size

    def order_of(self, update_id: str) -> WorkOrder | None:
        return self.order if self.order is not None and self.order.update_id == update_id else None

    def end(self, at_s: float) -> float:
        begin_s, self.since_s = self.since_s, at_s
        self.order = None
        self.busy_s += at_s - begin_s
        return begin_s


def step_notes(silos: Mapping[str, SiloTotals]) -> list[str]:
    """Return notes with the silos whose own loops changed nothing, or whose batches differ from the ordered size."""
    problems = {UNCHANGED: "training changed nothing in the model"}
    if len({silo.batch_size for silo in silos.values()}) > 1:
        problems[MISSIZED] = "batches do not have the ordered size, so balancing does not reach them"
    notes = []
    for metric, problem in problems.items():
        steps = {name: silo.metrics.values().get(metric, 0) for name, silo in sorted(silos.items())}
        much = {name: n for name, n in steps.items() if 10 * n > silos[name].steps}
        named = [f"{name} ({n:.0f} of {silos[name].steps} steps)" for name, n in much.items()]
        if named:
            said = ", ".join(named[:_MOST_NAMED]) + (", ..." if len(named) > _MOST_NAMED else "")
            notes.append(f"{problem}: {said}; the silo's log says why")
    return notes


def shares_of(arrivals: list[WaitingUpdate], at_s: float) -> dict[str, SiloShare]:
    """Return every silo's share of a commit at ``at_s``; several updates of a silo are summed, with the last wait."""
    shares: dict[str, SiloShare] = {}
    for arrival in arrivals:
        name, report = arrival.meta.silo, arrival.report
        overhead_s, wait_s = max(arrival.busy_s - report.compute_s, 0.0), at_s - arrival.at_s
        share = SiloShare(
            arrival.batch_size, report.steps, report.samples, report.compute_s, overhead_s, wait_s, report.metrics
        )
        before = shares.get(name)
        shares[name] = share if before is None else _added(before, share)
    return shares


def _added(first: SiloShare, second: SiloShare) -> SiloShare:
    last = min(first, second, key=lambda share: share.wait_s)
    return SiloShare(
        last.batch_size,
        first.steps + second.steps,
        first.samples + second.samples,
        first.compute_s + second.compute_s,
        first.overhead_s + second.overhead_s,
        last.wait_s,
        pooled((first, second)),
    )


MOST_OUTLINED = 2048


@dataclass(slots=True)
class Round:
    """One commit, ``at_s`` seconds after training began.

    Args:
        loss: mean training loss per sample over the updates of the commit. Sealed losses are attested over all commits
            since the previous attested loss; the commits between have None.
        silos: share of every silo with an update in the commit.
        metrics: figures that silos reported, pooled over updates, and figures of evaluations of the version.
        tested: number of samples behind the evaluation figures in ``metrics``, by name.
        found: scores of each silo that evaluated the version, by name.
        counts: whether enough silos scored the version for decisions; see `fedsync.evaluation.version_scores`.
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
    counts: bool = True

    def reaches(self, accuracy: float) -> bool:
        return self.counts and self.accuracy is not None and self.accuracy >= accuracy

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
        """Return a round, or the kept rounds of a slice; `IndexError` for a round that is missing or was removed."""
        if isinstance(place, slice):
            return [self._kept[at - self._gone] for at in range(*place.indices(len(self))) if at >= self._gone]
        at = range(len(self))[place] - self._gone
        if at < 0:
            raise IndexError(f"round {place} is no longer stored; {len(self._kept)} are")
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
