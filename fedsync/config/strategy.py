"""A strategy file: everything that a run does, but for the silos it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from fedsync.barrier.minimum import MinimumSilos
from fedsync.config.aggregation import AggregationConfig, ConstantConfig, FedAvgConfig, FedNovaConfig
from fedsync.config.barriers import AbspConfig, FspConfig
from fedsync.config.local import LocalConfig, PositiveInt
from fedsync.config.locate import locate
from fedsync.config.peers import CompassConfig, innermost
from fedsync.config.policies import (
    BalancerConfig,
    BarrierConfig,
    CipherConfig,
    EmaConfig,
    PlainConfig,
    PredictorConfig,
    ProportionalConfig,
    Share,
)
from fedsync.config.section import Section
from fedsync.config.tasks import CsvConfig, CustomConfig, TaskConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.core.coordinator import Policies
from fedsync.core.sizing import LocalWork, Scale, Sizing
from fedsync.core.stopping import StopRules

UNEQUAL_STEPS = ("fsp", "a-bsp", "elastic", "fedcompass")
"""Barriers under which silos do unequal numbers of local steps, so that a plain mean would follow the fast."""


class StopConfig(Section):
    """When the run ends: whichever comes first.

    ``relative_change`` ends it once the training loss changes by no more than this share of itself while the
    slowest silo goes through its data once.
    """

    rounds: PositiveInt | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    target_accuracy: Share | None = None
    patience: PositiveInt | None = None
    relative_change: Share | None = None

    @model_validator(mode="after")
    def _must_end(self) -> Self:
        if self.rounds is None and self.seconds is None:
            raise ValueError("nothing bounds the run; add `rounds` or `seconds`")
        return self

    def build(self) -> StopRules:
        """The rules."""
        return StopRules(self.rounds, self.seconds, self.target_accuracy, self.patience, self.relative_change)


def _usual_aggregation(sections: dict[str, Any]) -> AggregationConfig:
    """For the barrier, which stands before."""
    barrier = sections.get("barrier")
    if barrier is not None and innermost(barrier).kind in UNEQUAL_STEPS:
        return FedNovaConfig(kind="fednova")
    return FedAvgConfig(kind="fedavg")


class StrategyConfig(Section):
    """One runnable strategy.

    ``min_silos`` is how many silos must have joined before the run begins; left out, it is the number
    in the silo file, or 2 where there is none. ``aggregation`` left out is FedNova where silos do unequal
    numbers of steps, else FedAvg.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    seed: Annotated[int, Field(ge=0)] = 0
    min_silos: PositiveInt | None = None
    stop: StopConfig
    local: LocalConfig = Field(default_factory=LocalConfig)
    predictor: PredictorConfig = Field(default_factory=lambda: EmaConfig(kind="ema"))
    balancer: BalancerConfig
    barrier: BarrierConfig
    aggregation: AggregationConfig = Field(default_factory=_usual_aggregation)
    cipher: CipherConfig = Field(default_factory=lambda: PlainConfig(kind="plain"))
    task: TaskConfig

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        balancer, batch_size = self.balancer, self.local.batch_size
        if isinstance(balancer, ProportionalConfig):
            if balancer.floor > batch_size:
                raise ValueError(f"balancer.floor {balancer.floor} exceeds local.batch_size {batch_size}")
            if balancer.cap is not None and balancer.cap < batch_size:
                raise ValueError(
                    f"balancer.cap {balancer.cap} lies below local.batch_size {batch_size}: "
                    "the silos could not take the total together"
                )
            if balancer.scale == "steps" and isinstance(innermost(self.barrier), CompassConfig):
                raise ValueError("balancer.scale 'steps' has no effect: barrier.kind fedcompass sets the steps")
        return self

    @model_validator(mode="after")
    def _normalises(self) -> Self:
        pull = self.local.learning_rate * self.local.proximal
        if isinstance(self.aggregation, FedNovaConfig) and pull >= 1:
            raise ValueError(
                f"local.proximal {self.local.proximal:g} times local.learning_rate {self.local.learning_rate:g} is not "
                "below 1: silos would swing around the model they start from"
            )
        return self

    @model_validator(mode="after")
    def _discounts(self) -> Self:
        barrier, aggregation = innermost(self.barrier), self.aggregation
        counts_on_it = isinstance(barrier, FspConfig) and barrier.late == "stale"
        if counts_on_it and (
            isinstance(aggregation, FedAvgConfig) or isinstance(aggregation.staleness, ConstantConfig)
        ):
            raise ValueError(
                "barrier.late 'stale' wants stale updates discounted, which aggregation does not do; "
                "give aggregation a staleness: {kind: polynomial}, or write late: next"
            )
        return self

    @classmethod
    def load(cls, name: str | Path, overrides: Sequence[str] = ()) -> StrategyConfig:
        """Read a strategy file.

        Paths inside ``task`` are relative to the file, where something is there; otherwise they stay
        as they are, relative to where a silo runs.

        Args:
            name: path of a file, or name of a shipped strategy.
            overrides: ``a.b=value`` assignments.

        Raises:
            ConfigError: anything is wrong; names the place and the remedy.
        """
        path = locate(name)
        file = YamlFile.read(path)
        file.override(overrides)
        config = file.validate(cls)
        if not isinstance(config.task, CsvConfig | CustomConfig):
            return config

        def beside(relative: str) -> str:
            candidate = (path.parent / relative).resolve()
            return str(candidate) if candidate.exists() else relative

        return config.model_copy(update={"task": config.task.relocated(beside)})

    @property
    def report_s(self) -> float | None:
        """How often the server hears of orders in work [s]; None where no barrier wants to."""
        barrier = innermost(self.barrier)
        return barrier.report_s if isinstance(barrier, AbspConfig) else None

    def policies(self, silos: int | None = None) -> Policies:
        """Everything that decides.

        Args:
            silos: number of silos in the silo file, or None without one.
        """
        local, balancer = self.local, self.balancer
        proportional = balancer if isinstance(balancer, ProportionalConfig) else None
        return Policies(
            seed=self.seed,
            predictor=self.predictor.build(),
            sizing=Sizing(
                work=LocalWork(local.steps, local.batch_size, local.learning_rate),
                balancer=balancer.build(),
                scale=Scale(proportional.scale) if proportional else Scale.BATCH,
                floor=proportional.floor if proportional else 1,
                cap=proportional.cap if proportional else None,
            ),
            barrier=MinimumSilos(self.barrier.build(), self.min_silos or silos or 2),
            weigher=self.aggregation.build(local),
            stop=self.stop.build(),
            declared_speeds=proportional is not None and proportional.speeds == "declared",
        )
