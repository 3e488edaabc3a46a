"""Training apart: what silos train for themselves once the run is over, so that the run can be measured by it.

| subject | begins with | trained as long as |
|---|---|---|
| local | version 0 | the silo has processed samples in the run, in whole orders; or so many orders as the run says |
| tuned | the best version | the run says: one order |

Each order has the batch size, the steps and the learning rate that the silo would have had with the next version. So
alone it does the work that it did in the federation, and what differs is the others. What it trains, it keeps; the
server counts orders. One that fails is given again, `MAX_FAILURES` times in a row; a silo that is lost is not waited
for, and goes on where it was if it returns while others are at it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fedsync.core.orders import LocalWork, Subject


@dataclass(frozen=True, slots=True)
class CrossSite:
    """What silos train apart.

    Args:
        local: train alone from the first model.
        rounds: orders of that; None for as many samples as the silo has processed in the run.
        fine_tune: steps from the best model; 0 for none.
    """

    local: bool = True
    rounds: int | None = None
    fine_tune: int = 0

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """In the order in which they are trained."""
        return (*((Subject.LOCAL,) if self.local else ()), *((Subject.TUNED,) if self.fine_tune else ()))


@dataclass(slots=True)
class Apart:
    """How far silos are with what they train apart.

    Args:
        processed: samples of each silo in the run.
        work: of an order of each silo that takes part; empty before it begins.
        done: orders of the subject that is trained, by silo.
        failed: in a row, likewise.
        over: subjects that are trained.
    """

    processed: dict[str, int] = field(default_factory=dict)
    work: dict[str, LocalWork] = field(default_factory=dict)
    done: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    over: tuple[Subject, ...] = ()

    def count(self, name: str, samples: int) -> None:
        """A silo has processed so many samples in the run."""
        self.processed[name] = self.processed.get(name, 0) + samples

    def end(self, name: str) -> None:
        """A silo has done an order apart."""
        self.done[name] = self.done.get(name, 0) + 1
        self.failed.pop(name, None)

    def fail(self, name: str) -> None:
        """One has failed."""
        self.failed[name] = self.failed.get(name, 0) + 1

    def left(self, name: str, subject: Subject, rules: CrossSite, most_failures: int) -> bool:
        """Whether a silo has an order of the subject still to do."""
        if name not in self.work or self.failed.get(name, 0) >= most_failures:
            return False
        work, wanted = self.work[name], 1
        if subject is Subject.LOCAL:
            wanted = rules.rounds or -(-self.processed.get(name, 0) // (work.steps * work.batch_size))
        return self.done.get(name, 0) < wanted
