"""The kinds of balancers, and what each can be told."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsync.config.section import Section
from fedsync.config.training import PositiveInt
from fedsync.core.fitting import CurveFitter
from fedsync.core.orders import LocalWork
from fedsync.core.protocols import Balancer
from fedsync.core.sizing import Scale, Sizing
from fedsync.policies.balance.equalise import EqualisingBalancer
from fedsync.policies.balance.leader_straggler import LeaderStraggler, MovePace
from fedsync.policies.balance.multiples import InMultiples
from fedsync.policies.balance.proportional import ProportionalBalancer


class FixedConfig(Section):
    """Every silo does the same work: FedAvg."""

    kind: Literal["fixed"]

    def build(self, work: LocalWork) -> Sizing:
        """The policy: nothing is shared."""
        return Sizing(work)

    @property
    def declared(self) -> bool:
        """Whether speeds are what silos declare."""
        return False


class LinearFitConfig(Section):
    """The time of a step is taken to be in proportion to its batch."""

    kind: Literal["linear"]

    def build(self) -> CurveFitter | None:
        """The policy: nothing is to be learnt but the speed."""
        return None


class AffineFitConfig(Section):
    """The time of a step is ``max(c, a + b x)``, learnt for each silo from the batch sizes that it was given."""

    kind: Literal["affine"]

    def build(self) -> CurveFitter | None:
        """The policy."""
        return CurveFitter()


FitConfig = Annotated[LinearFitConfig | AffineFitConfig, Field(discriminator="kind")]


def _linear() -> FitConfig:
    return LinearFitConfig(kind="linear")


def _affine() -> FitConfig:
    return AffineFitConfig(kind="affine")


class SharingConfig(Section):
    """What all balancers that share a total can be told."""

    floor: PositiveInt = 1
    """Smallest batch a silo may get [samples]."""

    cap: PositiveInt | None = None
    """Largest batch a silo may get [samples]."""

    multiple: PositiveInt = 1
    """Batch sizes are multiples of it, where bounds allow: for tensor cores and compiled graphs."""

    curve: FitConfig = Field(default_factory=_affine)
    """How the time of a step is taken to follow its batch."""

    def check(self, batch_size: int) -> None:
        """Check that silos can do with ``batch_size`` in the mean.

        Raises:
            ValueError: they cannot.
        """
        if self.floor > batch_size:
            raise ValueError(f"balancer.floor {self.floor} exceeds local.batch_size {batch_size}")
        if self.cap is not None and self.cap < batch_size:
            raise ValueError(
                f"balancer.cap {self.cap} lies below local.batch_size {batch_size}: "
                "the silos could not take the total together"
            )
        if batch_size % self.multiple:
            above = -(-batch_size // self.multiple) * self.multiple
            raise ValueError(
                f"balancer.multiple {self.multiple} does not divide local.batch_size {batch_size}: multiples could not "
                f"sum to the total; write local.batch_size: {above}, or another multiple"
            )


class ForecastSharingConfig(SharingConfig):
    """What balancers that go by forecasts can be told besides."""

    scale: Literal["batch", "steps", "learning_rate"] = "batch"
    """What the shares set."""

    speeds: Literal["measured", "declared"] = "measured"
    """Measured, and forecast by the predictor; or as the silos declare them, with linear curves."""

    @model_validator(mode="after")
    def _multiples_of_samples(self) -> Self:
        if self.scale == "steps" and self.multiple > 1:
            raise ValueError("balancer.multiple has no effect: balancer.scale 'steps' keeps batch sizes")
        return self

    @property
    def declared(self) -> bool:
        """Whether speeds are what silos declare."""
        return self.speeds == "declared"

    def _sizing(self, work: LocalWork, balancer: Balancer) -> Sizing:
        return Sizing(
            work,
            balancer if self.multiple == 1 else InMultiples(balancer, self.multiple),
            Scale(self.scale),
            self.floor,
            self.cap,
            fitter=None if self.declared else self.curve.build(),
        )


class ProportionalConfig(ForecastSharingConfig):
    """Work in proportion to predicted speed; what a cap cuts off is shared among the others."""

    kind: Literal["proportional"]
    curve: FitConfig = Field(default_factory=_linear)

    def build(self, work: LocalWork) -> Sizing:
        """The policy."""
        return self._sizing(work, ProportionalBalancer())


class EqualiseConfig(ForecastSharingConfig):
    """Work such that the slowest silo is done as early as possible, overhead included, whatever the curves."""

    kind: Literal["equalise"]

    def build(self, work: LocalWork) -> Sizing:
        """The policy."""
        return self._sizing(work, EqualisingBalancer())


class PaceConfig(Section):
    """How fast samples are moved from the slowest silo to the fastest."""

    step: PositiveInt
    """Samples that are moved at once [samples]."""

    window: PositiveInt
    """Rounds in a row in which the fastest silo has to be ahead of the slowest."""

    def build(self) -> MovePace:
        """The policy."""
        return MovePace(self.step, self.window)


class LeaderStragglerConfig(SharingConfig):
    """Move samples from the slowest silo to the fastest, step by step, by what the rounds took."""

    kind: Literal["leader-straggler"]
    fast: PaceConfig = Field(default_factory=lambda: PaceConfig(step=5, window=5))
    """Pace until two silos have changed places."""

    fine: PaceConfig = Field(default_factory=lambda: PaceConfig(step=1, window=20))
    """Pace from then on."""

    memory: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Share of its memory in use above which a silo is given no more."""

    def build(self, work: LocalWork) -> Sizing:
        """The policy."""
        adaptive = LeaderStraggler(self.fast.build(), self.fine.build(), self.memory, self.multiple)
        return Sizing(work, floor=self.floor, cap=self.cap, adaptive=adaptive, fitter=self.curve.build())

    @property
    def declared(self) -> bool:
        """Whether speeds are what silos declare."""
        return False


BalancerConfig = Annotated[
    FixedConfig | ProportionalConfig | EqualiseConfig | LeaderStragglerConfig, Field(discriminator="kind")
]
