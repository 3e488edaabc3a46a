"""Training apart: what silos train for themselves once the run is over, so that the run can be measured by it.

| subject | begins with | trained for |
|---|---|---|
| local | version 0 | the samples that the silo processed in the run, in whole orders; or as many orders as it says |
| tuned | the best version | one order, of as many steps as the run says |

Each order has the batch size, the steps and the learning rate that the silo would have had with the next version. So
alone it does the work that it did in the federation, and what differs is the others. What it trains, the silo keeps;
the server counts orders. One that fails is given again, `MOST_FAILURES` times in a row. A silo that is lost is not
waited for, and goes on where it was if it returns while others are at it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fedsync.core.events import UpdateArrived
from fedsync.core.extension import Extension
from fedsync.core.orders import LocalWork, Subject, WorkOrder

MOST_FAILURES = 3


@dataclass(frozen=True, slots=True)
class CrossSite:
    """What silos train apart; by default nothing.

    Args:
        local: train alone from the first model.
        rounds: orders of that; None for as many as bring the samples that the silo has processed in the run.
        fine_tune: steps from the best model; 0 for none.
        share: local models go to other silos, whose owners let them travel.
    """

    local: bool = False
    rounds: int | None = None
    fine_tune: int = 0
    share: bool = False

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """What is trained, one after the other."""
        return (*((Subject.LOCAL,) if self.local else ()), *((Subject.TUNED,) if self.fine_tune else ()))


@dataclass(slots=True)
class Apart(Extension):
    """Progress of training apart; an extension of a run that compares silos' own models.

    Args:
        processed: samples that each silo processed in the run.
        work: of an order, for each silo that takes part; empty before any does.
        done: orders of the subject that is trained, by silo.
        failed: likewise, in a row.
        trained: silos that have a model, by subject; of those that are over.
        shared: silos whose local model the server has.
    """

    name: ClassVar[str] = "apart"
    processed: dict[str, int] = field(default_factory=dict)
    work: dict[str, LocalWork] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    trained: dict[Subject, tuple[str, ...]] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)

    def begin(self, work: Mapping[str, LocalWork]) -> None:
        """Training is over, and these are the orders that silos would have had."""
        if not self.work:
            self.work = dict(work)

    def takes(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        name = event.meta.silo
        if order.apart:
            self.end(name, shares=order.share and event.meta.nbytes > 0)
            return ""
        if not order.scores_only:
            self.count(name, event.report.samples)
        return None

    def count(self, name: str, samples: int) -> None:
        """A silo has processed so many samples in the run."""
        self.processed[name] = self.processed.get(name, 0) + samples

    def end(self, name: str, *, shares: bool) -> None:
        """A silo has done an order, and sent its model if it ``shares``."""
        self.done[name] = self.done.get(name, 0) + 1
        self.failed.pop(name, None)
        if shares and name not in self.shared:
            self.shared.append(name)

    def fail(self, name: str) -> None:
        """A silo has failed to do an order."""
        self.failed[name] = self.failed.get(name, 0) + 1

    def next(self, name: str, subject: Subject, rules: CrossSite) -> tuple[LocalWork, int, bool] | None:
        """A silo's next order; None where it has none to do, or has failed too often.

        Returns:
            Its work, how many are behind it, and whether its model is to be sent.
        """
        done, wanted = self.done.get(name, 0), self._wanted(name, subject, rules)
        if name not in self.work or self.failed.get(name, 0) >= MOST_FAILURES or done >= wanted:
            return None
        if subject is Subject.TUNED:
            return replace(self.work[name], steps=rules.fine_tune), done, False
        return self.work[name], done, rules.share and done + 1 == wanted

    def finish(self, subject: Subject, rules: CrossSite) -> None:
        """All is done that will be: those who have a model are known, and the next subject begins anew."""
        self.trained[subject] = tuple(
            name for name in self.work if self.done.get(name, 0) >= self._wanted(name, subject, rules)
        )
        self.done.clear()
        self.failed.clear()

    def _wanted(self, name: str, subject: Subject, rules: CrossSite) -> int:
        """Orders that make a silo's model."""
        if subject is Subject.TUNED or name not in self.work:
            return 1
        each = self.work[name].steps * self.work[name].batch_size
        return rules.rounds or max(-(-self.processed.get(name, 0) // each), 1)
