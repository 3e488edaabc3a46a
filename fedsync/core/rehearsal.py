"""Rehearsals: what policies would come to on machines that are known, in virtual time and without training.

A fresh coordinator under `fedsync.core.kernel` plays a few rounds; nothing of a run in work is touched. So many commits
pass before anything is counted: predictors first have to see the machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedsync.core.actions import Action, Commit, Discard, Stop
from fedsync.core.apart import CrossSite
from fedsync.core.backlog import OrderInWork
from fedsync.core.coordinator import Coordinator
from fedsync.core.errors import FedSyncError
from fedsync.core.events import Event, SiloJoined, UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.kernel import Kernel, Priority
from fedsync.core.machines import TimedMachine
from fedsync.core.orders import SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.selection import Selection
from fedsync.core.state import Policies
from fedsync.core.stopping import StopRules
from fedsync.core.transfer import NO_PAYLOAD, Payload

MOST_ENTRIES = 40
"""Entries of the journal for each silo and commit after which policies count as never done."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What a rehearsal came to, over the commits that counted; names are those of silos.

    Args:
        seconds: mean time from one to the next [s].
        steps: mean of the local steps behind an update, weighed as the commit weighs updates.
        staleness: mean number of versions that were made between an update's base and its commit.
        shares: each silo's share of all samples in commits; they sum to 1.
    """

    seconds: float
    steps: float
    staleness: float
    shares: Mapping[str, float]


def rehearse(
    policies: Policies,
    machines: Mapping[str, TimedMachine],
    facts: Mapping[str, SiloFacts],
    *,
    commits: int = 4,
    warm: int = 3,
    seconds: float = float("inf"),
) -> Rehearsal | None:
    """Play policies on machines until enough commits have counted, or the time is over.

    Args:
        policies: what decides; its stop rules, evaluations and tuner are left out.
        machines: of all silos, by name; they join at 0, in this order.
        facts: of each silo.
        commits: that count.
        warm: that pass before.
        seconds: virtual time, after which what has counted by then is the result.

    Returns:
        None if nothing counted: the policies make no progress on these machines, or an error.
    """
    quiet = replace(
        policies,
        stop=StopRules(),
        tally=0,
        evaluate=0.0,
        metrics=(),
        selection=Selection(),
        cross_site=CrossSite(),
        tuner=None,
    )
    kernel = _Rehearsal(quiet, machines, facts, warm, warm + commits, seconds)
    try:
        kernel.run()
    except FedSyncError:
        return None
    return kernel.result()


class _Rehearsal(Kernel[TimedMachine]):
    """Counts what is committed."""

    upload_bytes = 0

    def __init__(
        self,
        policies: Policies,
        machines: Mapping[str, TimedMachine],
        facts: Mapping[str, SiloFacts],
        warm: int,
        until: int,
        seconds: float,
    ) -> None:
        super().__init__(Coordinator(policies), machines)
        self._facts, self._warm, self._until, self._seconds = facts, warm, until, seconds
        self._metas: dict[str, UpdateMeta] = {}
        self._counted: list[tuple[Commit, list[UpdateMeta]]] = []
        self._commits, self._entries = 0, 0
        self._begin_s = self._end_s = 0.0
        for name in machines:
            self._push(0.0, SiloJoined(0.0, name, facts[name]), Priority.PRESENCE)

    def given(self, silo: str, order: WorkOrder) -> Payload:
        return NO_PAYLOAD

    def happens(self, happening: SiloJoined, now_s: float) -> Event:
        return happening

    def ended(self, work: OrderInWork, now_s: float) -> Event:
        order, course = work.order, work.course
        assert course is not None
        seconds, steps = course.last_s - work.start_s, len(course.after_s)
        samples = steps * order.batch_size
        report = WorkReport(order.base_version, steps, samples, seconds, 0.0)
        meta = UpdateMeta.of(work.silo, order, report, self._facts[work.silo].examples, 0)
        self._metas[order.update_id] = meta
        return UpdateArrived(now_s, meta, report)

    def act(self, action: Action, now_s: float) -> None:
        match action:
            case Discard(update_id, _):
                self._metas.pop(update_id, None)
            case Commit(_, weights):
                self._commits += 1
                metas = [self._metas.pop(update_id) for update_id in weights]
                if self._commits <= self._warm:
                    self._begin_s = now_s
                else:
                    self._counted.append((action, metas))
                    self._end_s = now_s

    def decided(self, entry: JournalEntry) -> None:
        self._entries += 1
        most = MOST_ENTRIES * self._until * len(self._machines)
        if self._commits >= self._until or entry.at_s >= self._seconds or self._entries >= most:
            self._stop = Stop("it was a rehearsal")

    def result(self) -> Rehearsal | None:
        seconds = self._end_s - self._begin_s
        if not self._counted or seconds <= 0:
            return None
        metas = [meta for _, each in self._counted for meta in each]
        samples = dict.fromkeys(self._machines, 0)
        for meta in metas:
            samples[meta.silo] += meta.samples
        commits, every = len(self._counted), sum(samples.values())
        return Rehearsal(
            seconds / commits,
            sum(_mean_steps(*each) for each in self._counted) / commits,
            sum(commit.version - 1 - meta.base_version for commit, each in self._counted for meta in each) / len(metas),
            {name: count / every for name, count in samples.items()},
        )


def _mean_steps(commit: Commit, metas: list[UpdateMeta]) -> float:
    total = sum(commit.weights.values())
    return sum(commit.weights[meta.update_id] * meta.steps for meta in metas) / total
