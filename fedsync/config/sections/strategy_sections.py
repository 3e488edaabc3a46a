"""Sections of a strategy file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from fedsync.common.names import SILO_NAME
from fedsync.config.cipher import CipherConfig, PlainConfig
from fedsync.config.sections.evaluation import EvaluationConfig
from fedsync.config.sections.exporter_section import ExportConfig
from fedsync.config.sections.model import ModelConfig
from fedsync.config.sections.privacy import PrivacyConfig
from fedsync.config.sections.section import SparingSection
from fedsync.config.sections.stop import StopConfig
from fedsync.config.sections.waiting import WaitingConfig
from fedsync.config.sections.wire import WireConfig
from fedsync.config.tasks.task_kinds import TaskConfig
from fedsync.config.tasks.user_config import UserConfig
from fedsync.config.training import LocalConfig, PositiveInt
from fedsync.policies.aggregate.aggregate_base import AggregationPolicy
from fedsync.policies.aggregate.aggregate_kinds import FedAvg
from fedsync.policies.aggregate.fednova import FedNova
from fedsync.policies.balance.balancer_base import BalancerPolicy
from fedsync.policies.barrier.barrier_base import Inner
from fedsync.policies.features.feature_base import FeaturePolicy
from fedsync.policies.optimize.optimizer_base import ServerOptimizerPolicy
from fedsync.policies.predict.ema import Ema
from fedsync.policies.predict.predictor_base import PredictorPolicy
from fedsync.policies.rounds.rounds_base import RoundPolicy
from fedsync.policies.schema import Chosen, PartOfOne

if TYPE_CHECKING:
    from fedsync.core.weighting import Solver

MAX_SEED = 2**63 - 1
"""Largest seed: PyTorch, NumPy and messages take numbers of 63 bits."""


def _usual_aggregation(sections: dict[str, Any]) -> AggregationPolicy:
    """Return the default aggregation, which depends on the barrier."""
    barrier = sections.get("barrier")
    return FedNova() if barrier is not None and barrier.innermost.unequal_steps else FedAvg()


@cache
def _plug_in(name: str) -> None:
    """Run a user's code, which registers policies; once per process."""
    from fedsync.common.sandbox.named_code import run_plugin

    run_plugin(name)


class StrategySections(SparingSection):
    """Sections of a strategy file, without the checks across sections in `fedsync.config.strategy`."""

    features: ClassVar[tuple[str, ...]] = ("extensions", "on_round", "initial_model", "privacy")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Name of the strategy: part of the name of the run's folder, and label in tables."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """Seed of all random numbers of the run."""

    min_silos: PositiveInt | None = None
    """Number of silos that must have joined before the run begins. Left out, all silos of the silo file, or of
    ``silos``, or 2. If given, a run that ends with fewer silos has failed; see ``on_lost_silo``."""

    on_lost_silo: Literal["warn", "fail"] = "warn"
    """Reaction to a lost silo: it is gone, its last three orders failed, or the model contains no update of it.
    ``warn``: the run continues, warns at once and in its result, and fails if it ends with fewer silos than
    ``min_silos``. ``fail``: the run fails at once."""

    most_examples: PositiveInt | None = None
    """Largest number of training samples that a silo may report; a silo that reports more is excluded. Left out, a
    billion. Where updates are weighed by examples, a silo that reports a hundred times as many as all others dominates
    the model."""

    plugin: str | None = None
    """Your own code that registers policies with ``fedsync.register``: a Python file, relative to this file, or the
    name of an installed module, as in ``my_package.policies``. Only the server runs this code."""

    silos: Annotated[list[Annotated[str, Field(pattern=SILO_NAME)]], Field(min_length=1)] | None = None
    """Names of the silos that may take part; left out, all silos that the server admits."""

    stop: StopConfig
    """Rules that end the run."""

    local: LocalConfig = Field(default_factory=LocalConfig)
    """Local training of a silo."""

    predictor: Annotated[PredictorPolicy[Any], Chosen("predictor")] = Field(default_factory=Ema)
    """Prediction of each silo's speed in its next order."""

    balancer: Annotated[BalancerPolicy, Chosen("balancer")]
    """Distribution of work among silos."""

    barrier: Inner
    """Rule that decides when updates are committed, and which silos may continue."""

    aggregation: Annotated[AggregationPolicy, Chosen("aggregation")] = Field(default_factory=_usual_aggregation)
    """Weights of updates in a commit; left out, FedNova where silos do unequal numbers of steps, else FedAvg."""

    server_optimizer: Annotated[ServerOptimizerPolicy, Chosen("server_optimizer")] | None = None
    """Optimiser that turns the weighted sum of a commit's updates into a step of the model. Left out, the model moves
    by the sum."""

    cipher: CipherConfig = Field(default_factory=lambda: PlainConfig(kind="plain"))
    """Encryption that hides updates from the server."""

    wire: WireConfig = Field(default_factory=WireConfig)
    """Number formats of unencrypted messages."""

    task: TaskConfig
    """Model and data."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """Tensors of the model that travel, and tensors that stay at their silo; left out, the task decides."""

    initial_model: str | None = None
    """State dict that the run begins with, such as ``model.pt`` of an earlier run. The path is relative to this file or
    to the working folder, and only the server reads it. Left out, the run begins with the task's own model."""

    train_config: UserConfig = Field(default_factory=dict)
    """Settings for your own training code, as in Flower's strategies: numbers, text, true or false."""

    evaluate_config: UserConfig = Field(default_factory=dict)
    """Settings for your own evaluation code, like ``train_config``."""

    fraction_evaluate: PartOfOne = 1.0
    """Share of the silos that evaluates each version, drawn anew each time; at least two silos. With 0, no silo
    evaluates. Encrypted runs refuse 0, because silos receive the last version with its evaluation."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Metrics of evaluations, choice of the best version, and comparison with models trained alone."""

    waiting: WaitingConfig = Field(default_factory=WaitingConfig)
    """Timeouts of silos."""

    export: ExportConfig | None = None
    """Further targets of the run's metrics."""

    on_round: Annotated[RoundPolicy, Chosen("on_round")] | None = None
    """Settings that change from round to round: the learning rate, and entries for your own training code. The round of
    an order is its base version + 1, also where a strategy has no rounds."""

    privacy: PrivacyConfig | None = None
    """Differential privacy of the examples or persons behind the updates; left out, updates have no noise."""

    extensions: Annotated[tuple[FeaturePolicy, ...], Chosen("extension", several=True)] | None = None
    """Optional features of your own, which ``plugin`` registers, such as stop rules or notifications."""

    @model_validator(mode="before")
    @classmethod
    def _knows_what_is_plugged_in(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("plugin"), str):
            _plug_in(data["plugin"])
        return data

    @property
    def controlled(self) -> bool:
        """Whether silos correct their local steps by control variates."""
        return self.server_optimizer is not None and self.server_optimizer.controls

    @property
    def solver(self) -> Solver:
        """Effect of a constant gradient over a silo's local steps."""
        return self.task.solver(self.local)
