"""Barriers that other systems published, and barriers around barriers, and what each can be told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsync.config.barriers import FspConfig
from fedsync.config.section import Section
from fedsync.config.training import NonNegative, PositiveInt
from fedsync.core.protocols import AnyBarrier
from fedsync.policies.barrier.kinds.buffered import Buffered
from fedsync.policies.barrier.kinds.compass import Compass
from fedsync.policies.barrier.late import LateRule
from fedsync.policies.barrier.wrappers.capped import Capped
from fedsync.policies.barrier.wrappers.deadline import Deadline
from fedsync.policies.barrier.wrappers.quorum import Quorum, Required

if TYPE_CHECKING:
    from fedsync.config.policies import BarrierConfig

Share = Annotated[float, Field(gt=0, le=1)]
LateName = Literal["drop", "next"]


class BufferedConfig(Section):
    """Commit every ``size`` updates; nobody waits: FedBuff."""

    kind: Literal["buffered"]
    size: PositiveInt
    """Updates of a commit, whoever sent them; K in the paper."""

    def build(self) -> AnyBarrier:
        """The policy."""
        return Buffered(self.size)


class CompassConfig(Section):
    """Between ``min_steps`` and ``max_steps`` for each silo, so that they arrive in groups: FedCompass."""

    kind: Literal["fedcompass"]
    min_steps: PositiveInt = 20
    """Least local steps of an order."""

    max_steps: PositiveInt = 100
    """Most local steps of an order."""

    latest_factor: Annotated[float, Field(ge=1)] = 1.2
    """How long a group is waited for, as a multiple of its expected duration."""

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.max_steps < self.min_steps:
            raise ValueError(f"max_steps {self.max_steps} lies below min_steps {self.min_steps}; raise max_steps")
        return self

    def build(self) -> AnyBarrier:
        """The policy."""
        return Compass(self.min_steps, self.max_steps, self.latest_factor)


class _Wrapper(Section):
    """A barrier around a barrier. What it declares is here for the checker only: the fields are each one's own."""

    if TYPE_CHECKING:
        kind: str
        late: LateName
        inner: BarrierConfig

    @model_validator(mode="after")
    def _keeps_what_is_dropped_inside(self) -> Self:
        if self.late == "next" and isinstance(self.inner, _Wrapper) and self.inner.late == "drop":
            raise ValueError(
                f"late 'next' of {self.kind} would commit what {self.inner.kind} inside it drops; "
                "write the same `late` in both"
            )
        return self


class CappedConfig(_Wrapper):
    """``inner``, but no silo is waited for longer than ``cap_s`` seconds."""

    kind: Literal["capped"]
    cap_s: Annotated[float, Field(gt=0)]
    """Seconds since a silo was sent its order after which nobody waits for it [s]."""

    late: LateName = "next"
    """Whether late updates are discarded, or part of the next commit."""

    inner: BarrierConfig
    """Any barrier, a wrapper too."""

    def build(self) -> AnyBarrier:
        """The policy."""
        return Capped(self.inner.build(), self.cap_s, LateRule(self.late))


class QuorumConfig(_Wrapper):
    """``inner``, but ``count`` silos, or a ``share`` of those that take part, are enough."""

    kind: Literal["quorum"]
    count: PositiveInt | None = None
    """Silos that are enough. Write either this or ``share``."""

    share: Share | None = None
    """Part of the silos in the round that is enough, rounded up. Write either this or ``count``."""

    late: LateName = "next"
    """Whether late updates are discarded, or part of the next commit."""

    inner: BarrierConfig
    """Any barrier, a wrapper too."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.count is None) == (self.share is None):
            raise ValueError("how many are enough is not clear; write either `count` or `share`")
        return self

    def build(self) -> AnyBarrier:
        """The policy."""
        return Quorum(self.inner.build(), Required(self.count, self.share or 1.0), LateRule(self.late))


class DeadlineConfig(_Wrapper):
    """``inner``, but no silo is waited for much longer than orders usually take."""

    kind: Literal["deadline"]
    spread: NonNegative = 3.0
    """Median absolute deviations beyond the median after which an order is late."""

    floor_s: NonNegative = 0.0
    """No deadline is shorter [s]."""

    share: Share = 0.5
    """Part of the silos that has to be in before anybody is late."""

    window: PositiveInt = 100
    """Newest orders that the median is taken of."""

    late: LateName = "next"
    """Whether late updates are discarded, or part of the next commit."""

    inner: BarrierConfig
    """Any barrier, a wrapper too."""

    def build(self) -> AnyBarrier:
        """The policy."""
        return Deadline(
            self.inner.build(),
            self.spread,
            self.floor_s,
            Required(share=self.share),
            self.window,
            LateRule(self.late),
        )


Wrapper = CappedConfig | QuorumConfig | DeadlineConfig


def mixes_rounds(barrier: BarrierConfig) -> bool:
    """Whether a commit may hold updates that began with different versions, or one alone."""
    while isinstance(barrier, CappedConfig | QuorumConfig | DeadlineConfig):
        if barrier.late != "drop":
            return True
        barrier = barrier.inner
    if isinstance(barrier, FspConfig):
        return barrier.late != "drop"
    return barrier.kind not in ("bsp", "a-bsp", "elastic")


def innermost(barrier: BarrierConfig) -> BarrierConfig:
    """The barrier inside all wrappers."""
    while isinstance(barrier, CappedConfig | QuorumConfig | DeadlineConfig):
        barrier = barrier.inner
    return barrier
