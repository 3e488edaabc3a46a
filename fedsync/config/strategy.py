"""A strategy file: everything that a run does, but for the silos it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsync.barrier.minimum import MinimumSilos
from fedsync.config.locate import locate
from fedsync.config.policies import (
    AggregationConfig,
    BalancerConfig,
    BarrierConfig,
    CipherConfig,
    EmaConfig,
    FedAvgConfig,
    PlainConfig,
    PositiveInt,
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

if TYPE_CHECKING:
    from fedsync.train.options import LocalOptions


class StopConfig(Section):
    """When the run ends: whichever comes first."""

    rounds: PositiveInt | None = None
    seconds: Annotated[float, Field(gt=0)] | None = None
    target_accuracy: Share | None = None
    patience: PositiveInt | None = None

    @model_validator(mode="after")
    def _must_end(self) -> Self:
        if self.rounds is None and self.seconds is None:
            raise ValueError("nothing bounds the run; add `rounds` or `seconds`")
        return self

    def build(self) -> StopRules:
        """The rules."""
        return StopRules(self.rounds, self.seconds, self.target_accuracy, self.patience)


class LocalConfig(Section):
    """What a silo does with an order, and on what.

    ``threads: null`` leaves the number to the machine: PyTorch's own choice at a real silo, one where
    several silos share a machine.
    """

    steps: PositiveInt = 20
    batch_size: PositiveInt = 32
    learning_rate: Annotated[float, Field(gt=0)] = 0.1
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = "auto"
    threads: PositiveInt | None = None
    resources: bool = True

    def build(self) -> LocalOptions:
        """Options of the trainer."""
        from fedsync.train.options import LocalOptions

        return LocalOptions(
            optimizer=self.optimizer,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            device=self.device,
            threads=self.threads,
            resources=self.resources,
        )


class StrategyConfig(Section):
    """One runnable strategy.

    ``min_silos`` is how many silos must have joined before the run begins; left out, it is the number
    in the silo file, or 2 where there is none.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    seed: Annotated[int, Field(ge=0)] = 0
    min_silos: PositiveInt | None = None
    stop: StopConfig
    local: LocalConfig = Field(default_factory=LocalConfig)
    predictor: PredictorConfig = Field(default_factory=lambda: EmaConfig(kind="ema"))
    balancer: BalancerConfig
    barrier: BarrierConfig
    aggregation: AggregationConfig = Field(default_factory=lambda: FedAvgConfig(kind="fedavg"))
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
            weigher=self.aggregation.build(),
            stop=self.stop.build(),
            declared_speeds=proportional is not None and proportional.speeds == "declared",
        )
