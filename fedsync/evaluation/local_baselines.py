"""Local baselines: models that each silo trains alone after the run, for comparison with the run's model.

| subject | starts from | trained for |
|---|---|---|
| local | version 0 | a fixed number of orders, or as many as cover the samples that the silo processed in the run |
| tuned | the best version | one order with the configured number of steps |

Each order has the batch size, steps and learning rate that the silo would have had for the next version. So the silo
does the same work as in the federation, but without other silos. The silo keeps the trained model; the server only
counts orders. A failed order is repeated, up to `MOST_FAILURES` times in a row. The run does not wait for a lost silo.
A silo that returns while others still train continues where it stopped.
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
    """Models that each silo trains alone (*apart*) after the run; by default none.

    ``rounds`` counts orders; None for as many as cover the samples that the silo processed in the run. ``fine_tune``
    counts steps from the best model. ``share`` sends local models to other silos, if their owners allow it.
    """

    local: bool = False
    rounds: int | None = None
    fine_tune: int = 0
    share: bool = False

    @property
    def subjects(self) -> tuple[Subject, ...]:
        return (*((Subject.LOCAL,) if self.local else ()), *((Subject.TUNED,) if self.fine_tune else ()))


@dataclass(slots=True)
class Apart(Extension):
    """Progress of local baselines: the extension of a run in which each silo trains models alone (*apart*).

    By silo: samples ``processed`` in the run, ``work`` of one order (empty before training apart begins), orders
    ``done`` of the current subject, and consecutive ``failed`` orders. ``trained`` are silos that have a model, by
    finished subject; ``shared`` are silos whose local model the server has.
    """

    name: ClassVar[str] = "apart"
    processed: dict[str, int] = field(default_factory=dict)
    work: dict[str, LocalWork] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    trained: dict[Subject, tuple[str, ...]] = field(default_factory=dict)
    shared: list[str] = field(default_factory=list)

    def begin(self, work: Mapping[str, LocalWork]) -> None:
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
        self.processed[name] = self.processed.get(name, 0) + samples

    def end(self, name: str, *, shares: bool) -> None:
        self.done[name] = self.done.get(name, 0) + 1
        self.failed.pop(name, None)
        if shares and name not in self.shared:
            self.shared.append(name)

    def fail(self, name: str) -> None:
        self.failed[name] = self.failed.get(name, 0) + 1

    def next(self, name: str, subject: Subject, rules: CrossSite) -> tuple[LocalWork, int, bool] | None:
        """Return a silo's next work, its finished orders, and whether to send its model; None if done or given up."""
        done, wanted = self.done.get(name, 0), self._wanted(name, subject, rules)
        if name not in self.work or self.failed.get(name, 0) >= MOST_FAILURES or done >= wanted:
            return None
        if subject is Subject.TUNED:
            return replace(self.work[name], steps=rules.fine_tune), done, False
        return self.work[name], done, rules.share and done + 1 == wanted

    def finish(self, subject: Subject, rules: CrossSite) -> None:
        self.trained[subject] = tuple(
            name for name in self.work if self.done.get(name, 0) >= self._wanted(name, subject, rules)
        )
        self.done.clear()
        self.failed.clear()

    def _wanted(self, name: str, subject: Subject, rules: CrossSite) -> int:
        if subject is Subject.TUNED or name not in self.work:
            return 1
        each = self.work[name].steps * self.work[name].batch_size
        return rules.rounds or max(-(-self.processed.get(name, 0) // each), 1)
