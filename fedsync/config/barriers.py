"""The kinds of barriers that the papers describe, and what each can be told."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsync.config.section import Section
from fedsync.core.protocols import AnyBarrier
from fedsync.policies.barrier.climbing import ClimbingInterval
from fedsync.policies.barrier.intervals import AnyIntervalPolicy, FittedInterval, FixedInterval, HalvingInterval
from fedsync.policies.barrier.kinds.absp import Absp
from fedsync.policies.barrier.kinds.bsp import Bsp
from fedsync.policies.barrier.kinds.elastic import Elastic
from fedsync.policies.barrier.kinds.fsp import Fsp, Late, WaitFor
from fedsync.policies.barrier.kinds.sampled import Sampled, Sampling
from fedsync.policies.barrier.kinds.ssp import Asp, Ssp

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
PartOfOne = Annotated[float, Field(ge=0, le=1)]
SamplingName = Literal["basic", "dynamic", "grouped"]


class BspConfig(Section):
    """Wait for everybody, then go on together."""

    kind: Literal["bsp"]

    def build(self) -> AnyBarrier:
        """The policy."""
        return Bsp()


class AspConfig(Section):
    """Wait for nobody."""

    kind: Literal["asp"]

    def build(self) -> AnyBarrier:
        """The policy."""
        return Asp()


class SspConfig(Section):
    """Wait only when ``staleness`` orders ahead of the slowest."""

    kind: Literal["ssp"]
    staleness: Count = 3
    """Orders that a silo may be ahead of the slowest; s in the papers."""

    def build(self) -> AnyBarrier:
        """The policy."""
        return Ssp(self.staleness)


class SampledConfig(Section):
    """Wait only when more than ``staleness`` orders ahead of one of ``sample_size`` others."""

    kind: Literal["sampled"]
    sample_size: Count
    """Silos that a silo looks at; beta in the paper. 0 is ``asp``, all others ``ssp``."""

    staleness: Count = 0
    """Orders that a silo may be ahead of those; 0 is pBSP, more is pSSP."""

    sampling: SamplingName = "dynamic"
    """``basic`` always looks at the same, ``dynamic`` draws anew, ``grouped`` draws half from the fast and half from
    the slow."""

    redraw: bool = True
    """Whether a waiting silo looks at others whenever an update arrives; else it waits for its first sample."""

    def build(self) -> AnyBarrier:
        """The policy."""
        return Sampled(self.sample_size, self.staleness, Sampling(self.sampling), self.redraw)


class AbspConfig(Section):
    """Stop everybody once the first has finished and ``sync_ratio`` of all samples are processed."""

    kind: Literal["a-bsp"]
    sync_ratio: PartOfOne = 0.5
    """Share of all samples of the round that have to be processed; R_s in the paper. 1 is ``bsp``."""

    report_s: Seconds = 1.0
    """Seconds between two questions how far silos are [s]."""

    def build(self) -> AnyBarrier:
        """The policy."""
        return Absp(self.sync_ratio, self.report_s)


class ElasticConfig(Section):
    """Give each silo the number of local steps that lets all finish together."""

    kind: Literal["elastic"]
    lookahead: PositiveCount | None = None
    """Most local steps that a silo gets; left out, twice ``local.steps``."""

    floor: PositiveCount | None = None
    """Least local steps that a silo gets; left out, half of ``local.steps``; 1 in the paper."""

    # `naive` tries R^n combinations: for tests only.
    method: Literal["sweep", "zipline", "zipline_opt", "zipline_opt_bs", "full_grid_scan", "grid_scan"] = "sweep"
    """How the instant is searched; all but the two scans are exact, and ``sweep`` is the fastest."""

    @model_validator(mode="after")
    def _a_window(self) -> Self:
        if self.lookahead is not None and self.floor is not None and self.floor > self.lookahead:
            raise ValueError(f"floor {self.floor} exceeds lookahead {self.lookahead}; lower the floor")
        return self

    def build(self) -> AnyBarrier:
        """The policy."""
        return Elastic(self.lookahead, self.floor, self.method)


class FixedIntervalConfig(Section):
    """Every round takes ``interval_s`` seconds."""

    kind: Literal["fixed"]
    interval_s: Seconds
    """Seconds of a round, transfer included [s]."""

    def build(self) -> AnyIntervalPolicy:
        """The policy."""
        return FixedInterval(self.interval_s)


class BinaryIntervalConfig(Section):
    """Divide the interval by ``factor`` as long as the loss then falls faster: FSPB."""

    kind: Literal["binary"]
    interval_s: Seconds
    """Seconds of a round to begin with [s]."""

    factor: Annotated[int, Field(ge=2)] = 2
    """What the interval is divided by."""

    floor_s: Seconds = 0.1
    """The interval does not fall below this [s]."""

    @model_validator(mode="after")
    def _above_the_floor(self) -> Self:
        if self.floor_s > self.interval_s:
            raise ValueError(f"floor_s {self.floor_s:g} exceeds interval_s {self.interval_s:g}; lower the floor")
        return self

    def build(self) -> AnyIntervalPolicy:
        """The policy."""
        return HalvingInterval(self.interval_s, self.factor, self.floor_s)


class LinearIntervalConfig(Section):
    """Fit how the decrease of loss depends on the interval, stage by stage, and take the best: FSPV.

    A stage begins with trials of ``interval_s`` and about twice that.
    """

    kind: Literal["linear"]
    interval_s: Seconds
    """Seconds of a round in the first trial, transfer included [s]."""

    stage_s: Seconds = 60.0
    """Longest stage, in seconds of training [s]."""

    floor_s: Seconds | None = None
    """No round is shorter; left out, a quarter of ``interval_s`` [s]."""

    ceiling_s: Seconds | None = None
    """No round is longer; left out, four times ``interval_s`` [s]."""

    behind: PartOfOne = 0.5
    """Share of the predicted decrease of the loss below which a stage ends."""

    @model_validator(mode="after")
    def _between_the_bounds(self) -> Self:
        floor_s, ceiling_s = self._bounds()
        if not floor_s <= self.interval_s <= ceiling_s:
            raise ValueError(
                f"interval_s {self.interval_s:g} lies outside floor_s {floor_s:g} to ceiling_s {ceiling_s:g}; "
                "move the bounds"
            )
        return self

    def _bounds(self) -> tuple[float, float]:
        """A line fitted over a factor of two is trusted over a factor of four either way."""
        return self.floor_s or self.interval_s / 4, self.ceiling_s or self.interval_s * 4

    def build(self) -> AnyIntervalPolicy:
        """The policy."""
        return FittedInterval(self.interval_s, self.stage_s, *self._bounds(), self.behind)


class ClimbIntervalConfig(Section):
    """Begin with the shortest interval, and climb once trials agree that a longer one is better."""

    kind: Literal["climb"]
    floor_s: Seconds = 0.1
    """No round is shorter; nor is one shorter than twice what an order costs besides training [s]."""

    ceiling_s: Seconds = 60.0
    """No round is longer [s]."""

    factor: Annotated[float, Field(gt=1)] = 1.5
    """By how much a trial is longer or shorter."""

    gains: PositiveCount = 1
    """Gains of the loss in a trial, which takes one round more."""

    trials: Annotated[int, Field(ge=2)] = 3
    """Trials of an interval, at least, before it can be taken."""

    confidence: Annotated[float, Field(ge=0)] = 2.0
    """Standard errors by which trials have to be better, in the mean, than what came before and after."""

    rest: PositiveCount = 6
    """Rounds between two trials; twice as many after each that was no better."""

    @model_validator(mode="after")
    def _a_range(self) -> Self:
        if self.floor_s > self.ceiling_s:
            raise ValueError(f"floor_s {self.floor_s:g} exceeds ceiling_s {self.ceiling_s:g}; lower the floor")
        return self

    def build(self) -> AnyIntervalPolicy:
        """The policy."""
        return ClimbingInterval(
            self.floor_s, self.ceiling_s, self.factor, self.gains, self.trials, self.confidence, self.rest
        )


IntervalConfig = Annotated[
    FixedIntervalConfig | BinaryIntervalConfig | LinearIntervalConfig | ClimbIntervalConfig,
    Field(discriminator="kind"),
]


class WaitForConfig(Section):
    """After the deadline wait only for ``sample_size`` silos."""

    sample_size: Count
    """Silos that the round waits for after the deadline; 0 commits on the dot."""

    sampling: SamplingName = "dynamic"
    """How they are drawn, round by round: ``basic`` the same, ``dynamic`` anew, ``grouped`` half fast and half slow."""

    def build(self) -> WaitFor:
        """The value."""
        return WaitFor(self.sample_size, Sampling(self.sampling))


class FspConfig(Section):
    """Rounds of so many seconds for everybody."""

    kind: Literal["fsp"]
    interval: IntervalConfig
    """How long each round is."""

    overrun: PartOfOne = 0.5
    """Share of its last step by which a silo may be late."""

    grace: Annotated[float, Field(ge=0)] = 0.5
    """How long stragglers are waited for, as a share of the interval."""

    passes: Annotated[float, Field(gt=0)] = 1.0
    """Most that a silo goes through its data in one round; whoever is through ends the round for all."""

    late: Literal["drop", "next", "stale"] = "next"
    """What becomes of updates that come too late: discarded, part of the next commit, or the same and discounted."""

    wait_for: WaitForConfig | None = None
    """After the deadline wait only for a few; left out, for all."""

    smoothing: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Weight of the newest measurement in what a silo's orders cost besides training."""

    @model_validator(mode="after")
    def _uses_what_it_does_not_wait_for(self) -> Self:
        if self.wait_for is not None and self.late == "drop":
            raise ValueError("late 'drop' throws away what wait_for does not wait for; write late: next")
        return self

    def build(self) -> AnyBarrier:
        """The policy."""
        return Fsp(
            interval=self.interval.build(),
            overrun=self.overrun,
            grace=self.grace,
            passes=self.passes,
            late=Late(self.late),
            wait_for=self.wait_for.build() if self.wait_for is not None else None,
            smoothing=self.smoothing,
        )
