"""The section ``auto`` of a strategy: what may be tried while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from fedsync.policies.balance.base import BalancerPolicy, FixedBalancer
from fedsync.policies.balance.proportional import ProportionalBalancer
from fedsync.policies.barrier.base import BarrierPolicy
from fedsync.policies.barrier.intervals import FixedInterval
from fedsync.policies.barrier.kinds.absp import Absp
from fedsync.policies.barrier.kinds.bsp import Bsp
from fedsync.policies.barrier.kinds.fsp import Fsp
from fedsync.policies.barrier.wrappers.overlap import Overlap
from fedsync.policies.schema import Chosen, NonNegative, PartOfOne, PositiveInt, Settings


def _usual_balancers() -> tuple[BalancerPolicy, ...]:
    return FixedBalancer(), ProportionalBalancer()


USUAL_BARRIERS: tuple[BarrierPolicy[Any], ...] = Bsp(), Absp(), Fsp(FixedInterval(1.0), overrun=0.25, passes=9.0)


@dataclass(frozen=True, slots=True)
class Auto(Settings):
    """Choose local steps, balancer and barrier while the run goes on; see `fedsync.policies.tuning.tuner.AutoTuner`."""

    every: PositiveInt = 3
    """Commits from one look at the choice to the next."""

    gain: NonNegative = 0.1
    """How much more progress a second another choice has to promise, as a share, to be taken."""

    least_share: PartOfOne = 0.1
    """Least share of an equal part of all samples in commits that every silo keeps. With 1 all silos do the same."""

    least_steps: PositiveInt = 1
    """Fewest local steps that are tried."""

    most_steps: PositiveInt = 64
    """Most local steps that are tried."""

    balancers: Annotated[tuple[BalancerPolicy, ...], Chosen("balancer", several=True)] = field(
        default_factory=_usual_balancers
    )
    """Balancers that are tried, besides the one of the strategy; left out, ``fixed`` and ``proportional``."""

    barriers: Annotated[tuple[BarrierPolicy[Any], ...], Chosen("barrier", several=True)] | None = None
    """Barriers that are tried, besides the one of the strategy; left out, those of ``bsp``, ``a-bsp`` and ``fsp`` that
    the rest of the strategy allows. An interval of rounds is set to what the local steps take."""

    overlap: PartOfOne | None = None
    """``carry`` of the `overlap` that is tried around each of them that has rounds, if ``barriers`` is left out where
    the rest of the strategy allows it; left out, none is."""

    queue_linear: bool = True
    """Whether the run of a linear model begins with `overlap` around its barrier, where the server's optimizer is made
    for that (`cautious-adam`), ``barriers`` is left out, and the rest of the strategy allows it."""

    def __post_init__(self) -> None:
        if self.least_steps > self.most_steps:
            raise ValueError(f"least_steps {self.least_steps} is above most_steps {self.most_steps}; lower it")

    def tried(self, barrier: BarrierPolicy[Any]) -> tuple[BarrierPolicy[Any], ...]:
        """Every barrier that a strategy with this one may come to; itself first.

        Its wrappers stay around each other one, but for overlap, whose carry is another choice.
        """
        bare = barrier.inner if isinstance(barrier, Overlap) else barrier
        named = USUAL_BARRIERS if self.barriers is None else self.barriers
        others = [each for each in map(bare.around, named) if each != barrier]
        if self.overlap is not None:
            around = dict.fromkeys([bare, *others])
            queued = [found for each in around if (found := self._around(each)) is not None]
            others += [each for each in queued if each != barrier]
        return barrier, *others

    def queued(self, barrier: BarrierPolicy[Any]) -> Overlap | None:
        """What the run of a linear model begins with in the place of this one; None where that has to stay."""
        return None if self.barriers is not None or barrier.queues else self._around(barrier)

    def _around(self, barrier: BarrierPolicy[Any]) -> Overlap | None:
        """`Overlap` around this one; None if it has no rounds, or no part for some silos in each."""
        return Overlap(barrier, self.overlap or 0.0) if barrier.innermost.rounds and not barrier.draws else None
