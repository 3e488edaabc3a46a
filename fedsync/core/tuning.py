"""Tuning while a run goes on: what a tuner is told, and how what it chooses takes the place of what was.

A tuner is a value with pure functions, like a policy. It is told of orders and of commits, and at a commit it may
change how much silos are asked to do and which barrier decides; nothing else of a run ever changes. All that it goes
by are events, so a replay changes the same at the same commits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from fedsync.core.actions import Action, Note
from fedsync.core.events import Folded
from fedsync.core.orders import PooledFigures, UpdateMeta, WorkOrder, WorkReport, mean_loss
from fedsync.core.protocols import AnyBarrier
from fedsync.core.sizing import Sizing
from fedsync.core.views import SiloView

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class OrderSeen:
    """One order that ended with a sound report.

    Args:
        silo: whose.
        begin_s: when it was given [s since the run began].
        end_s: when its update was in.
        order: what was asked.
        report: what the silo says it did.
    """

    silo: str
    begin_s: float
    end_s: float
    order: WorkOrder
    report: WorkReport


@dataclass(frozen=True, slots=True)
class CommitSeen:
    """One commit, and what is known then.

    Args:
        at_s: seconds since the run began.
        seed: of the run.
        silos: that are here, in order of joining.
        found_caps: largest batches found by running out of memory, by silo.
        metas: of the updates in the commit.
        loss: mean training loss behind it; where losses are sealed the newest that silos found together. None before.
    """

    at_s: float
    seed: int
    silos: Mapping[str, SiloView]
    found_caps: Mapping[str, int]
    metas: tuple[UpdateMeta, ...]
    loss: float | None


class Tuner(Protocol[S]):
    """Chooses sizes and barrier anew while a run goes on. State ``S`` is a value: it pickles."""

    def init(self) -> S: ...

    def observe(self, state: S, seen: OrderSeen) -> S:
        """State after one more order. Never changes ``state``; nor do the others."""

    def folded(self, state: S, norms: tuple[float, float]) -> S:
        """State once it is known how large the updates of a commit were.

        Args:
            state: before.
            norms: squared norm of their mean, and mean of their squared norms.
        """

    def advance(self, state: S, seen: CommitSeen) -> tuple[S, str]:
        """State after a commit; and why from now on the choice is another one, or nothing if it stays."""

    def sizing(self, state: S) -> Sizing:
        """What turns forecasts into work."""

    def barrier(self, state: S) -> AnyBarrier:
        """What decides when to commit."""

    def goes_on(self, before: S, after: S) -> bool:
        """Whether what the barrier has just said of who goes on holds after a change, too."""

    def moved(self, before: S, after: S, state: Any) -> Any:
        """State that the barrier of ``after`` goes on with, where that of ``before`` had come to ``state``."""


AnyTuner = Tuner[Any]


class TunedRun(Protocol):
    """What tuning is shown of a coordinator's state, and what it changes there."""

    barrier: Any

    @property
    def silos(self) -> Mapping[str, SiloView]: ...

    @property
    def found_caps(self) -> Mapping[str, int]: ...


@dataclass(slots=True)
class Tuning:
    """A tuner at work, or none. A value that pickles.

    Args:
        tuner: chooses; None changes nothing, ever.
        state: of the tuner.
        loss: newest that silos found together, where they seal their own.
    """

    tuner: AnyTuner | None = None
    state: Any = None
    loss: float | None = None

    def __post_init__(self) -> None:
        if self.tuner is not None:
            self.state = self.tuner.init()

    def observe(self, silo: SiloView, meta: UpdateMeta, report: WorkReport, at_s: float) -> None:
        """A sound report is in of the order that ``silo`` has in work."""
        if self.tuner is None or silo.order is None or silo.order.apart or silo.order.scores_only:
            return
        self.state = self.tuner.observe(
            self.state, OrderSeen(meta.silo, silo.since_s, at_s, silo.order, replace(report, evaluation=None))
        )

    def folded(self, event: Folded) -> None:
        if self.tuner is not None:
            self.state = self.tuner.folded(self.state, (event.mean, event.each))

    def told(self, figures: PooledFigures) -> None:
        """Silos found this together."""
        if figures.loss is not None:
            self.loss = figures.loss
        if figures.norms is not None and self.tuner is not None:
            self.state = self.tuner.folded(self.state, figures.norms)

    def goes_on(self, before: Any) -> bool:
        """Whether what the barrier has just said of who goes on holds, though it said so with state ``before``."""
        return self.tuner is not None and self.tuner.goes_on(before, self.state)

    def advance(
        self, run: TunedRun, seed: int, metas: tuple[UpdateMeta, ...], at_s: float, actions: list[Action]
    ) -> bool:
        """A commit was made; returns whether the choice is another one, which the barrier's state follows.

        Args:
            run: state of the coordinator.
            seed: of the run.
            metas: of the updates in the commit.
            at_s: seconds since the run began.
            actions: of the coordinator; the reason goes there.
        """
        if self.tuner is None:
            return False
        before, loss = self.state, mean_loss(metas)
        seen = CommitSeen(at_s, seed, run.silos, run.found_caps, metas, self.loss if loss is None else loss)
        self.state, reason = self.tuner.advance(before, seen)
        if reason:
            actions.append(Note(reason))
            run.barrier = self.tuner.moved(before, self.state, run.barrier)
        return bool(reason)
