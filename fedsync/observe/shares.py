"""Work of each silo, per commit and in total."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedsync.core.orders import MISSIZED, UpdateMeta, WorkOrder, WorkReport, fast_dataclass
from fedsync.observe.quality.metric_pool import MetricPool, pooled

_MOST_NAMED = 20


@fast_dataclass
@dataclass(frozen=True, slots=True)
class SiloShare:
    """Contribution of one silo to a round; ``wait_s`` is the time from the update's arrival to the commit.

    ``metrics`` are figures that the silo reported; see `fedsync.observe.quality.metric_pool`.
    """

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
    """Totals of one silo over a run; ``busy_s`` is compute plus overhead.

    ``taken`` counts orders that ended because an operator dropped the silo; such orders are not failures.
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
    queued: WorkOrder | None = None
    since_s: float = 0.0
    metrics: MetricPool = field(default_factory=MetricPool)

    def begin(self, order: WorkOrder, at_s: float) -> None:
        if self.order is None:
            self.order, self.since_s = order, at_s
        else:
            self.queued = order
        self.batch_size = order.batch_size

    def answered(self, update_id: str) -> WorkOrder | None:
        """Return the order with this update_id, and make it the running order; None if the silo has no such order."""
        if self.queued is not None and self.queued.update_id == update_id:
            self.order, self.queued = self.queued, self.order
        return self.order if self.order is not None and self.order.update_id == update_id else None

    def end(self, at_s: float) -> float:
        begin_s, self.since_s = self.since_s, at_s
        self.order, self.queued = self.queued, None
        self.busy_s += at_s - begin_s
        return begin_s


def missized_notes(silos: Mapping[str, SiloTotals]) -> list[str]:
    """Return a note with the silos whose batches differ from the ordered size; empty if all silos have one size."""
    if len({silo.batch_size for silo in silos.values()}) == 1:
        return []
    steps = {name: silo.metrics.values().get(MISSIZED, 0) for name, silo in sorted(silos.items())}
    named = [
        f"{name} ({n:.0f} of {silos[name].steps} steps)" for name, n in steps.items() if 10 * n > silos[name].steps
    ]
    if not named:
        return []
    said = ", ".join(named[:_MOST_NAMED]) + (", ..." if len(named) > _MOST_NAMED else "")
    return [f"batches do not have the ordered size, so balancing does not reach them: {said}; the silo's log says why"]


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
